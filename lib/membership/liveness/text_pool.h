// SPDX-License-Identifier: Apache-2.0
// Texts of ranks in memory that processes share. Few of many ranks have one to tell at a time, so there are places for
// few; nobody waits for one.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace fsdp::membership {

// A text that is read while it is written: then half of it is new, which who reads it must find out otherwise. Who sees
// a new word sees also what the writer stored before it.
template <size_t bytes>
class SharedText {
 public:
  using Copy = std::array<char, bytes>;  // with an end

  void store(std::string_view text) noexcept {
    Copy copy{};
    std::copy_n(text.data(), std::min(text.size(), bytes - 1), copy.begin());
    for (size_t i = 0; i < std::size(words_); ++i) {
      uint64_t word = 0;
      std::memcpy(&word, copy.data() + i * sizeof word, sizeof word);
      words_[i].store(word, std::memory_order_release);
    }
  }
  // Another process wrote it: its end is not trusted.
  Copy load() const noexcept {
    Copy copy{};
    for (size_t i = 0; i < std::size(words_); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_acquire);
      std::memcpy(copy.data() + i * sizeof word, &word, sizeof word);
    }
    copy.back() = '\0';
    return copy;
  }

 private:
  static_assert(bytes % sizeof(uint64_t) == 0);
  std::atomic<uint64_t> words_[bytes / sizeof(uint64_t)];
};

// A rank numbers what it has to tell; `is_current(rank, number)` says whether anybody may still ask for it. A place
// whose text is not asked for any more is free, whether its writer lives or not. In a full pool a lower rank takes the
// place of the highest: messages name the lowest. All zero bytes: no place is taken.
template <uint32_t place_count, size_t bytes>
class TextPool {
 public:
  static constexpr uint32_t places = place_count;
  using Copy = typename SharedText<bytes>::Copy;

  // Only by who writes what is_current reads of this rank. False: there is no place.
  template <class IsCurrent>
  bool store(uint32_t rank, uint32_t number, std::string_view text, const IsCurrent &is_current) noexcept {
    const uint64_t owner = owner_of(rank, number);
    if (find(owner)) return true;  // it was told before
    Place *place = claim(owner, is_current);
    if (!place) return false;
    place->text.store(text);
    uint64_t mine = owner | being_written;  // another's meanwhile, if nobody asks for this one any more
    return place->owner.compare_exchange_strong(mine, owner, std::memory_order_acq_rel);
  }
  // False: it is not there, or not any more.
  bool load(uint32_t rank, uint32_t number, Copy &text) const noexcept {
    const uint64_t owner = owner_of(rank, number);
    const Place *place = find(owner);
    if (!place) return false;
    const Copy copy = place->text.load();
    if (place->owner.load(std::memory_order_acquire) != owner) return false;
    text = copy;
    return true;
  }
  // Of each text that is there: found(rank, number).
  template <class Found>
  void for_each(const Found &found) const {
    for (const Place &place : used())
      if (const uint64_t owner = place.owner.load(std::memory_order_acquire); owner != 0 && !(owner & being_written))
        found(rank_of(owner), number_of(owner));
  }

 private:
  struct Place {
    std::atomic<uint64_t> owner;  // (rank + 1) << 32 | number; 0: none
    SharedText<bytes> text;
  };
  static constexpr uint64_t being_written = uint64_t{1} << 63;  // by the owner: nobody else does while it is current

  static uint64_t owner_of(uint32_t rank, uint32_t number) noexcept { return (uint64_t{rank} + 1) << 32 | number; }
  static uint32_t rank_of(uint64_t owner) noexcept { return static_cast<uint32_t>((owner & ~being_written) >> 32) - 1; }
  static uint32_t number_of(uint64_t owner) noexcept { return static_cast<uint32_t>(owner); }

  const Place *find(uint64_t owner) const noexcept {
    for (const Place &place : used())
      if (place.owner.load(std::memory_order_acquire) == owner) return &place;
    return nullptr;
  }
  std::span<const Place> used() const noexcept {
    return {places_, std::min(used_.load(std::memory_order_acquire), place_count)};
  }
  bool take(Place &place, uint64_t from, uint64_t to) noexcept {
    if (!place.owner.compare_exchange_strong(from, to | being_written, std::memory_order_acq_rel)) return false;
    const auto count = static_cast<uint32_t>(&place - places_ + 1);
    uint32_t known = used_.load(std::memory_order_relaxed);
    while (known < count && !used_.compare_exchange_weak(known, count, std::memory_order_acq_rel)) {
    }
    return true;
  }
  template <class IsCurrent>
  Place *claim(uint64_t owner, const IsCurrent &is_current) noexcept {
    Place *highest = nullptr;
    uint64_t its = owner;
    for (Place &place : places_) {
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

  std::atomic<uint32_t> used_;  // places before this: nobody needs to look at more, mostly none
  Place places_[place_count];
};

}  // namespace fsdp::membership
