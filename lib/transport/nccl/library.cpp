// SPDX-License-Identifier: Apache-2.0

#include "transport/nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/settings.h"
#include "transport/nccl/places.h"

namespace fsdp::transport::nccl {

namespace {

constexpr const char *plain_name = "libnccl.so.2";

// The places that were tried in vain, for the message.
struct Search {
  std::string tried;

  void *open(const std::string &path, int more = 0) {
    void *handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | more);
    if (handle || more) return handle;
    const char *why = ::dlerror();
    tried += format_text("; {}", why ? why : path);
    return nullptr;
  }
};

struct Found {
  void *handle = nullptr;
  std::string how;
};

// A library that the user names comes first. Next comes one that the program has loaded, because two NCCLs would not
// know of each other's work on a GPU.
Found find_library(Search &search) {
  if (const char *named = setting("FSDP_NCCL_LIBRARY"); named && *named) {
    void *handle = search.open(named);
    if (!handle) fail(FSDP_UNSUPPORTED, "FSDP_NCCL_LIBRARY cannot be loaded{}", search.tried);
    return {handle, "named by FSDP_NCCL_LIBRARY"};
  }
  if (void *handle = search.open(plain_name, RTLD_NOLOAD)) return {handle, "already loaded"};
  for (const std::string &path : mapped_libraries())
    if (void *handle = search.open(path, RTLD_NOLOAD)) return {handle, "already loaded"};
  for (const std::string &path : wheel_libraries())
    if (void *handle = search.open(path)) return {handle, "of a Python package"};
  if (void *handle = search.open(plain_name)) return {handle, "of the system"};
  std::string folders;
  for (const std::string &folder : python_folders())
    folders += format_text("{}{}", folders.empty() ? "" : ", ", folder);
  fail(FSDP_UNSUPPORTED,
       "NCCL was not found: FSDP_NCCL_LIBRARY is not set, this process has loaded none, nvidia/nccl/lib is in none of "
       "the "
       "Python folders ({}), and the system's loader says{}",
       folders, search.tried.empty() ? "; nothing" : search.tried);
}

// Finds a symbol by name, and the file that a symbol is in.
void *find_symbol(const Found &found, const char *name) { return ::dlsym(found.handle, name); }

std::string file_of(void *symbol) {
  Dl_info info{};
  if (!::dladdr(symbol, &info) || !info.dli_fname) return plain_name;
  std::error_code none;
  const auto real = std::filesystem::canonical(info.dli_fname, none);
  return none ? info.dli_fname : real.string();
}

template <class Function>
void take(const Found &found, const std::string &path, const char *name, bool needed, Function &function) {
  function = reinterpret_cast<Function>(find_symbol(found, name));
  if (!function && needed) fail(FSDP_UNSUPPORTED, "NCCL: {} ({}) has no {}", path, found.how, name);
}

void check_version(const Library &library) {
  if (library.since(Library::oldest)) return;
  fail(FSDP_UNSUPPORTED, "NCCL: {} ({}) is version {}; {} or later is needed", library.path, library.found,
       version_text(library.version), version_text(Library::oldest));
}

}  // namespace

std::string version_text(int code) { return format_text("{}.{}.{}", code / 10000, code / 100 % 100, code % 100); }

std::shared_ptr<const Library> load_library() {
  Search search;
  const Found found = find_library(search);
  auto library = std::make_shared<Library>();
  FunctionPointer<Result(int *)>::type get_version = nullptr;
  take(found, plain_name, "ncclGetVersion", true, get_version);
  library->found = found.how;
  library->path = file_of(reinterpret_cast<void *>(get_version));
  if (const Result result = get_version(&library->version); result != success)
    throw Error(FSDP_SYSTEM, format_text("ncclGetVersion of {} returned {}", library->path, static_cast<int>(result)),
                -1, FSDP_ORIGIN_NCCL, result);
  check_version(*library);
#define FSDP_NCCL_FIND(name, ...) take(found, library->path, #name, true, library->name);
#define FSDP_NCCL_FIND_LATER(name, ...) take(found, library->path, #name, false, library->name);
  FSDP_NCCL_FUNCTIONS(FSDP_NCCL_FIND)
  FSDP_NCCL_LATER_FUNCTIONS(FSDP_NCCL_FIND_LATER)
#undef FSDP_NCCL_FIND
#undef FSDP_NCCL_FIND_LATER
  for (const std::string &path : mapped_libraries())
    if (path != library->path) library->others.push_back(path);
  return library;
}

}  // namespace fsdp::transport::nccl
