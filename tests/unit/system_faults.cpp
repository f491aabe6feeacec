// SPDX-License-Identifier: Apache-2.0
// This file defines both names of a call. With the first macro the C library would make one of them an alias of the
// other, and with the second one an inline function.
#undef _FILE_OFFSET_BITS
#undef _FORTIFY_SOURCE

#include "system_faults.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <mutex>
#include <thread>

namespace fsdp::test {
namespace {

std::mutex mutex;
bool active = false;
SystemFault fault;
int count = 0;
const char *hit = nullptr;
std::vector<std::string> calls_made;
uint64_t ended = 0;  // scopes that ended
std::condition_variable one_ended;

using Way = SystemFault::Way;

// Returns the fault for this call. It is a copy, because a call that waits may outlive the scope.
struct Suffering {
  Way way = Way::none;
  int code = 0;
};
Suffering next(const char *call) {
  const std::lock_guard lock(mutex);
  if (!active || (!fault.call.empty() && fault.call != call)) return {};
  calls_made.push_back(call);
  const int number = count++;
  if ((fault.at >= 0 && number != fault.at) || fault.way == Way::none) return {};
  hit = call;
  return {fault.way, fault.code};
}

void await_end() {
  std::unique_lock lock(mutex);
  one_ended.wait(lock, [before = ended] { return ended != before || !active; });
}

// Makes the system call unchanged, or as the fault demands. `less` makes the call for a part of the bytes.
template <class Whole, class Less>
long suffer(const char *call, Whole whole, Less less) {
  const Suffering now = next(call);
  switch (now.way) {
    case Way::fails: errno = now.code; return -1;
    case Way::does_a_part: return less();
    case Way::kills_before: ::_exit(99);
    case Way::kills_after: whole(); ::_exit(99);
    case Way::stands: await_end(); return whole();
    case Way::waits: std::this_thread::sleep_for(std::chrono::milliseconds(now.code)); return whole();
    default: return whole();
  }
}

template <class Whole>
long suffer(const char *call, Whole whole) {
  return suffer(call, whole, whole);
}

}  // namespace

FaultScope::FaultScope(SystemFault what) {
  const std::lock_guard lock(mutex);
  fault = std::move(what);
  count = 0, hit = nullptr, active = true;
  calls_made.clear();
}
FaultScope::~FaultScope() {
  const std::lock_guard lock(mutex);
  active = false;
  ++ended;
  one_ended.notify_all();
}
int FaultScope::calls() const {
  const std::lock_guard lock(mutex);
  return count;
}
bool FaultScope::happened() const {
  const std::lock_guard lock(mutex);
  return hit;
}
std::vector<std::string> FaultScope::log() const {
  const std::lock_guard lock(mutex);
  return calls_made;
}
std::string FaultScope::what() const {
  const std::lock_guard lock(mutex);
  return hit ? hit : "";
}

}  // namespace fsdp::test

using fsdp::test::suffer;

// These are the names that a program calls with and without large file support.
extern "C" {

static int do_openat(int folder, const char *name, int flags, int mode) {
  return static_cast<int>(suffer("openat", [&] { return ::syscall(SYS_openat, folder, name, flags, mode); }));
}
int openat(int folder, const char *name, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = flags & O_CREAT ? va_arg(more, int) : 0;
  va_end(more);
  return do_openat(folder, name, flags, mode);
}
int openat64(int folder, const char *name, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const int mode = flags & O_CREAT ? va_arg(more, int) : 0;
  va_end(more);
  return do_openat(folder, name, flags, mode);
}

static ssize_t do_pwrite(int fd, const void *data, size_t size, off_t offset) {
  return suffer(
      "pwrite", [&] { return ::syscall(SYS_pwrite64, fd, data, size, offset); },
      [&] { return ::syscall(SYS_pwrite64, fd, data, size > 4096 ? 4096 : size, offset); });
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return do_pwrite(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return do_pwrite(fd, data, size, offset); }

static ssize_t do_pread(int fd, void *data, size_t size, off_t offset) {
  return suffer(
      "pread", [&] { return ::syscall(SYS_pread64, fd, data, size, offset); },
      [&] { return ::syscall(SYS_pread64, fd, data, size > 4096 ? 4096 : size, offset); });
}
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return do_pread(fd, data, size, offset); }
ssize_t pread64(int fd, void *data, size_t size, off64_t offset) { return do_pread(fd, data, size, offset); }

static int do_ftruncate(int fd, off_t size) {
  return static_cast<int>(suffer("ftruncate", [&] { return ::syscall(SYS_ftruncate, fd, size); }));
}
int ftruncate(int fd, off_t size) noexcept { return do_ftruncate(fd, size); }
int ftruncate64(int fd, off64_t size) noexcept { return do_ftruncate(fd, size); }

static int do_fallocate(int fd, int mode, off_t offset, off_t size) {
  return static_cast<int>(suffer("fallocate", [&] { return ::syscall(SYS_fallocate, fd, mode, offset, size); }));
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return do_fallocate(fd, mode, offset, size); }
int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return do_fallocate(fd, mode, offset, size); }

int fsync(int fd) {
  return static_cast<int>(suffer("fsync", [&] { return ::syscall(SYS_fsync, fd); }));
}
int mkdirat(int folder, const char *name, mode_t mode) noexcept {
  return static_cast<int>(suffer("mkdirat", [&] { return ::syscall(SYS_mkdirat, folder, name, mode); }));
}
int unlinkat(int folder, const char *name, int flags) noexcept {
  return static_cast<int>(suffer("unlinkat", [&] { return ::syscall(SYS_unlinkat, folder, name, flags); }));
}
int renameat(int from, const char *old, int to, const char *now) noexcept {
  return static_cast<int>(suffer("renameat", [&] { return ::syscall(SYS_renameat2, from, old, to, now, 0); }));
}
int renameat2(int from, const char *old, int to, const char *now, unsigned flags) noexcept {
  return static_cast<int>(suffer("renameat2", [&] { return ::syscall(SYS_renameat2, from, old, to, now, flags); }));
}
}
