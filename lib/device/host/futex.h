// SPDX-License-Identifier: Apache-2.0
// Sleeping and waking on a word, between threads of one process.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fsdp::device {

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == sizeof(uint32_t));

// Sleeps while the word equals `expected`, until woken, for at most `longest` (negative: no limit). May return early,
// so the caller must check again.
inline void futex_wait(const Word &word, uint32_t expected, std::chrono::nanoseconds longest) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec limit{seconds.count(), static_cast<long>((longest - seconds).count())};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, longest.count() < 0 ? nullptr : &limit, nullptr, 0);
}

inline void futex_wake_all(const Word &word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

inline void cpu_pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Checks the condition repeatedly for at most `longest`. Returns whether it became true. The clock is read only once in
// 16 checks.
template <class Condition>
bool spin_until(const Condition &condition, std::chrono::nanoseconds longest) {
  if (condition()) return true;
  if (longest.count() <= 0) return false;
  const auto end = std::chrono::steady_clock::now() + longest;
  do {
    for (int look = 0; look < 16; ++look) {
      if (condition()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return condition();
}

}  // namespace fsdp::device
