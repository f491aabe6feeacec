// SPDX-License-Identifier: Apache-2.0
// OpenSSL's libssl, in whose place a program may open this: it can be told to write nothing any more.
#include <dlfcn.h>
#include <openssl/ssl.h>
#include <stdatomic.h>

atomic_int failing_ssl_writes;

// The linker keeps libssl, whose functions are found by way of this library, only where one is used.
int (*const failing_ssl_needs)(const SSL *) = SSL_session_reused;

int SSL_write_ex(SSL *ssl, const void *bytes, size_t count, size_t *written) {
  int (*usual)(SSL *, const void *, size_t, size_t *);
  *(void **)&usual = dlsym(RTLD_NEXT, "SSL_write_ex");
  return atomic_load(&failing_ssl_writes) ? 0 : usual(ssl, bytes, count, written);
}
