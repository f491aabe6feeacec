// SPDX-License-Identifier: Apache-2.0
#include "base/word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bit>
#include <climits>
#include <ctime>

namespace fsdp {
namespace {

// A futex is 32 bits wide: the low half of the value, which changes with every raise within a round.
uint32_t *low_half(std::atomic<uint64_t> &value) noexcept {
  return reinterpret_cast<uint32_t *>(&value) + (std::endian::native == std::endian::big ? 1 : 0);
}

}  // namespace

void Word::raise(uint64_t to) noexcept {
  // Both sides are sequentially consistent, so either this thread sees the sleeper, or the sleeper sees the new value.
  value.store(to, std::memory_order_seq_cst);
  nudge();
}

void Word::nudge() noexcept {
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  ::syscall(SYS_futex, low_half(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Word::sleep_below(uint64_t target, uint32_t ms) noexcept {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = value.load(std::memory_order_seq_cst);
  if (seen < target) {
    const timespec limit{static_cast<time_t>(ms / 1000), static_cast<long>(ms % 1000) * 1'000'000};
    // The futex is not FUTEX_PRIVATE, because each rank has the memory at a different address.
    ::syscall(SYS_futex, low_half(value), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace fsdp
