// SPDX-License-Identifier: Apache-2.0
#include "base/library_thread.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "base/error.h"

namespace fsdp {

namespace {

// The first version of the kernel's struct sched_attr, for which older C libraries have no header.
struct Scheduling {
  uint32_t size = sizeof(Scheduling), policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t slice_ns = 0, deadline_ns = 0, period_ns = 0;
};
static_assert(sizeof(Scheduling) == 48);

}  // namespace

// In SCHED_BATCH, a thread that wakes does not interrupt others. A thread that runs is protected from others until the
// end of its slice, so the slice is the shortest that Linux has. Linux before 6.12 ignores slices.
void give_way() noexcept {
  constexpr uint64_t shortest_slice_ns = 100'000;
  Scheduling own;
  if (::syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) != 0 || own.policy != SCHED_OTHER) return;
  own.policy = SCHED_BATCH;
  own.slice_ns = shortest_slice_ns;
  ::syscall(SYS_sched_setattr, 0, &own, 0);
}

pthread_t LibraryThread::start(void *(*body)(void *), void *argument) const {
  constexpr size_t max_shown = 15;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  // glibc takes a thread's TLS from the thread's stack, and the TLS is large in programs with many libraries.
  const long least = std::max(sysconf(_SC_THREAD_STACK_MIN), 0L);
  if (stack_bytes) pthread_attr_setstacksize(&attributes, static_cast<size_t>(least) + stack_bytes);
  pthread_t thread{};
  const int code = [&] {
    const BlockedSignals blocked;
    return pthread_create(&thread, &attributes, body, argument);
  }();
  pthread_attr_destroy(&attributes);
  if (code != 0) fail_errno(code, format_text("start the thread of {}", purpose));
  pthread_setname_np(thread, name.substr(0, max_shown).c_str());
  return thread;
}

}  // namespace fsdp
