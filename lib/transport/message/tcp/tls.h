// SPDX-License-Identifier: Apache-2.0
// TLS 1.3 over a connected socket, which never waits. Both ends have a pre-shared key and no certificates. Each
// connection also has its own keys (ECDHE), so a process that learns the secret later cannot decrypt recorded messages.
//
//   out:  frames --> records in memory --> socket     frames are read from the caller's memory at once
//   in:   socket --> records in memory --> the caller's memory
//
// Used by one thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include "base/fd.h"
#include "membership/wire/handshake.h"
#include "transport/names.h"

namespace fsdp::transport::tcp {

// The functions of OpenSSL's libssl that are used. They are looked up when a rank must encrypt, so that programs also
// start on systems without libssl.

#define FSDP_TLS_FUNCTIONS(X)                                                                                     \
  X(OPENSSL_init_ssl)                                                                                             \
  X(TLS_method)                                                                                                   \
  X(SSL_CTX_new)                                                                                                  \
  X(SSL_CTX_free)                                                                                                 \
  X(SSL_CTX_ctrl)                                                                                                 \
  X(SSL_CTX_clear_options)                                                                                        \
  X(SSL_CTX_set_ciphersuites)                                                                                     \
  X(SSL_CTX_set_num_tickets)                                                                                      \
  X(SSL_CTX_set_psk_find_session_callback)                                                                        \
  X(SSL_CTX_set_psk_use_session_callback)                                                                         \
  X(SSL_new)                                                                                                      \
  X(SSL_free)                                                                                                     \
  X(SSL_set_ex_data)                                                                                              \
  X(SSL_get_ex_data)                                                                                              \
  X(SSL_set_accept_state)                                                                                         \
  X(SSL_set_connect_state)                                                                                        \
  X(SSL_set_bio)                                                                                                  \
  X(SSL_session_reused)                                                                                           \
  X(SSL_do_handshake)                                                                                             \
  X(SSL_read_ex)                                                                                                  \
  X(SSL_write_ex)                                                                                                 \
  X(SSL_get_error)                                                                                                \
  X(SSL_export_keying_material)                                                                                   \
  X(SSL_key_update)                                                                                               \
  X(SSL_SESSION_new)                                                                                              \
  X(SSL_SESSION_free)                                                                                             \
  X(SSL_SESSION_set1_master_key) X(SSL_SESSION_set_cipher) X(SSL_SESSION_set_protocol_version) X(SSL_CIPHER_find) \
      X(BIO_new) X(BIO_s_mem) X(BIO_read) X(BIO_write) X(BIO_ctrl_pending) X(ERR_clear_error) X(ERR_get_error)    \
          X(ERR_reason_error_string)

struct TlsLibrary {
#define FSDP_TLS_MEMBER(name) decltype(&::name) name = nullptr;
  FSDP_TLS_FUNCTIONS(FSDP_TLS_MEMBER)
#undef FSDP_TLS_MEMBER
};

// Throws UNSUPPORTED, which names the missing part. The library stays loaded. For libcrypto, the functions that libssl
// itself calls are used, even if this library is linked to another libcrypto.
TlsLibrary load_tls_library();

}  // namespace fsdp::transport::tcp

struct iovec;

namespace fsdp::transport::tcp {

class Tls {
 public:
  // A key of AES-GCM may guard 2^24.5 records, which are 380 GB.
  static constexpr uint64_t usual_key_bytes = uint64_t{64} << 30;

  // Both ends need the same key and identity. This end changes its key after `key_bytes` bytes.
  Tls(const TlsLibrary &library, Role role, const Digest &key, std::string identity,
      uint64_t key_bytes = usual_key_bytes);
  ~Tls();
  Tls(const Tls &) = delete;
  Tls &operator=(const Tls &) = delete;

  IoState shake_hands(const Fd &socket);
  // A value that is unique to this connection and the same at both ends.
  Digest exported() const;

  // Like sendmsg: returns how many bytes were accepted, at most 64 KiB, or -1 with errno. EAGAIN means that bytes
  // accepted earlier have not all been sent.
  ssize_t send(const Fd &socket, const iovec *parts, size_t count);
  bool unsent() const noexcept { return gone_ < out_.size(); }
  // Like recvmsg; see code().
  ssize_t receive(const Fd &socket, const iovec *parts, size_t count);
  // Can there be more bytes in memory? Polling the socket does not show them.
  bool has_more() const noexcept { return more_ || code_ != 0; }
  // The reason why nothing more is read. EBADMSG: the bytes are not those that were sent; ENOMEM: received bytes were
  // lost.
  int code() const noexcept { return code_; }
  const std::string &problem() const noexcept { return problem_; }
  // The reason why nothing more is sent. Reading may still be possible.
  const std::string &write_problem() const noexcept { return write_problem_; }
  bool hung_up() const noexcept { return hung_up_; }  // the handshake failed because the connection ended
  uint64_t key_updates() const noexcept { return key_updates_; }

 private:
  struct Callbacks;
  SSL_SESSION *make_session() const noexcept;
  IoState fail_handshake(const char *why);
  IoState fail_without_key();
  bool flush(const Fd &socket);
  ssize_t fill(const Fd &socket);
  bool take(std::byte *to, size_t bytes, size_t &got);
  std::string reason() const;
  void note_problem(int code);

  const TlsLibrary &library_;
  Role role_;
  Digest key_;
  std::string identity_;
  uint64_t key_bytes_, since_key_ = 0, key_updates_ = 0;
  std::unique_ptr<SSL_CTX, decltype(TlsLibrary::SSL_CTX_free)> context_;
  std::unique_ptr<SSL, decltype(TlsLibrary::SSL_free)> ssl_;
  BIO *in_ = nullptr, *to_go_ = nullptr;  // owned by ssl_
  std::vector<std::byte> out_;            // records to send
  size_t gone_ = 0;
  bool more_ = false, ended_ = false, hung_up_ = false;
  int code_ = 0;
  std::string problem_, write_problem_;
};

}  // namespace fsdp::transport::tcp
