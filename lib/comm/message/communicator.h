// SPDX-License-Identifier: Apache-2.0
// MessageCommunicator between hosts: a channel and what is enqueued on it.
#pragma once

#include "comm/message/channel.h"

namespace fsdp::comm::messages {

class ChannelCommunicator final : public MessageCommunicator {
 public:
  ChannelCommunicator(std::shared_ptr<Seat> seat, std::unique_ptr<Channel> channel)
      : seat_(std::move(seat)), channel_(std::move(channel)) {}

  void all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) override;
  void reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) override;
  void all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) override;
  void broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  void barrier(Tag tag, device::Stream &stream) override;
  uint64_t sent_bytes() const noexcept override { return channel_->sent_bytes(); }

  void quiesce() override;
  void abandon() override;
  std::optional<Error> broken() const override { return channel_->round().broken(); }
  void next_round() override { channel_->round().next(); }

 private:
  Launch &start(Operation operation, const Tag &tag, uint64_t piece_count);
  void enqueue(Launch &launch, device::Stream &stream);

  std::shared_ptr<Seat> seat_;
  std::unique_ptr<Channel> channel_;
  LaunchPool launches_;
};

}  // namespace fsdp::comm::messages
