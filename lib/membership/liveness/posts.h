// SPDX-License-Identifier: Apache-2.0
// Texts of ranks in shared memory. Few ranks have a text at the same time, so there are few places for texts. No rank
// waits for a place.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "base/error.h"
#include "membership/job.h"

namespace fsdp::membership {

// A text that may be read while it is written. The reader may then get parts of two texts, and must detect that by
// other means. A reader that sees a new word also sees everything that the writer stored before that word.
template <size_t bytes>
class SharedText {
 public:
  using Copy = WireText<bytes>;

  void store(std::string_view text) noexcept {
    const Copy copy(text);
    for (size_t i = 0; i < std::size(words_); ++i) {
      uint64_t word = 0;
      std::memcpy(&word, copy.bytes + i * sizeof word, sizeof word);
      words_[i].store(word, std::memory_order_release);
    }
  }
  Copy load() const noexcept {
    Copy copy;
    for (size_t i = 0; i < std::size(words_); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_acquire);
      std::memcpy(copy.bytes + i * sizeof word, &word, sizeof word);
    }
    return copy;
  }

 private:
  static_assert(bytes % sizeof(uint64_t) == 0);
  std::atomic<uint64_t> words_[bytes / sizeof(uint64_t)];
};

// Each rank numbers its texts; `is_current(rank, number)` says whether readers may still ask for that text. A place
// with an outdated text is free, whether its writer lives or not. In a full pool a lower rank takes the place of the
// highest rank, because messages name the lowest ranks. In a pool of zero bytes all places are free.
template <uint32_t place_count, size_t bytes>
class TextPool {
 public:
  static constexpr uint32_t places = place_count;
  using Copy = typename SharedText<bytes>::Copy;

  // Must be called only by the thread that writes the state which is_current reads for this rank. Returns false if
  // there is no place for the text.
  template <class IsCurrent>
  bool store(uint32_t rank, uint32_t number, std::string_view text, const IsCurrent &is_current) noexcept {
    const uint64_t owner = owner_of(rank, number);
    if (find(owner)) return true;  // the pool has the text already
    TextPlace *place = claim(owner, is_current);
    if (!place) return false;
    place->text.store(text);
    uint64_t mine = owner | being_written;  // no longer this value if another rank found the text outdated
    return place->owner.compare_exchange_strong(mine, owner, std::memory_order_acq_rel);
  }
  // Returns false if the text is not in the pool.
  bool load(uint32_t rank, uint32_t number, Copy &text) const noexcept {
    const uint64_t owner = owner_of(rank, number);
    const TextPlace *place = find(owner);
    if (!place) return false;
    const Copy copy = place->text.load();
    if (place->owner.load(std::memory_order_acquire) != owner) return false;
    text = copy;
    return true;
  }
  // Calls found(rank, number) for each text in the pool.
  template <class Found>
  void for_each(const Found &found) const {
    for (const TextPlace &place : used())
      if (const uint64_t owner = place.owner.load(std::memory_order_acquire); owner != 0 && !(owner & being_written))
        found(rank_of(owner), number_of(owner));
  }

 private:
  struct TextPlace {
    std::atomic<uint64_t> owner;  // (rank + 1) << 32 | number; 0: none
    SharedText<bytes> text;
  };
  static constexpr uint64_t being_written = uint64_t{1} << 63;  // the owner is writing; excludes others while current

  static uint64_t owner_of(uint32_t rank, uint32_t number) noexcept { return (uint64_t{rank} + 1) << 32 | number; }
  static uint32_t rank_of(uint64_t owner) noexcept { return static_cast<uint32_t>((owner & ~being_written) >> 32) - 1; }
  static uint32_t number_of(uint64_t owner) noexcept { return static_cast<uint32_t>(owner); }

  const TextPlace *find(uint64_t owner) const noexcept {
    for (const TextPlace &place : used())
      if (place.owner.load(std::memory_order_acquire) == owner) return &place;
    return nullptr;
  }
  std::span<const TextPlace> used() const noexcept {
    return {places_, std::min(used_.load(std::memory_order_acquire), place_count)};
  }
  bool take(TextPlace &place, uint64_t from, uint64_t to) noexcept {
    if (!place.owner.compare_exchange_strong(from, to | being_written, std::memory_order_acq_rel)) return false;
    const auto count = static_cast<uint32_t>(&place - places_ + 1);
    uint32_t known = used_.load(std::memory_order_relaxed);
    while (known < count && !used_.compare_exchange_weak(known, count, std::memory_order_acq_rel)) {
    }
    return true;
  }
  template <class IsCurrent>
  TextPlace *claim(uint64_t owner, const IsCurrent &is_current) noexcept {
    TextPlace *highest = nullptr;
    uint64_t its = owner;
    for (TextPlace &place : places_) {
      const uint64_t at = place.owner.load(std::memory_order_acquire);
      if (at == 0 || !is_current(rank_of(at), number_of(at))) {
        if (take(place, at, owner)) return &place;
      } else if (!(at & being_written) && at > its) {
        highest = &place;
        its = at;
      }
    }
    return highest && take(*highest, its, owner) ? highest : nullptr;
  }

  std::atomic<uint32_t> used_;  // no place from this number on was ever used; mostly 0
  TextPlace places_[place_count];
};

// What ranks show to others in shared memory: the bytes that each rank has posted last. They are read completely or not
// at all. A post may have a text, if there is a place for it.

// The last post of one rank, written by one thread at a time. All bytes are zero before the first post.
class PostEntry {
 public:
  // Even: twice the number of writes so far. Odd: a write is under way.
  uint32_t turn() const noexcept { return turn_.load(std::memory_order_acquire); }
  // The rank of the job for which the post is; empty: all ranks.
  std::optional<uint32_t> to() const noexcept {
    const uint32_t rank = to_.load(std::memory_order_acquire);
    return rank == everybody ? std::nullopt : std::optional(rank);
  }
  // Returns the value of turn() after this write.
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
  // Copies the bytes of a complete post and calls also(turn), during which the post does not change. Returns false if
  // nothing was posted, or if the writer has died in the middle of a post.
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

// Posts with texts come mainly from ranks that fail. If many ranks fail, the lowest of them get the places.
using PostTexts = TextPool<32, post_text_bytes>;

// There may be fewer entries than ranks in the job, because a rank takes an entry only with its first post.
struct PostRoom {
  std::atomic<uint32_t> taken;  // number of entries
  uint32_t entry_count;
  PostTexts texts;
};

class Posts {
 public:
  // `entries` has room.entry_count entries. numbers[r]: number of rank r's entry plus 1; 0: the rank has no entry.
  Posts(PostRoom &room, PostEntry *entries, std::atomic<uint16_t> *numbers)
      : room_(room), entries_(entries), numbers_(numbers) {}

  // May be called by one thread at a time for each rank. Has no effect if no entry is left, which means that no rank on
  // this host reads the posts of that rank.
  void store(uint32_t rank, std::span<const std::byte> bytes, std::string_view text,
             std::optional<uint32_t> to) const noexcept {
    PostEntry *entry = claim(rank);
    if (!entry) return;
    const uint32_t turn = entry->begin();
    if (!text.empty())
      room_.texts.store(rank, turn, text, [this](uint32_t r, uint32_t number) { return is_current(r, number); });
    entry->end(bytes, to);
  }
  // Returns false as PostEntry::load does. The text is empty if the post has none, or if there was no place for it.
  bool load(uint32_t rank, std::span<std::byte> bytes, std::span<char> text) const noexcept {
    const PostEntry *entry = find(rank);
    return entry && entry->load(bytes, [&](uint32_t turn) {
      PostTexts::Copy copy;
      if (!text.empty()) room_.texts.load(rank, turn, copy);
      std::copy_n(copy.bytes, std::min(text.size(), sizeof copy.bytes), text.begin());
    });
  }
  // NULL: the rank has posted nothing.
  const PostEntry *find(uint32_t rank) const noexcept { return entry_of(rank); }

 private:
  PostEntry *entry_of(uint32_t rank) const noexcept {
    const uint32_t number = numbers_[rank].load(std::memory_order_acquire);
    return number ? &entries_[number - 1] : nullptr;
  }
  // True if the entry has this turn, or will have it when the current write ends.
  bool is_current(uint32_t rank, uint32_t turn) const noexcept {
    const PostEntry *entry = find(rank);
    return entry && ((entry->turn() + 1) & ~uint32_t{1}) == turn;
  }
  PostEntry *claim(uint32_t rank) const noexcept {
    if (PostEntry *entry = entry_of(rank)) return entry;
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
