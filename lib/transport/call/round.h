// SPDX-License-Identifier: Apache-2.0
// The phases of a communicator's collectives, and how a round of them (a training step) ends. A phase is
// (round, number * 4 + what of it): a later round's phases are above those of the rounds before, whatever was skipped.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/error.h"
#include "base/word.h"

namespace fsdp::transport {

// The parts of a collective that ranks wait for.
enum class Phase : uint64_t {
  ready = 1,   // what peers read of this rank is there
  middle = 2,  // all_reduce: the own slice of the sum is there
  read = 3     // this rank has read all that it reads
};

constexpr uint64_t parts = 4;
constexpr uint64_t most_collectives = (uint64_t{1} << 32) / parts - 1;
constexpr uint64_t first_phase(uint64_t round) { return round << 32; }
constexpr uint64_t phase_of(uint64_t round, uint64_t number, Phase phase) {
  return first_phase(round) + number * parts + static_cast<uint64_t>(phase);
}
constexpr uint64_t round_of(uint64_t phase) { return phase >> 32; }
constexpr uint64_t number_of(uint64_t phase) { return (phase & 0xffffffff) / parts; }

// One rank's words of a communicator in shared memory, written by that rank alone. A rank that ends its round because
// another did blames that one, whatever it does afterwards: all ranks name the first cause, also those that hear of the
// later one first.
struct RoundWords {
  enum Flag : uint32_t {
    quiet = 1,     // nothing more is enqueued: no phase above `last` will come
    broken = 2,    // no phase above the present one will come
    abandoned = 4  // no rank needs to go on
  };
  static constexpr uint32_t blamed(uint64_t flags) noexcept { return static_cast<uint32_t>(flags >> 8 & 0xffffff); }
  // Did rank r discard its round of its own accord?
  static constexpr bool discards(uint64_t flags, uint32_t r) noexcept {
    return flags & abandoned && blamed(flags) == r;
  }
  // What is known of a rank, and what is told of it: by others it may be told late, and the rank that it blames does
  // not change.
  static constexpr uint64_t merge(uint64_t known, uint64_t told) noexcept {
    if (told >> 32 != known >> 32) return told;
    return known & (broken | abandoned) ? known | (told & 0xff) : told | (known & 0xff);
  }
  Word phase;
  struct alignas(64) {
    std::atomic<uint64_t> last;
    std::atomic<uint64_t> flags;   // round << 32 | blamed rank of the team << 8 | flags; written after last
    std::atomic<uint64_t> called;  // the caller has enqueued all collectives of lower phases: its stream comes to them
  } ended;
};

// This rank's view of the present round. Tasks of a stream read it while the caller writes it.
class Round {
 public:
  // words[r] lies at base + r * stride.
  Round(std::byte *base, uint64_t stride, uint32_t rank, std::span<const uint32_t> ranks);

  uint64_t number() const noexcept { return round_; }
  // The number of the collective that the caller enqueues now.
  uint64_t enqueue();
  // Has the rank's caller enqueued the collective of this phase?
  bool called(uint32_t r, uint64_t phase) const noexcept {
    return words(r).ended.called.load(std::memory_order_acquire) > phase;
  }
  void quiesce() noexcept;
  void abandon() noexcept;
  void next() noexcept;
  std::optional<Error> broken() const;

  // For tasks of a round: is everything that is left of it skipped?
  bool skipped(uint64_t round) const noexcept { return skipped_.load(std::memory_order_acquire) >= round; }
  // Did a peer end the round so that this phase cannot come?
  bool hopeless(uint64_t phase) const noexcept;
  // Skip the rest of the round because of it: this collective did not complete.
  void break_at(uint64_t phase, const std::string &call);

 private:
  RoundWords &words(uint32_t r) const noexcept { return *reinterpret_cast<RoundWords *>(base_ + r * stride_); }
  uint32_t flags(uint32_t r, uint64_t round) const noexcept;  // and the rank that it blames
  void end(RoundWords::Flag flag, uint32_t blamed) noexcept;
  bool quiet_before(uint32_t r, uint64_t phase) const noexcept;
  Error explain(uint64_t phase, const std::string &call, uint32_t &blamed) const;

  std::byte *base_;
  uint64_t stride_;
  uint32_t rank_;
  std::span<const uint32_t> ranks_;
  uint64_t round_ = 1;
  std::atomic<uint64_t> enqueued_{0};
  std::atomic<uint64_t> skipped_{0};  // the latest round that is skipped
  mutable std::mutex mutex_;
  std::optional<Error> broken_;
  bool ended_ = false;
};

}  // namespace fsdp::transport
