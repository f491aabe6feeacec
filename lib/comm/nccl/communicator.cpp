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
  return sum_bytes(spans, [](const ReduceSpan &span) { return span.shard_count * dtype_size(span.sent_dtype()); });
}

// Where it rounds at no hop.
bool nccl_adds(const ReduceSpan &span) { return span.sent_dtype() == FSDP_FLOAT32; }

bool is_rounded(const ReduceSpan &span) { return span.sent_dtype() != span.dtype; }

uint64_t slice_bytes(const ReduceSpan &span) { return span.shard_count * dtype_size(span.sent_dtype()); }

// The slices that this rank sends, by the rank that each is for.
std::byte *sent(const ReduceSpan &span, std::byte *own) { return is_rounded(span) ? span.wire : own; }

// ... and those that are for it, by the rank that they are of.
std::byte *received(const ReduceSpan &span, std::byte *own, uint32_t ranks) {
  if (ranks == 1) return sent(span, own);
  return span.received ? span.received : own;
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

// Its own slice a rank does not send.
void NcclCommunicator::prepare(const ReduceSpan &span, device::Stream &stream) const {
  if (nccl_adds(span)) return;
  std::byte *const mine = own(span.from);
  if (is_rounded(span)) stream.cast(span.wire, span.wire_dtype, mine, span.dtype, seat_->size() * span.shard_count);
  if (seat_->size() == 1) return;
  const uint64_t place = seat_->rank() * slice_bytes(span);
  stream.copy(received(span, mine, seat_->size()) + place, sent(span, mine) + place, slice_bytes(span));
}

// A message to each peer, and one of each.
void NcclCommunicator::exchange(const ReduceSpan &span, Comm *comm, device::Stream &stream) const {
  const Library &library = launches_->library();
  const DataType type = data_type_of(span.sent_dtype());
  for (uint32_t r = 0; r < seat_->size(); ++r) {
    if (r == seat_->rank()) continue;
    const uint64_t place = r * slice_bytes(span);
    launches_->check(library.ncclSend(sent(span, own(span.from)) + place, span.shard_count, type, static_cast<int>(r),
                                      comm, stream.handle()),
                     "ncclSend", comm);
    launches_->check(library.ncclRecv(received(span, own(span.from), seat_->size()) + place, span.shard_count, type,
                                      static_cast<int>(r), comm, stream.handle()),
                     "ncclRecv", comm);
  }
}

// Of what NCCL has added there is one addend.
void NcclCommunicator::add(const ReduceSpan &span, device::Stream &stream) const {
  std::byte *const mine = own(span.from);
  const uint64_t bytes = slice_bytes(span);
  if (nccl_adds(span))
    stream.rank_sum({mine + seat_->rank() * bytes, 0, 1, FSDP_FLOAT32, FSDP_FLOAT32, span.to, span.shard_count,
                     span.factor, span.accumulate});
  else
    stream.rank_sum({received(span, mine, seat_->size()), bytes, seat_->size(), span.sent_dtype(), span.wire_dtype,
                     span.to, span.shard_count, span.factor, span.accumulate});
}

void NcclCommunicator::reduce(std::span<const ReduceSpan> spans, device::Stream &stream) {
  for (const ReduceSpan &span : spans)
    if (span.shard_count) prepare(span, stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const ReduceSpan &span : spans) {
      if (span.shard_count == 0) continue;
      if (!nccl_adds(span)) {
        exchange(span, comm, stream);
        continue;
      }
      std::byte *const whole = own(span.from);
      launches_->check(launches_->library().ncclReduceScatter(whole, whole + seat_->rank() * slice_bytes(span),
                                                              span.shard_count, float32, sum, comm, stream.handle()),
                       "ncclReduceScatter", comm);
    }
  });
  for (const ReduceSpan &span : spans)
    if (span.shard_count) add(span, stream);
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
                           span.accumulate, span.wire, span.received});
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
