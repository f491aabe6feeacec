// SPDX-License-Identifier: Apache-2.0
// Collectives between ranks that name addresses of their own, by NCCL: replicas, and hosts.
#pragma once

#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/nccl/seat.h"

namespace fsdp::comm::nccl {

class NcclMessages final : public MessageCommunicator {
 public:
  NcclMessages(std::shared_ptr<Seat> seat, std::shared_ptr<Launches> launches);
  ~NcclMessages() override;

  void all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) override;
  void reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) override;
  void all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) override;
  void broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  void barrier(Tag tag, device::Stream &stream) override;
  // As if each byte went once to the ranks that need it: what NCCL really sends it does not say.
  uint64_t sent_bytes() const noexcept override { return sent_; }

  void quiesce() override { launches_->quiesce(); }
  void abandon() override { launches_->abandon(); }
  std::optional<Error> broken() const override { return std::nullopt; }
  void next_round() override;

 private:
  void begin(const char *operation, const Tag &tag, uint64_t bytes, uint64_t sent, device::Stream &stream);

  std::shared_ptr<Seat> seat_;
  std::shared_ptr<Launches> launches_;
  std::unique_ptr<device::Memory> word_;
  uint64_t sent_ = 0;
};

}  // namespace fsdp::comm::nccl
