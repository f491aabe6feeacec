// SPDX-License-Identifier: Apache-2.0
// A Net whose messages are channels over one transport.
#pragma once

#include <memory>

#include "transport/message/channel/channel.h"
#include "transport/message/channel/transport.h"

namespace fsdp::transport::messages {

// Collectives between hosts: a channel, and the launches that are enqueued on it.

class ChannelCollectives final : public Collectives {
 public:
  ChannelCollectives(std::shared_ptr<Seat> seat, std::unique_ptr<Channel> channel)
      : seat_(std::move(seat)), channel_(std::move(channel)) {}

  void gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override {
    gather(gathers, tag, stream);
  }
  Ticket gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) override;
  Ticket sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) override;
  Ticket broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) override;
  Ticket exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) override;
  Ticket barrier(Tag tag, device::Stream &stream) override;
  // Sources are free when the stream has done the collective.
  void await_release(Ticket, device::Stream &) override {}
  bool released(Ticket) const noexcept override { return true; }
  uint64_t sent_bytes() const noexcept override { return channel_->sent_bytes(); }

  void quiesce() override;
  void abandon() override;
  std::optional<Error> broken() const override { return channel_->round().broken(); }
  void next_round() override { channel_->round().next(); }

 private:
  Ticket enqueue(Launch &launch, device::Stream &stream);

  std::shared_ptr<Seat> seat_;
  std::unique_ptr<Channel> channel_;
  LaunchPool launches_;
};

// `chunk_bytes` is the size of the largest chunk that the transport carries; see read_net_chunk_bytes().
std::unique_ptr<Net> create_net(std::unique_ptr<Transport> transport, uint64_t chunk_bytes);

}  // namespace fsdp::transport::messages
