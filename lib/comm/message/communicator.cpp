// SPDX-License-Identifier: Apache-2.0
#include "comm/message/communicator.h"

#include "comm/call/message_launch.h"

namespace fsdp::comm::messages {

Launch &ChannelCommunicator::start(Operation operation, const Tag &tag, uint64_t piece_count) {
  Launch &launch = launches_.take(piece_count);
  launch.start(operation, tag);
  return launch;
}

void ChannelCommunicator::enqueue(Launch &launch, device::Stream &stream) {
  seat_->watch.enter_caller();
  launch.round = channel_->round().number();
  launch.number = channel_->round().enqueue();
  stream.run([channel = channel_.get(), pending = &launch] {
    const LaunchReturn guard(*pending);
    channel->run(*pending, false);
  });
}

void ChannelCommunicator::all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::all_reduce, tag, spans.size());
  add_spans(launch, spans);
  enqueue(launch, stream);
}

void ChannelCommunicator::reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::reduce_scatter, tag, spans.size());
  add_spans(launch, spans, channel_->size());
  enqueue(launch, stream);
}

void ChannelCommunicator::all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::all_gather, tag, spans.size());
  add_spans(launch, spans);
  enqueue(launch, stream);
}

void ChannelCommunicator::broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::broadcast, tag, 1);
  add_broadcast(launch, data, bytes, root, channel_->size());
  enqueue(launch, stream);
}

void ChannelCommunicator::barrier(Tag tag, device::Stream &stream) {
  enqueue(start(Operation::barrier, tag, 0), stream);
}

void ChannelCommunicator::quiesce() {
  channel_->round().quiesce();
  channel_->tell_end();
}

void ChannelCommunicator::abandon() {
  channel_->round().abandon();
  channel_->tell_end();
}

}  // namespace fsdp::comm::messages
