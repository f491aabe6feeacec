// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/collectives.h"

#include "transport/call/describe.h"

namespace fsdp::transport::messages {

Ticket ChannelCollectives::enqueue(Launch &launch, device::Stream &stream) {
  seat_->watch.enter_caller();
  launch.round = channel_->round().number();
  launch.number = channel_->round().enqueue();
  stream.run([channel = channel_.get(), pending = &launch] {
    const LaunchReturn guard(*pending);
    channel->run(*pending, false);
  });
  return {};
}

Ticket ChannelCollectives::gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  Launch &launch = launches_.take(Operation::all_gather, tag, gathers.size());
  launch.add(gathers);
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) {
  const Operation operation = operation_of(sums, accumulate, Shape::messages(), channel_->size(), tag);
  Launch &launch = launches_.take(operation, tag, sums.size());
  launch.add(sums, accumulate);
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  require_root(root, channel_->size());
  Launch &launch = launches_.take(Operation::broadcast, tag, 1);
  launch.add_broadcast(data, bytes, root);
  return enqueue(launch, stream);
}

Ticket ChannelCollectives::barrier(Tag tag, device::Stream &stream) {
  return enqueue(launches_.take(Operation::barrier, tag, 0), stream);
}

void ChannelCollectives::quiesce() {
  channel_->round().quiesce();
  channel_->tell_end();
}

// After a failure of the job this rank does not tell its peers that it gives up. That message is faster than the
// verdict, and the peers would name this rank as the cause.
void ChannelCollectives::abandon() {
  const bool failed = seat_->watch.has_failed();
  channel_->round().abandon();
  if (!failed) channel_->tell_end();
}

}  // namespace fsdp::transport::messages
