// SPDX-License-Identifier: Apache-2.0
// The phases of a communicator's collectives, and the end of a round of collectives (a training step). A phase number
// is (round, number * 4 + part): all phases of a round are larger than those of earlier rounds, even if collectives
// were skipped.
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
  ready = 1,   // the data that peers read from this rank is complete
  middle = 2,  // all_reduce: this rank's slice of the sum is complete
  read = 3     // this rank has read everything that it reads
};

constexpr uint64_t parts = 4;
constexpr uint64_t max_collectives = (uint64_t{1} << 32) / parts - 1;
constexpr uint64_t first_phase(uint64_t round) { return round << 32; }
constexpr uint64_t phase_of(uint64_t round, uint64_t number, Phase phase) {
  return first_phase(round) + number * parts + static_cast<uint64_t>(phase);
}
constexpr uint64_t round_of(uint64_t phase) { return phase >> 32; }
constexpr uint64_t number_of(uint64_t phase) { return (phase & 0xffffffff) / parts; }

// How far a rank has come in the round of a communicator, and whether it has ended the round. In shared memory only
// that rank writes it. If a rank ends its round because another rank did, it blames the other rank, whatever the other
// rank does later. So all ranks name the first cause, even if they learn of a later one first.
struct RoundState {
  enum Flag : uint32_t {
    enqueued_all = 1,  // the rank enqueues nothing more: it will reach no phase above `last`
    broken = 2,        // the rank will reach no phase above its present one
    abandoned = 4      // no rank needs to go on with the round
  };
  static constexpr uint32_t blamed(uint64_t flags) noexcept { return static_cast<uint32_t>(flags >> 8 & 0xffffff); }
  // Did rank r discard its round without an earlier end on another rank?
  static constexpr bool discards(uint64_t flags, uint32_t r) noexcept {
    return flags & abandoned && blamed(flags) == r;
  }
  // Merges the known flags of a rank with flags that arrive later. Flags that other ranks pass on may be late, and the
  // blamed rank does not change.
  static constexpr uint64_t merge(uint64_t known, uint64_t told) noexcept {
    if (told >> 32 != known >> 32) return told;
    return known & (broken | abandoned) ? known | (told & 0xff) : told | (known & 0xff);
  }
  Word phase;
  struct alignas(64) {
    std::atomic<uint64_t> last;
    std::atomic<uint64_t> flags;   // round << 32 | blamed rank of the team << 8 | flags; written after last
    std::atomic<uint64_t> called;  // the caller has enqueued all collectives of lower phases
  } ended;
};

// This rank's view of the current round. Tasks of a stream read it while the caller writes it.
class Round {
 public:
  // words[r] lies at base + r * stride.
  Round(std::byte *base, uint64_t stride, uint32_t rank, std::span<const uint32_t> ranks);

  uint64_t number() const noexcept { return round_; }
  // Returns the number of the collective that the caller is enqueuing.
  uint64_t enqueue();
  // Has the rank's caller enqueued the collective of this phase?
  bool called(uint32_t r, uint64_t phase) const noexcept {
    return state(r).ended.called.load(std::memory_order_acquire) > phase;
  }
  void quiesce() noexcept;
  void abandon() noexcept;
  void next() noexcept;
  std::optional<Error> broken() const;

  // For tasks of a round: is the rest of the round skipped?
  bool skipped(uint64_t round) const noexcept { return skipped_.load(std::memory_order_acquire) >= round; }
  // Did a peer end the round, so that this phase cannot be reached?
  bool hopeless(uint64_t phase) const noexcept;
  // Skips the rest of the round, because the collective of this phase did not complete.
  void break_at(uint64_t phase, const std::string &call);

 private:
  RoundState &state(uint32_t r) const noexcept { return *reinterpret_cast<RoundState *>(base_ + r * stride_); }
  uint32_t flags(uint32_t r, uint64_t round) const noexcept;  // the flags, and the blamed rank
  void end(RoundState::Flag flag, uint32_t blamed) noexcept;
  bool ends_before(uint32_t r, uint64_t phase) const noexcept;
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
