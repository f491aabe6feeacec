// SPDX-License-Identifier: Apache-2.0
// What ranks show to others in memory that they share: the last bytes that each posted, whole or not at all, and with
// them a text, for which there are few places.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "membership/job.h"
#include "membership/liveness/text_pool.h"

namespace fsdp::membership {

// Written by one thread at a time; all zero bytes: nothing was posted.
class PostEntry {
 public:
  // Even: so many halves of writes were done; odd: one is under way.
  uint32_t turn() const noexcept { return turn_.load(std::memory_order_acquire); }
  // The rank of the job that it is for; nobody: all of them.
  std::optional<uint32_t> to() const noexcept {
    const uint32_t rank = to_.load(std::memory_order_acquire);
    return rank == everybody ? std::nullopt : std::optional(rank);
  }
  // Returns what turn() will be afterwards.
  uint32_t begin() noexcept {
    const uint32_t turn = turn_.load(std::memory_order_relaxed) & ~uint32_t{1};
    turn_.store(turn + 1, std::memory_order_relaxed);
    return turn + 2;
  }
  void end(std::span<const std::byte> bytes, std::optional<uint32_t> to) noexcept {
    uint64_t words[word_count]{};
    std::memcpy(words, bytes.data(), std::min(bytes.size(), sizeof words));
    to_.store(to.value_or(everybody), std::memory_order_release);
    for (size_t i = 0; i < word_count; ++i) words_[i].store(words[i], std::memory_order_release);
    turn_.store(turn_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  // Of one that is whole, before `also` was called with its turn and after it. False: nothing is there, or its writer
  // has died over it.
  template <class Also>
  bool load(std::span<std::byte> bytes, const Also &also) const noexcept {
    for (int tries = 0; tries < 1000; ++tries) {
      const uint32_t before = turn();
      if (before == 0) return false;
      uint64_t words[word_count];
      for (size_t i = 0; i < word_count; ++i) words[i] = words_[i].load(std::memory_order_acquire);
      if (before % 2) continue;
      also(before);
      if (turn() != before) continue;
      std::memcpy(bytes.data(), words, std::min(bytes.size(), sizeof words));
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t word_count = post_bytes / sizeof(uint64_t);
  static constexpr uint32_t everybody = UINT32_MAX;
  std::atomic<uint32_t> turn_, to_;
  std::atomic<uint64_t> words_[word_count];
};
static_assert(sizeof(PostEntry) == 104);

// Room for a text in many posts is room for those of ranks that fail: of the lowest ones, in a job where many do.
using PostTexts = TextPool<32, post_text_bytes>;

// Entries for fewer ranks than the job may have: a rank has one from its first post on.
struct PostRoom {
  std::atomic<uint32_t> taken;  // entries
  uint32_t entry_count;
  PostTexts texts;
};

class Posts {
 public:
  // entries: as many as the room says; numbers[r]: that of rank r's, and 1; 0: it has none.
  Posts(PostRoom &room, PostEntry *entries, std::atomic<uint16_t> *numbers)
      : room_(room), entries_(entries), numbers_(numbers) {}

  // By one thread at a time of each rank. Without effect where there is no entry for it: nobody reads it here.
  void store(uint32_t rank, std::span<const std::byte> bytes, std::string_view text,
             std::optional<uint32_t> to) const noexcept {
    PostEntry *entry = claim(rank);
    if (!entry) return;
    const uint32_t turn = entry->begin();
    if (!text.empty())
      room_.texts.store(rank, turn, text, [this](uint32_t r, uint32_t number) { return is_current(r, number); });
    entry->end(bytes, to);
  }
  // False: as PostEntry says. The text is empty where there was none, or no place for it.
  bool load(uint32_t rank, std::span<std::byte> bytes, std::span<char> text) const noexcept {
    const PostEntry *entry = find(rank);
    return entry && entry->load(bytes, [&](uint32_t turn) {
      PostTexts::Copy copy{};
      if (!text.empty()) room_.texts.load(rank, turn, copy);
      std::copy_n(copy.begin(), std::min(text.size(), copy.size()), text.begin());
    });
  }
  // NULL: it has posted nothing.
  const PostEntry *find(uint32_t rank) const noexcept {
    const uint32_t number = numbers_[rank].load(std::memory_order_acquire);
    return number ? &entries_[number - 1] : nullptr;
  }

 private:
  // ... or will be in a moment: it is being written.
  bool is_current(uint32_t rank, uint32_t turn) const noexcept {
    const PostEntry *entry = find(rank);
    return entry && ((entry->turn() + 1) & ~uint32_t{1}) == turn;
  }
  PostEntry *claim(uint32_t rank) const noexcept {
    if (const PostEntry *entry = find(rank)) return const_cast<PostEntry *>(entry);
    uint32_t number = room_.taken.load(std::memory_order_relaxed);
    do {
      if (number >= room_.entry_count) return nullptr;
    } while (!room_.taken.compare_exchange_weak(number, number + 1, std::memory_order_relaxed));
    numbers_[rank].store(static_cast<uint16_t>(number + 1), std::memory_order_release);
    return &entries_[number];
  }

  PostRoom &room_;
  PostEntry *entries_;
  std::atomic<uint16_t> *numbers_;
};

}  // namespace fsdp::membership
