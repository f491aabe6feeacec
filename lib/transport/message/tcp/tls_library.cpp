// SPDX-License-Identifier: Apache-2.0
#include "transport/message/tcp/tls_library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "base/error.h"

namespace fsdp::transport::tcp {
namespace {

template <class Function>
void find_function(void *library, const char *path, const char *name, Function &function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function)
    fail(FSDP_UNSUPPORTED, "FSDP_NET_ENCRYPTION=on: {} has no {}: libssl of OpenSSL 3.0 or later is needed", path,
         name);
}

}  // namespace

TlsLibrary load_tls_library() {
  const char *named = std::getenv("FSDP_SSL_LIBRARY");
  const char *path = named && *named ? named : "libssl.so.3";
  void *library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    const char *why = ::dlerror();
    fail(FSDP_UNSUPPORTED,
         "FSDP_NET_ENCRYPTION=on needs OpenSSL's libssl: {}; install it (Debian: libssl3), or name it in "
         "FSDP_SSL_LIBRARY",
         why ? why : path);
  }
  TlsLibrary found;
#define FSDP_TLS_FIND(name) find_function(library, path, #name, found.name);
  FSDP_TLS_FUNCTIONS(FSDP_TLS_FIND)
#undef FSDP_TLS_FIND
  unsigned long (*version)() = nullptr;
  find_function(library, path, "OpenSSL_version_num", version);
  if (version() < 0x30000000UL)
    fail(FSDP_UNSUPPORTED, "FSDP_NET_ENCRYPTION=on: {} is of OpenSSL {:x}: 3.0 or later is needed", path, version());
  // Its cleanup would come while the library's thread is within it: exit() does not wait for threads.
  if (found.OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr) != 1)
    fail(FSDP_SYSTEM, "FSDP_NET_ENCRYPTION=on: {} cannot be set up", path);
  return found;
}

}  // namespace fsdp::transport::tcp
