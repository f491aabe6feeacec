// SPDX-License-Identifier: Apache-2.0
// Collectives over shared arenas. A collective is one task: it says that this rank's inputs are ready, waits until all
// ranks' are, pulls what it needs in one pass, and says that it has read it. Tasks of one communicator run in the order
// in which they were enqueued: the engine gives each one stream, or orders its streams by events.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "comm/call/fingerprint.h"
#include "comm/call/launch.h"
#include "comm/call/round.h"
#include "comm/communicator.h"
#include "comm/shm/mapping.h"
#include "comm/shm/seat.h"
#include "comm/shm/words.h"

namespace fsdp::comm {

class ShmCommunicator final : public Communicator {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(Place); }
  // reduction_block: ranks that are summed first; 0: all.
  ShmCommunicator(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, uint32_t reduction_block,
                  Mapping memory);

  void gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                   device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  void await_release(Ticket ticket, device::Stream &stream) override;
  bool released(Ticket ticket) const noexcept override;

  void quiesce() override { round_.quiesce(); }
  void abandon() override { round_.abandon(); }
  std::optional<Error> broken() const override { return round_.broken(); }
  void next_round() override { round_.next(); }

  // -- collectives whose bytes a worker moves: start, fill in pieces, spans and the worker, enqueue --
  Launch &start(Operation operation, const Tag &tag, uint64_t piece_count);
  Ticket enqueue(Launch &launch, device::Stream &stream);
  // A step of a worker: waits until all ranks' words have come to the target. False: the launch is given up.
  bool await_step(const Launch &launch, const Words &steps, uint64_t target);

 private:
  // More than any rank is ahead of another: all wait for all at every collective.
  static constexpr uint64_t fingerprints_kept = 16;
  struct Place {
    RoundWords words;
    Fingerprint fingerprints[fingerprints_kept];
    std::byte padding[64 - fingerprints_kept * sizeof(Fingerprint) % 64];
  };
  class AwaitedPart;
  class AwaitedStep;

  Place &place(uint32_t r) const noexcept { return reinterpret_cast<Place *>(memory_.data())[r]; }

  // The rest runs where the stream runs.
  void perform(Launch &launch);
  void work(const Launch &launch);
  void arrive(const Launch &launch, Part part);
  bool await(const Launch &launch, Part part);
  void await_phase(uint64_t phase, const Fingerprint &fingerprint);
  void gather(const Piece &piece) const;
  void pull(const Source &from, uint32_t r, std::byte *to, uint64_t bytes) const;
  void reduce(const Piece &piece, float *out) const;
  void reduce_blocks(device::RankSum sum) const;
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
  Fingerprint enqueued_[fingerprints_kept] = {};  // the caller's, of the last ones: for messages
};

}  // namespace fsdp::comm
