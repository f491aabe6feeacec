// SPDX-License-Identifier: Apache-2.0

#include "base/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace fsdp {

namespace {

// The list belongs to the process, because fork() copies the whole process. It has only atomics, because after fork()
// the child of a process with threads may call no function that waits.
constexpr int seats = 1024;
std::atomic<int> descriptors[seats];  // descriptor + 1; 0: the seat is free

void close_in_child() {
  for (std::atomic<int> &entry : descriptors)
    if (const int fd = entry.exchange(0, std::memory_order_relaxed); fd != 0) ::close(fd - 1);
}

}  // namespace

ForkClosed::ForkClosed(int fd) noexcept {
  static const int registered = ::pthread_atfork(nullptr, nullptr, close_in_child);
  if (registered != 0 || fd < 0) return;
  for (int seat = 0; seat < seats; ++seat) {
    int free = 0;
    if (!descriptors[seat].compare_exchange_strong(free, fd + 1)) continue;
    seat_ = seat;
    return;
  }
}

// Must be called before the descriptor is closed, because another file may get its number then.
void ForkClosed::end() noexcept {
  if (seat_ >= 0) descriptors[seat_].store(0);
  seat_ = -1;
}

}  // namespace fsdp
