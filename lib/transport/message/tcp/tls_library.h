// SPDX-License-Identifier: Apache-2.0
// The functions of OpenSSL's libssl that are used, found when a rank is to encrypt: programs start where it is missing.
#pragma once

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

namespace fsdp::transport::tcp {

#define FSDP_TLS_FUNCTIONS(X)                                                                                          \
  X(OPENSSL_init_ssl)                                                                                                  \
  X(TLS_method)                                                                                                        \
  X(SSL_CTX_new)                                                                                                       \
  X(SSL_CTX_free)                                                                                                      \
  X(SSL_CTX_ctrl)                                                                                                      \
  X(SSL_CTX_clear_options)                                                                                             \
  X(SSL_CTX_set_ciphersuites)                                                                                          \
  X(SSL_CTX_set_num_tickets)                                                                                           \
  X(SSL_CTX_set_psk_find_session_callback)                                                                             \
  X(SSL_CTX_set_psk_use_session_callback)                                                                              \
  X(SSL_new)                                                                                                           \
  X(SSL_free)                                                                                                          \
  X(SSL_set_ex_data)                                                                                                   \
  X(SSL_get_ex_data)                                                                                                   \
  X(SSL_set_accept_state)                                                                                              \
  X(SSL_set_connect_state)                                                                                             \
  X(SSL_set_bio)                                                                                                       \
  X(SSL_session_reused)                                                                                                \
  X(SSL_do_handshake)                                                                                                  \
  X(SSL_read_ex)                                                                                                       \
  X(SSL_write_ex) X(SSL_get_error) X(SSL_export_keying_material) X(SSL_key_update) X(SSL_SESSION_new)                  \
      X(SSL_SESSION_free) X(SSL_SESSION_set1_master_key) X(SSL_SESSION_set_cipher) X(SSL_SESSION_set_protocol_version) \
          X(SSL_CIPHER_find) X(BIO_new) X(BIO_s_mem) X(BIO_read) X(BIO_write) X(BIO_ctrl_pending) X(ERR_clear_error)   \
              X(ERR_get_error) X(ERR_reason_error_string)

struct TlsLibrary {
#define FSDP_TLS_MEMBER(name) decltype(&::name) name = nullptr;
  FSDP_TLS_FUNCTIONS(FSDP_TLS_MEMBER)
#undef FSDP_TLS_MEMBER
};

// Throws UNSUPPORTED naming what is missing. The library stays loaded. Functions of libcrypto are those that libssl
// itself calls, whichever this library is linked to.
TlsLibrary load_tls_library();

}  // namespace fsdp::transport::tcp
