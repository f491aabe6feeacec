// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/messages.h"

namespace fsdp::comm::nccl {

NcclMessages::NcclMessages(std::shared_ptr<Seat> seat, std::shared_ptr<Launches> launches)
    : seat_(std::move(seat)),
      launches_(std::move(launches)),
      word_(seat_->device().allocate(sizeof(float), "the word of NCCL barriers")) {}

NcclMessages::~NcclMessages() { seat_->close(launches_); }

void NcclMessages::begin(const char *operation, const Tag &tag, uint64_t bytes, uint64_t sent, device::Stream &stream) {
  launches_->begin(operation, tag, bytes, stream);
  sent_ += sent;
}

void NcclMessages::all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) {
  uint64_t count = 0;
  for (const SumSpan &span : spans) count += span.count;
  const uint64_t peers = seat_->size() - 1;
  begin("all_reduce", tag, count * sizeof(float), 2 * peers * count * sizeof(float) / seat_->size(), stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const SumSpan &span : spans)
      if (span.count)
        launches_->check(launches_->library().ncclAllReduce(span.values, span.values, span.count, float32, sum, comm,
                                                            stream.handle()),
                         "ncclAllReduce", comm);
  });
  launches_->end(stream);
}

// In place: the own slice of the values becomes the sum.
void NcclMessages::reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) {
  uint64_t count = 0;
  for (const SliceSumSpan &span : spans) count += span.count;
  const auto slice = [&](const SliceSumSpan &span) { return span.values + seat_->rank() * span.count; };
  begin("reduce_scatter", tag, count * sizeof(float), (seat_->size() - 1) * count * sizeof(float), stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const SliceSumSpan &span : spans)
      if (span.count)
        launches_->check(launches_->library().ncclReduceScatter(span.values, slice(span), span.count, float32, sum,
                                                                comm, stream.handle()),
                         "ncclReduceScatter", comm);
  });
  for (const SliceSumSpan &span : spans) {
    if (span.count == 0 || span.to == slice(span)) continue;
    if (span.accumulate)
      stream.add(span.to, FSDP_FLOAT32, slice(span), FSDP_FLOAT32, span.count);
    else
      stream.copy(span.to, slice(span), span.count * sizeof(float));
  }
  launches_->end(stream);
}

void NcclMessages::all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) {
  uint64_t bytes = 0;
  for (const WholeSpan &span : spans) bytes += span.bytes;
  begin("all_gather", tag, bytes, (seat_->size() - 1) * bytes, stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const WholeSpan &span : spans)
      if (span.bytes)
        launches_->check(launches_->library().ncclAllGather(span.whole + seat_->rank() * span.bytes, span.whole,
                                                            span.bytes, uint8, comm, stream.handle()),
                         "ncclAllGather", comm);
  });
  launches_->end(stream);
}

void NcclMessages::broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  begin("broadcast", tag, bytes, seat_->rank() == root ? (seat_->size() - 1) * bytes : 0, stream);
  launches_->run(stream, [&](Comm *comm) {
    launches_->check(
        launches_->library().ncclBroadcast(data, data, bytes, uint8, static_cast<int>(root), comm, stream.handle()),
        "ncclBroadcast", comm);
  });
  launches_->end(stream);
}

void NcclMessages::barrier(Tag tag, device::Stream &stream) {
  begin("barrier", tag, 0, 0, stream);
  launches_->run(stream, [&](Comm *comm) {
    launches_->check(
        launches_->library().ncclAllReduce(word_->data(), word_->data(), 1, float32, sum, comm, stream.handle()),
        "ncclAllReduce", comm);
  });
  launches_->end(stream);
}

void NcclMessages::next_round() { seat_->end_round(*launches_); }

}  // namespace fsdp::comm::nccl
