// SPDX-License-Identifier: Apache-2.0
// Wraps OpenSSL's libssl. A program that opens this library instead can tell it to write nothing any more.
#include <dlfcn.h>
#include <openssl/ssl.h>
#include <stdatomic.h>

atomic_int failing_ssl_writes;

// The linker keeps libssl only if one of its functions is used. Programs find libssl's functions through this library.
int (*const failing_ssl_needs)(const SSL *) = SSL_session_reused;

int SSL_write_ex(SSL *ssl, const void *bytes, size_t count, size_t *written) {
  int (*usual)(SSL *, const void *, size_t, size_t *);
  *(void **)&usual = dlsym(RTLD_NEXT, "SSL_write_ex");
  return atomic_load(&failing_ssl_writes) ? 0 : usual(ssl, bytes, count, written);
}
