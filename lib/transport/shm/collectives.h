// SPDX-License-Identifier: Apache-2.0
// Collectives between ranks of one host. A collective is one task. It declares that this rank's inputs are ready, and
// waits until all ranks' inputs are ready. Then it pulls its data from their arenas in one pass, and declares that it
// has read them. The caller does a short sum itself if no peer is late. If buffers are private, a relay copies them.
// Tasks run in the order in which they were enqueued, because the engine uses one stream or orders its streams by
// events.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/mapping.h"
#include "membership/seat.h"
#include "transport/call/launch.h"
#include "transport/call/round.h"
#include "transport/collectives.h"
#include "transport/names.h"
#include "transport/shm/relay.h"
#include "transport/shm/versions.h"

namespace fsdp::transport {

class ShmCollectives final : public Collectives {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(RankPlace); }
  // `block` is the number of ranks that are summed first; 0: all. `relay` is set if parts are not in arenas.
  ShmCollectives(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, uint32_t block, Mapping memory,
                 std::unique_ptr<Relay> relay = nullptr);

  void gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  Ticket exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  void await_release(Ticket ticket, device::Stream &stream) override;
  bool released(Ticket ticket) const noexcept override;
  uint64_t sent_bytes() const noexcept override { return relay_ ? relay_->sent_bytes() : 0; }

  void quiesce() override { round_.quiesce(); }
  void abandon() override { round_.abandon(); }
  std::optional<Error> broken() const override { return round_.broken(); }
  void next_round() override { round_.next(); }

  // A step of the relay: waits until all ranks' words have reached the target. Returns false if the launch was given
  // up.
  bool await_step(const Launch &launch, const Words &steps, uint64_t target);

 private:
  // More than one rank can be ahead of another, because all ranks wait for each other at every collective.
  static constexpr uint64_t fingerprints_kept = 16;
  struct RankPlace {
    RoundState state;
    Fingerprint fingerprints[fingerprints_kept];
    std::byte padding[64 - fingerprints_kept * sizeof(Fingerprint) % 64];
  };
  class AwaitedPart;
  class AwaitedStep;

  RankPlace &place(uint32_t r) const noexcept { return reinterpret_cast<RankPlace *>(memory_.data())[r]; }

  Ticket enqueue(Launch &launch, device::Stream &stream);
  // Does a sum on the calling thread, if this thread has borrowed the stream and no peer is late. Otherwise gives the
  // stream back. Returns whether it did the sum.
  bool perform_on_caller(Launch &launch, device::Stream &stream);
  bool waits_once(const Launch &launch) const noexcept;
  // The functions below run where the stream runs.
  void perform(Launch &launch);
  void begin(Launch &launch);
  bool carry(const Launch &launch);
  void arrive(const Launch &launch, Phase phase);
  bool await(const Launch &launch, Phase phase);
  void await_phase(uint64_t phase, const Fingerprint &fingerprint);
  void gather(const Piece &piece) const;
  void pull_moves(const Launch &launch) const;
  void pull(const Part &from, uint32_t r, std::byte *to, uint64_t bytes) const;
  // Reduces `count` elements, starting at element `first`.
  void reduce(const Piece &piece, uint64_t first, uint64_t count, float *out) const;
  void reduce_own(const Piece &piece, float *out) const;
  void reduce_blocks(device::RankSum sum) const;
  bool is_summed_at_once(const Launch &launch) const noexcept;
  bool all_reduce(const Launch &launch);
  void compare(const Launch &launch, uint32_t r);

  std::shared_ptr<Seat> seat_;
  uint32_t rank_;
  std::vector<uint32_t> ranks_;
  uint32_t block_;
  Mapping memory_;
  Words words_;
  Round round_;
  LaunchPool launches_;
  std::unique_ptr<Relay> relay_;                  // NULL: parts are in arenas
  Fingerprint enqueued_[fingerprints_kept] = {};  // the last collectives that the caller enqueued, for messages
};

}  // namespace fsdp::transport
