// SPDX-License-Identifier: Apache-2.0
// A number in shared memory that one rank raises and others wait for. All zero bytes is a valid word of value 0.
#pragma once

#include <atomic>
#include <cstdint>

namespace fsdp {

struct alignas(64) Word {
  static constexpr uint32_t note_count = 4;

  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
  // Numbers that the owner publishes with the value. They are on the same cache line, so a reader of the value gets
  // them without another cache miss.
  std::atomic<uint64_t> notes[note_count];

  bool reached(uint64_t target) const noexcept { return value.load(std::memory_order_acquire) >= target; }
  // All earlier writes of this thread are visible to every thread that sees the new value. Only the owner may call
  // raise().
  void raise(uint64_t to) noexcept;
  // Wakes the threads that sleep on the word, so that they check their conditions.
  void nudge() noexcept;
  // Sleeps until the value may have reached the target, for at most `ms` milliseconds.
  void sleep_below(uint64_t target, uint32_t ms) noexcept;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(Word) == 64);

inline void relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace fsdp
