// SPDX-License-Identifier: Apache-2.0
// A process that dies of a signal and writes its core for a minute or longer. It has 4 TiB of memory that it has never
// touched, which the kernel looks through page by page, and leaves out of the file. The test that started it kills it.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace slow_core {

constexpr size_t bytes = size_t{1} << 42;

// By the system call: a sanitizer would look at all of it.
inline void *map() {
  const long at =
      ::syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return at == -1 ? nullptr : reinterpret_cast<void *>(at);
}

// Why there are none here; empty if there are.
inline std::string missing() {
  std::string pattern;
  std::ifstream("/proc/sys/kernel/core_pattern") >> pattern;
  if (pattern.empty() || pattern.find_first_of("|/") != pattern.npos)
    return "cores go elsewhere: core_pattern is '" + pattern + "'";
  std::string status;
  std::getline(std::ifstream("/proc/self/status"), status, '\0');
  if (status.find("\nCoreDumping:") == status.npos) return "this kernel does not say who dumps core";
  rlimit limit{};
  ::getrlimit(RLIMIT_CORE, &limit);
  if (limit.rlim_max != RLIM_INFINITY && ::geteuid() != 0) return "the hard limit of cores is too low";
  void *memory = map();
  if (!memory) return "no 4 TiB of addresses";
  ::syscall(SYS_munmap, memory, bytes);
  return {};
}

// Where cores go.
class Folder {
 public:
  Folder() {
    if (!::mkdtemp(path_)) throw std::runtime_error("mkdtemp failed");
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder &) = delete;
  Folder &operator=(const Folder &) = delete;
  const char *path() const { return path_; }

 private:
  char path_[32] = "/tmp/fsdp-core-XXXXXX";
};

// Ends this process by a signal, with its core in that folder.
[[noreturn]] inline void die(const char *folder) {
  const rlimit all{RLIM_INFINITY, RLIM_INFINITY};
  // Memory in which nothing was ever written is no part of a core. By a system call, as above.
  if (::chdir(folder) == 0 && ::setrlimit(RLIMIT_CORE, &all) == 0)
    if (void *memory = map()) (void)!::syscall(SYS_getrandom, memory, 1, 0);
  ::signal(SIGABRT, SIG_DFL);
  ::abort();
}

}  // namespace slow_core
