// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/collectives.h"

#include <algorithm>

#include "base/dtype.h"
#include "transport/call/launch.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {
namespace {

// NCCL adds only those sums that it does not round at each hop.
bool nccl_adds(const Sum &sum) { return sum.sent_dtype() == FSDP_FLOAT32; }

bool is_rounded(const Sum &sum) { return sum.sent_dtype() != sum.dtype; }

// NCCL accepts 2048 operations in a group.
constexpr size_t moves_of_launch = 1024;

// The slices that this rank sends, ordered by receiver.
std::byte *sent(const Sum &sum) { return is_rounded(sum) ? sum.rounded : sum.from.own; }

uint64_t gathered_bytes(std::span<const Gather> gathers) noexcept {
  uint64_t bytes = 0;
  for (const Gather &gather : gathers) bytes += gather.bytes;
  return bytes;
}

}  // namespace

NcclCollectives::NcclCollectives(std::shared_ptr<Communicators> communicators, std::shared_ptr<Launches> launches,
                                 const Shape &shape)
    : communicators_(std::move(communicators)),
      launches_(std::move(launches)),
      rank_(communicators_->rank()),
      size_(communicators_->size()),
      shape_(shape),
      word_(communicators_->device().allocate(sizeof(float), "the word of NCCL barriers")) {}

NcclCollectives::~NcclCollectives() { communicators_->close(launches_); }

Ticket NcclCollectives::enqueue_gather(const char *operation, std::span<const Gather> gathers, const Tag &tag,
                                       device::Stream &stream) {
  const uint64_t bytes = gathered_bytes(gathers);
  launches_->begin(operation, tag, bytes, stream);
  sent_ += (size_ - 1) * bytes;
  launches_->run(stream, [&](Comm *comm) {
    for (const Gather &gather : gathers)
      if (gather.bytes)
        launches_->check(
            launches_->library().ncclAllGather(gather.from.own, gather.to, gather.bytes, uint8, comm, stream.handle()),
            "ncclAllGather", comm);
  });
  return launches_->end(stream);
}

void NcclCollectives::gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  enqueue_gather("gather", gathers, tag, stream);
}

Ticket NcclCollectives::gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  return enqueue_gather("all_gather", gathers, tag, stream);
}

// Sums in place without arenas are all-reduces and need no kernel. Over arenas slices are summed and gathered, so that
// the bits are those of slices.
bool NcclCollectives::all_reduces(const Sum &sum, bool accumulate) const noexcept {
  return !shape_.arenas && sum.everywhere && sum.plain() && !accumulate && sum.to.own == sum.from.own;
}

// The slices for this rank, ordered by sender.
std::byte *NcclCollectives::received(const Sum &sum) const noexcept {
  if (size_ == 1) return sent(sum);
  return sum.received ? sum.received : sum.from.own;
}

// The place of this rank's slice of the sum.
float *NcclCollectives::target(const Sum &sum) const noexcept {
  return sum.to.floats() + (sum.everywhere ? rank_ * (sum.count / size_) : 0);
}

// A rank does not send its own slice.
void NcclCollectives::prepare(const Sum &sum, device::Stream &stream) const {
  if (nccl_adds(sum)) return;
  if (is_rounded(sum)) stream.cast(sum.rounded, sum.wire, sum.from.own, sum.dtype, sum.count);
  if (size_ == 1) return;
  const uint64_t place = rank_ * slice_bytes(sum);
  stream.copy(received(sum) + place, sent(sum) + place, slice_bytes(sum));
}

// Sends one message to each peer and receives one from each.
void NcclCollectives::swap_slices(const Sum &sum, Comm *comm, device::Stream &stream) const {
  const Library &library = launches_->library();
  const DataType type = data_type_of(sum.sent_dtype());
  const uint64_t count = sum.count / size_;
  for (uint32_t r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const uint64_t place = r * slice_bytes(sum);
    launches_->check(library.ncclSend(sent(sum) + place, count, type, static_cast<int>(r), comm, stream.handle()),
                     "ncclSend", comm);
    launches_->check(library.ncclRecv(received(sum) + place, count, type, static_cast<int>(r), comm, stream.handle()),
                     "ncclRecv", comm);
  }
}

void NcclCollectives::send(const Sum &sum, bool accumulate, Comm *comm, device::Stream &stream) const {
  const Library &library = launches_->library();
  std::byte *const whole = sum.from.own;
  if (all_reduces(sum, accumulate))
    launches_->check(library.ncclAllReduce(whole, whole, sum.count, float32, addition, comm, stream.handle()),
                     "ncclAllReduce", comm);
  else if (nccl_adds(sum))
    launches_->check(library.ncclReduceScatter(whole, whole + rank_ * slice_bytes(sum), sum.count / size_, float32,
                                               addition, comm, stream.handle()),
                     "ncclReduceScatter", comm);
  else
    swap_slices(sum, comm, stream);
}

// If NCCL has added, there is only one addend, which may already be at its place.
void NcclCollectives::add(const Sum &sum, bool accumulate, device::Stream &stream) const {
  if (all_reduces(sum, accumulate)) return;
  float *const to = target(sum);
  const uint64_t bytes = slice_bytes(sum), count = sum.count / size_;
  if (!nccl_adds(sum))
    return stream.rank_sum(
        {received(sum), bytes, size_, sum.sent_dtype(), sum.wire, to, count, sum.factor, accumulate});
  std::byte *const slice = sum.from.own + rank_ * bytes;
  if (sum.plain() && slice == reinterpret_cast<std::byte *>(to)) return;
  stream.rank_sum({slice, 0, 1, FSDP_FLOAT32, FSDP_FLOAT32, to, count, sum.factor, accumulate});
}

// Gathers the slices of sums that go everywhere.
void NcclCollectives::spread(std::span<const Sum> sums, bool accumulate, device::Stream &stream) {
  if (std::ranges::all_of(sums, [&](const Sum &sum) { return all_reduces(sum, accumulate); })) return;
  launches_->run(stream, [&](Comm *comm) {
    for (const Sum &sum : sums)
      if (sum.count && !all_reduces(sum, accumulate))
        launches_->check(launches_->library().ncclAllGather(target(sum), sum.to.own, sum.count / size_, float32, comm,
                                                            stream.handle()),
                         "ncclAllGather", comm);
  });
}

uint64_t NcclCollectives::bytes_of(std::span<const Sum> sums, bool accumulate) const noexcept {
  uint64_t bytes = 0;
  for (const Sum &sum : sums) bytes += all_reduces(sum, accumulate) ? sum.count * sizeof(float) : slice_bytes(sum);
  return bytes;
}

void NcclCollectives::count_sent(std::span<const Sum> sums) noexcept {
  uint64_t bytes = 0;
  for (const Sum &sum : sums)
    bytes += sum.count * (dtype_size(sum.sent_dtype()) + (sum.everywhere ? sizeof(float) : 0));
  sent_ += (size_ - 1) * bytes / size_;
}

Ticket NcclCollectives::sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) {
  const transport::Operation operation = operation_of(sums, accumulate, shape_, size_, tag);
  launches_->begin(operation_name(operation), tag, bytes_of(sums, accumulate), stream);
  count_sent(sums);
  for (const Sum &sum : sums)
    if (sum.count) prepare(sum, stream);
  launches_->run(stream, [&](Comm *comm) {
    for (const Sum &sum : sums)
      if (sum.count) send(sum, accumulate, comm, stream);
  });
  for (const Sum &sum : sums)
    if (sum.count) add(sum, accumulate, stream);
  if (operation == transport::Operation::all_reduce) spread(sums, accumulate, stream);
  return launches_->end(stream);
}

Ticket NcclCollectives::broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  require_root(root, size_);
  launches_->begin("broadcast", tag, bytes, stream);
  if (rank_ == root) sent_ += (size_ - 1) * bytes;
  launches_->run(stream, [&](Comm *comm) {
    launches_->check(launches_->library().ncclBroadcast(data.own, data.own, bytes, uint8, static_cast<int>(root), comm,
                                                        stream.handle()),
                     "ncclBroadcast", comm);
  });
  return launches_->end(stream);
}

void NcclCollectives::pass(const Part &from, const Move &move, Comm *comm, device::Stream &stream) const {
  const Library &library = launches_->library();
  if (move.source == move.target || move.bytes == 0) return;
  if (move.source == rank_)
    launches_->check(library.ncclSend(from.own + move.offset, move.bytes, uint8, static_cast<int>(move.target), comm,
                                      stream.handle()),
                     "ncclSend", comm);
  if (move.target == rank_)
    launches_->check(library.ncclRecv(move.to, move.bytes, uint8, static_cast<int>(move.source), comm, stream.handle()),
                     "ncclRecv", comm);
}

// All ranks divide the moves in the same way. A rank without moves to or from others launches nothing. NCCL compares
// nothing, so the history has the hash of the moves.
Ticket NcclCollectives::exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) {
  require_moves(from, moves, shape_, size_, tag);
  Fingerprint call = Fingerprint::of(transport::Operation::exchange, {tag.what, tag.name});
  describe(call, moves);
  launches_->begin("exchange", tag, call.elements, stream, call.hash);
  for (const Move &move : moves) {
    if (move.source != rank_ || move.bytes == 0) continue;
    if (move.target != rank_)
      sent_ += move.bytes;
    else if (move.to != from.own + move.offset)
      stream.copy(move.to, from.own + move.offset, move.bytes);
  }
  for (size_t first = 0; first < moves.size(); first += moves_of_launch)
    launches_->run(stream, [&](Comm *comm) {
      for (const Move &move : moves.subspan(first, std::min(moves_of_launch, moves.size() - first)))
        pass(from, move, comm, stream);
    });
  return launches_->end(stream);
}

Ticket NcclCollectives::barrier(Tag tag, device::Stream &stream) {
  launches_->begin("barrier", tag, 0, stream);
  launches_->run(stream, [&](Comm *comm) {
    launches_->check(
        launches_->library().ncclAllReduce(word_->data(), word_->data(), 1, float32, addition, comm, stream.handle()),
        "ncclAllReduce", comm);
  });
  return launches_->end(stream);
}

void NcclCollectives::next_round() { communicators_->end_round(*launches_); }

}  // namespace fsdp::transport::nccl
