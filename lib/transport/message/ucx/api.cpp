// SPDX-License-Identifier: Apache-2.0
#include "transport/message/ucx/api.h"

#include <dlfcn.h>

#include <cstdlib>

namespace fsdp::transport::ucx {
namespace {

template <class Function>
void find(void *library, const char *path, const char *name, Function &function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (!function) fail(FSDP_UNSUPPORTED, "UCX: {} has no {}: UCX 1.13 or later is needed", path, name);
}

// UCX handles SIGSEGV, SIGHUP and others as soon as it is loaded, going by the environment, which is not ours to
// change. So it gives them back, unless whoever set its variables wants that.
void give_signals_back(void *library, const char *path) {
  for (const char *name : {"UCX_HANDLE_ERRORS", "UCX_ERROR_SIGNALS", "UCX_DEBUG_SIGNO"})
    if (std::getenv(name)) return;
  void (*disable)() = nullptr;
  find(library, path, "ucs_debug_disable_signals", disable);
  disable();
}

}  // namespace

Api load_api() {
  const char *named = std::getenv("FSDP_UCX_LIBRARY");
  const char *path = named && *named ? named : "libucp.so.0";
  void *library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    const char *why = ::dlerror();
    fail(FSDP_UNSUPPORTED,
         "messages between hosts need UCX: {}; install it (Debian: libucx0), or name libucp in FSDP_UCX_LIBRARY",
         why ? why : path);
  }
  give_signals_back(library, path);
  Api api;
#define FSDP_UCX_FIND(name) find(library, path, #name, api.name);
  FSDP_UCX_FUNCTIONS(FSDP_UCX_FIND)
#undef FSDP_UCX_FIND
  unsigned major = 0, minor = 0, release = 0;
  api.ucp_get_version(&major, &minor, &release);
  if (major != UCP_API_MAJOR || minor < UCP_API_MINOR)
    fail(FSDP_UNSUPPORTED, "UCX: {} is version {}.{}.{}; this library was built with {}.{} and needs that or later",
         path, major, minor, release, UCP_API_MAJOR, UCP_API_MINOR);
  api.major = major;
  api.version = format_text("{}.{}.{}", major, minor, release);
  return api;
}

}  // namespace fsdp::transport::ucx
