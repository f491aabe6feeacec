// SPDX-License-Identifier: Apache-2.0

#include "transport/nccl/library.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "base/settings.h"

namespace fsdp::transport::nccl {

namespace {

constexpr const char *plain_name = "libnccl.so.2";

// The places that were searched in vain, for the message.
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

// A library that the user names comes first. Next comes one that the program has loaded, because two NCCL libraries
// would not know of each other's work on a GPU.
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

namespace {

void check(cudaError_t code, const char *call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(FSDP_SYSTEM, format_text("{} for NCCL: {} ({})", call, cudaGetErrorString(code), cudaGetErrorName(code)),
              -1, FSDP_ORIGIN_CUDA, code);
}

}  // namespace

GpuIdentity gpu_identity(int32_t index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  GpuIdentity identity{{}, properties.pciDomainID, properties.pciBusID, properties.pciDeviceID};
  static_assert(sizeof properties.uuid == sizeof identity.number);
  std::memcpy(identity.number.data(), &properties.uuid, identity.number.size());
  return identity;
}

std::string GpuIdentity::place() const { return format_text("{:04x}:{:02x}:{:02x}", domain, bus, slot); }

int32_t gpu_generation(int32_t index) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "cudaDeviceGetAttribute");
  return major;
}

void make_current(int32_t index) noexcept { (void)cudaSetDevice(index); }

void allow_calls_during_captures() noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

namespace {

namespace fs = std::filesystem;

void add_once(std::vector<std::string> &to, std::string text) {
  if (std::find(to.begin(), to.end(), text) == to.end()) to.push_back(std::move(text));
}

std::vector<std::string> split(const char *list) {
  std::vector<std::string> parts;
  std::istringstream text(list ? list : "");
  for (std::string part; std::getline(text, part, ':');)
    if (!part.empty()) parts.push_back(part);
  return parts;
}

// Adds the folder above bin/ of each python that a shell would find. Links are followed, so that the base of a virtual
// environment is included.
void add_prefixes_of_path(std::vector<std::string> &prefixes) {
  for (const std::string &folder : split(std::getenv("PATH")))
    for (const char *name : {"python3", "python"}) {
      const fs::path python = fs::path(folder) / name;
      std::error_code none;
      if (!fs::exists(python, none)) continue;
      add_once(prefixes, fs::path(folder).parent_path().string());
      const fs::path real = fs::canonical(python, none);
      if (!none) add_once(prefixes, real.parent_path().parent_path().string());
    }
}

std::vector<std::string> python_prefixes() {
  std::vector<std::string> prefixes;
  for (const char *name : {"VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME"})
    if (const char *value = std::getenv(name); value && *value) add_once(prefixes, value);
  add_prefixes_of_path(prefixes);
  if (const char *home = std::getenv("HOME"); home && *home) add_once(prefixes, std::string(home) + "/.local");
  add_once(prefixes, "/usr/local");
  add_once(prefixes, "/usr");
  return prefixes;
}

// Adds lib/python3.12 and similar folders, and lib/python3, which Debian uses.
void add_python_folders(const fs::path &prefix, std::vector<std::string> &folders) {
  std::vector<std::string> found;
  for (const char *lib : {"lib", "lib64"}) {
    std::error_code none;
    for (fs::directory_iterator at(prefix / lib, none), end; !none && at != end; at.increment(none))
      if (at->path().filename().string().starts_with("python3")) found.push_back(at->path().string());
  }
  std::sort(found.rbegin(), found.rend());
  for (const std::string &folder : found)
    for (const char *packages : {"site-packages", "dist-packages"}) {
      std::error_code none;
      if (fs::is_directory(fs::path(folder) / packages, none)) add_once(folders, folder + '/' + packages);
    }
}

}  // namespace

std::vector<std::string> mapped_libraries() {
  std::vector<std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t start = line.find('/');
    if (start == std::string::npos) continue;
    const std::string path = line.substr(start);
    const std::string name = path.substr(path.rfind('/') + 1);
    if (name.starts_with("libnccl.so")) add_once(files, path);
  }
  return files;
}

std::vector<std::string> python_folders() {
  std::vector<std::string> folders = split(std::getenv("PYTHONPATH"));
  for (const std::string &prefix : python_prefixes()) add_python_folders(prefix, folders);
  return folders;
}

std::vector<std::string> wheel_libraries() {
  std::vector<std::string> files;
  for (const std::string &folder : python_folders()) {
    const std::string file = folder + "/nvidia/nccl/lib/libnccl.so.2";
    std::error_code none;
    if (fs::exists(file, none)) add_once(files, file);
  }
  return files;
}

}  // namespace fsdp::transport::nccl
