// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/communicator.h"

#include "base/dtype.h"
#include "comm/nccl/types.h"

namespace fsdp::comm::nccl {
namespace {

template <class Spans, class BytesOf>
uint64_t sum_bytes(const Spans &spans, BytesOf &&bytes_of) {
  uint64_t bytes = 0;
  for (const auto &span : spans) bytes += bytes_of(span);
  return bytes;
}

uint64_t sent_bytes(std::span<const ReduceSpan> spans) {
  return sum_bytes(spans, [](const ReduceSpan &span) { return span.shard_count * dtype_size(span.wire_dtype); });
}

// What NCCL sums in, and what it then leaves there: this rank's slice.
struct WorkPlace {
  std::byte *whole, *slice;
};

WorkPlace work_place(const ReduceSpan &span, std::byte *own, uint32_t rank) {
  std::byte *whole = span.wire_dtype == span.dtype ? own : span.wire;
  return {whole, whole + rank * span.shard_count * dtype_size(span.wire_dtype)};
}

}  // namespace

NcclCommunicator::NcclCommunicator(std::shared_ptr<Seat> seat, std::shared_ptr<Launches> launches)
    : seat_(std::move(seat)),
      launches_(std::move(launches)),
      word_(seat_->device().allocate(sizeof(float), "the word of NCCL barriers")) {}

NcclCommunicator::~NcclCommunicator() { seat_->close(launches_); }

Ticket NcclCommunicator::gather(const char *operation, std::span<const GatherSpan> spans, const Tag &tag,
                                device::Stream &stream) {
  launches_->begin(operation, tag, sum_bytes(spans, [](const GatherSpan &span) { return span.bytes; }), stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const GatherSpan &span : spans) {
      if (span.bytes == 0) continue;
      launches_->check(
          launches_->library().ncclAllGather(own(span.from), span.to, span.bytes, uint8, comm, stream.handle()),
          "ncclAllGather", comm);
    }
  });
  return launches_->end(stream);
}

void NcclCommunicator::gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) {
  gather("gather", spans, tag, stream);
}

Ticket NcclCommunicator::all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) {
  return gather("all_gather", spans, tag, stream);
}

// Sums of float16 may leave its range before the factor is applied.
Operation NcclCommunicator::operation_of(const ReduceSpan &span) const {
  const bool scaled = seat_->features().premultiply && span.wire_dtype == FSDP_FLOAT16 && span.factor != 1.0F;
  return scaled ? launches_->connection().scaled_sum(span.factor) : sum;
}

void NcclCommunicator::reduce(std::span<const ReduceSpan> spans, device::Stream &stream) {
  const uint32_t rank = seat_->rank();
  for (const ReduceSpan &span : spans) {
    (void)operation_of(span);  // made outside of the group
    if (span.wire_dtype != span.dtype && span.shard_count)
      stream.cast(span.wire, span.wire_dtype, own(span.from), span.dtype, seat_->size() * span.shard_count);
  }
  launches_->run(stream, [&](Comm *comm) {
    for (const ReduceSpan &span : spans) {
      if (span.shard_count == 0) continue;
      const WorkPlace place = work_place(span, own(span.from), rank);
      launches_->check(launches_->library().ncclReduceScatter(place.whole, place.slice, span.shard_count,
                                                              data_type_of(span.wire_dtype), operation_of(span), comm,
                                                              stream.handle()),
                       "ncclReduceScatter", comm);
    }
  });
  for (const ReduceSpan &span : spans) {
    if (span.shard_count == 0) continue;
    const float factor = operation_of(span) == sum ? span.factor : 1.0F;
    stream.rank_sum({work_place(span, own(span.from), rank).slice, 0, 1, span.wire_dtype, span.wire_dtype, span.to,
                     span.shard_count, factor, span.accumulate});
  }
}

Ticket NcclCommunicator::reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) {
  launches_->begin("reduce_scatter", tag, sent_bytes(spans), stream);
  reduce(spans, stream);
  return launches_->end(stream);
}

Ticket NcclCommunicator::all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) {
  const auto slice = [&](const AllReduceSpan &span) {
    return reinterpret_cast<float *>(span.whole_writable) + seat_->rank() * span.shard_count;
  };
  reductions_.clear();
  for (const AllReduceSpan &span : spans)
    reductions_.push_back({span.from, span.dtype, span.wire_dtype, span.shard_count, slice(span), span.factor,
                           span.accumulate, span.wire});
  launches_->begin("all_reduce", tag, sent_bytes(reductions_), stream);
  reduce(reductions_, stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const AllReduceSpan &span : spans) {
      if (span.shard_count == 0) continue;
      launches_->check(launches_->library().ncclAllGather(slice(span), span.whole_writable, span.shard_count, float32,
                                                          comm, stream.handle()),
                       "ncclAllGather", comm);
    }
  });
  return launches_->end(stream);
}

Ticket NcclCommunicator::broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                                   device::Stream &stream) {
  launches_->begin("broadcast", tag, bytes, stream);
  const std::byte *mine = seat_->rank() == root ? own(from) : to;
  launches_->run(stream, [&](Comm *comm) {
    launches_->check(
        launches_->library().ncclBroadcast(mine, to, bytes, uint8, static_cast<int>(root), comm, stream.handle()),
        "ncclBroadcast", comm);
  });
  return launches_->end(stream);
}

Ticket NcclCommunicator::barrier(Tag tag, device::Stream &stream) {
  launches_->begin("barrier", tag, 0, stream);
  launches_->run(stream, [&](Comm *comm) {
    launches_->check(
        launches_->library().ncclAllReduce(word_->data(), word_->data(), 1, float32, sum, comm, stream.handle()),
        "ncclAllReduce", comm);
  });
  return launches_->end(stream);
}

void NcclCommunicator::next_round() { seat_->end_round(*launches_); }

}  // namespace fsdp::comm::nccl
