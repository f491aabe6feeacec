// SPDX-License-Identifier: Apache-2.0
// Collectives by NCCL over memory of devices, on any axis. A gather is one grouped launch. If addends are sent in fp32,
// NCCL sums them, by a reduce-scatter in the addends themselves. This rank's slice becomes the sum, which one kernel
// then scales and adds to its target. NCCL adds in its own order, so only repeated runs are sure to have equal bits.
// Addends that are sent in 16 bits would be rounded again by NCCL at each hop. So ranks send each other their slices of
// these addends, and one kernel adds them in rank order, with the same bits as on the host.
//
// Enqueued work cannot be taken back, so a round ends in one of two ways. If all ranks have enqueued the same work, all
// of it completes. If not, the context fails, which frees the GPU's streams.
#pragma once

#include <memory>

#include "transport/collectives.h"
#include "transport/nccl/communicators.h"

namespace fsdp::transport::nccl {

class NcclCollectives final : public Collectives {
 public:
  NcclCollectives(std::shared_ptr<Communicators> communicators, std::shared_ptr<Launches> launches, const Shape &shape);
  ~NcclCollectives() override;

  void gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  Ticket exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  void await_release(Ticket ticket, device::Stream &stream) override { launches_->await(ticket, stream); }
  bool released(Ticket ticket) const noexcept override { return launches_->released(ticket); }
  // Counts each byte once for each rank that needs it, because NCCL does not tell how much it sends.
  uint64_t sent_bytes() const noexcept override { return sent_; }

  void quiesce() override { launches_->quiesce(); }
  // next_round() finds out whether the ranks have enqueued the same work.
  void abandon() override { launches_->abandon(); }
  std::optional<Error> broken() const override { return std::nullopt; }
  void next_round() override;

 private:
  Ticket enqueue_gather(const char *operation, std::span<const Gather> gathers, const Tag &tag, device::Stream &stream);
  bool all_reduces(const Sum &sum, bool accumulate) const noexcept;
  uint64_t slice_bytes(const Sum &sum) const noexcept { return sum.count / size_ * dtype_size(sum.sent_dtype()); }
  std::byte *received(const Sum &sum) const noexcept;
  float *target(const Sum &sum) const noexcept;
  void prepare(const Sum &sum, device::Stream &stream) const;
  void send(const Sum &sum, bool accumulate, Comm *comm, device::Stream &stream) const;
  void swap_slices(const Sum &sum, Comm *comm, device::Stream &stream) const;
  void pass(const Part &from, const Move &move, Comm *comm, device::Stream &stream) const;
  void add(const Sum &sum, bool accumulate, device::Stream &stream) const;
  void spread(std::span<const Sum> sums, bool accumulate, device::Stream &stream);
  uint64_t bytes_of(std::span<const Sum> sums, bool accumulate) const noexcept;
  void count_sent(std::span<const Sum> sums) noexcept;

  std::shared_ptr<Communicators> communicators_;
  std::shared_ptr<Launches> launches_;
  uint32_t rank_, size_;
  Shape shape_;
  std::unique_ptr<device::Memory> word_;  // a word that barriers sum
  uint64_t sent_ = 0;
};

}  // namespace fsdp::transport::nccl
