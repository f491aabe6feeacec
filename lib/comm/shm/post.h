// SPDX-License-Identifier: Apache-2.0
// What a rank shows to others in memory that they share: the last bytes that it posted, whole or not at all.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "comm/team.h"

namespace fsdp::comm {

// Written by one thread at a time; all zero bytes: nothing was posted.
class alignas(64) PostEntry {
 public:
  using Bytes = std::array<std::byte, World::post_bytes>;

  // Even: so many halves of writes were done; odd: one is under way.
  uint64_t turn() const noexcept { return turn_.load(std::memory_order_acquire); }
  // The rank of the job that it is for; nobody: all of them.
  std::optional<uint32_t> to() const noexcept {
    const uint32_t rank = to_.load(std::memory_order_acquire);
    return rank == everybody ? std::nullopt : std::optional(rank);
  }
  void store(std::span<const std::byte> bytes, std::optional<uint32_t> to) noexcept {
    uint64_t words[word_count]{};
    std::memcpy(words, bytes.data(), std::min(bytes.size(), sizeof words));
    const uint64_t turn = turn_.load(std::memory_order_relaxed) & ~uint64_t{1};
    turn_.store(turn + 1, std::memory_order_relaxed);
    to_.store(to.value_or(everybody), std::memory_order_release);
    for (size_t i = 0; i < word_count; ++i) words_[i].store(words[i], std::memory_order_release);
    turn_.store(turn + 2, std::memory_order_release);
  }
  // False: nothing is there, or its writer has died over it.
  bool load(std::span<std::byte> bytes) const noexcept {
    for (int tries = 0; tries < 1000; ++tries) {
      const uint64_t before = turn();
      if (before == 0) return false;
      uint64_t words[word_count];
      for (size_t i = 0; i < word_count; ++i) words[i] = words_[i].load(std::memory_order_acquire);
      if (before % 2 || turn() != before) continue;
      std::memcpy(bytes.data(), words, std::min(bytes.size(), sizeof words));
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t word_count = World::post_bytes / sizeof(uint64_t);
  static constexpr uint32_t everybody = UINT32_MAX;
  std::atomic<uint64_t> turn_;
  std::atomic<uint32_t> to_;
  std::atomic<uint64_t> words_[word_count];
};
static_assert(sizeof(PostEntry) == 512);

}  // namespace fsdp::comm
