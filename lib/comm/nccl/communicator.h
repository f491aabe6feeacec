// SPDX-License-Identifier: Apache-2.0
// Collectives over memory of devices by NCCL. A gather is one grouped launch. Sums of what is sent in fp32 are NCCL's:
// a reduce-scatter in the full gradient itself, where this rank's slice becomes the sum, which one kernel then scales
// and adds to where it belongs. NCCL adds in an order of its own: equal bits are promised for repeats alone. What is
// sent in 16 bits NCCL would round again at each hop: there ranks send each other their slices, and one kernel adds
// them in rank order, with the bits of the host.
//
// What is enqueued cannot be taken back, so a round ends in one of two ways: all ranks have enqueued the same, and all
// of it completes; or they have not, and the context fails, which frees the GPU's streams.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/nccl/seat.h"

namespace fsdp::comm::nccl {

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::shared_ptr<Seat> seat, std::shared_ptr<Launches> launches);
  ~NcclCommunicator() override;

  void gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                   device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  void await_release(Ticket ticket, device::Stream &stream) override { launches_->await(ticket, stream); }
  bool released(Ticket ticket) const noexcept override { return launches_->released(ticket); }

  void quiesce() override { launches_->quiesce(); }
  // next_round finds out whether the ranks' work fits together.
  void abandon() override { launches_->abandon(); }
  std::optional<Error> broken() const override { return std::nullopt; }
  void next_round() override;

 private:
  Ticket gather(const char *operation, std::span<const GatherSpan> spans, const Tag &tag, device::Stream &stream);
  void reduce(std::span<const ReduceSpan> spans, device::Stream &stream);
  void exchange(const ReduceSpan &span, Comm *comm, device::Stream &stream) const;
  void prepare(const ReduceSpan &span, device::Stream &stream) const;
  void add(const ReduceSpan &span, device::Stream &stream) const;
  // This rank's own bytes of a source: there are no others.
  std::byte *own(const Source &from) const {
    return from.arena->writable() + from.offset + seat_->rank() * from.stride;
  }

  std::shared_ptr<Seat> seat_;
  std::shared_ptr<Launches> launches_;
  std::unique_ptr<device::Memory> word_;  // of barriers
  std::vector<ReduceSpan> reductions_;    // of an all_reduce
};

}  // namespace fsdp::comm::nccl
