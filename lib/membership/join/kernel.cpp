// SPDX-License-Identifier: Apache-2.0
#include "membership/join/kernel.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/fd.h"
#include "membership/join/rendezvous.h"
#include "membership/wire/secret.h"

namespace fsdp::membership {
namespace {

constexpr uint32_t telling_ms = 3000;  // to find the others: they may come later, and then wait for their timeout

[[noreturn]] void fail_denied(const char *call) {
  fail_errno(errno,
             format_text("this process may not call {}: libfsdp needs Linux 5.3 or later, and a seccomp profile "
                         "that allows memfd_create, pidfd_open, madvise and getrandom (docs/guides/launchers.md)",
                         call));
}

void check_memory_files() {
  const Fd file(::memfd_create("fsdp", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file) fail_denied("memfd_create");
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) fail_denied("fcntl(F_ADD_SEALS)");
}

void check_advice() {
  const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  void *page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) fail_denied("mmap");
  const bool allowed = ::madvise(page, bytes, MADV_WIPEONFORK) == 0 && ::madvise(page, bytes, MADV_DONTFORK) == 0;
  const int code = errno;
  ::munmap(page, bytes);
  errno = code;
  if (!allowed) fail_denied("madvise");
}

}  // namespace

void check_kernel() {
  check_memory_files();
  if (!Fd(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)))) fail_denied("pidfd_open");
  check_advice();
  uint8_t byte;
  if (::getrandom(&byte, 1, 0) < 0 && errno != EINTR) fail_denied("getrandom");
}

void check_kernel(const WorldOptions &options, const Waiter &waiter) {
  try {
    check_kernel();
  } catch (const Error &lack) {
    WorldOptions brief = options;
    const WipedText wiped(brief.secret);
    brief.timeout_ms = std::min(brief.timeout_ms, telling_ms);
    try {
      (void)meet_processes(brief, waiter, [&](const std::string &) -> std::vector<std::byte> { throw lack; });
    } catch (const Error &) {  // what the others say of this is its own failure
    }
    throw;
  }
}

}  // namespace fsdp::membership
