// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/staged_communicator.h"

#include <algorithm>

#include "comm/call/message_launch.h"
#include "device/host/kernels.h"

namespace fsdp::comm {
namespace {

// Of a few ranks they stay in the caches, and a wait costs little beside the copies.
constexpr uint64_t half_bytes = uint64_t{256} << 10;
constexpr uint64_t half_floats = half_bytes / sizeof(float);
constexpr uint32_t step_bits = 36;
constexpr uint64_t first_step(uint64_t round) { return round << step_bits; }

// Calls do(offset, length) for the pieces of [0, count). False as soon as one is.
template <class Do>
bool in_chunks(uint64_t count, uint64_t chunk, Do &&piece) {
  for (uint64_t offset = 0; offset < count; offset += chunk)
    if (!piece(offset, std::min(chunk, count - offset))) return false;
  return true;
}

float *floats(std::byte *bytes) { return reinterpret_cast<float *>(bytes); }

}  // namespace

uint64_t message_staging_bytes(uint32_t) noexcept { return 2 * half_bytes; }

StagedCommunicator::StagedCommunicator(std::unique_ptr<ShmCommunicator> calls, std::unique_ptr<Arena> staging,
                                       Mapping steps, uint32_t rank, std::vector<uint32_t> ranks)
    : calls_(std::move(calls)),
      staging_(std::move(staging)),
      memory_(std::move(steps)),
      rank_(rank),
      ranks_(std::move(ranks)),
      words_(memory_.data(), sizeof(Word), ranks_) {
  if (size() > half_floats)
    fail(FSDP_UNSUPPORTED, "messages between {} ranks of one host, more than {}", size(), half_floats);
}

void StagedCommunicator::all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::all_reduce, tag, spans.size());
  add_spans(launch, spans);
  calls_->enqueue(launch, stream);
}

void StagedCommunicator::reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::reduce_scatter, tag, spans.size());
  add_spans(launch, spans, size());
  calls_->enqueue(launch, stream);
}

void StagedCommunicator::all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::all_gather, tag, spans.size());
  add_spans(launch, spans);
  calls_->enqueue(launch, stream);
}

void StagedCommunicator::broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::broadcast, tag, 1);
  add_broadcast(launch, data, bytes, root, size());
  calls_->enqueue(launch, stream);
}

Launch &StagedCommunicator::start(Operation operation, const Tag &tag, uint64_t piece_count) {
  Launch &launch = calls_->start(operation, tag, piece_count);
  launch.worker = this;
  return launch;
}

bool StagedCommunicator::work(const Launch &launch) {
  step_ = std::max(step_, first_step(launch.round));
  for (const Piece &piece : launch.pieces) {
    const auto in = [&](uint64_t chunk, auto member) {
      return in_chunks(piece.count, chunk,
                       [&](uint64_t offset, uint64_t count) { return (this->*member)(launch, piece, offset, count); });
    };
    bool done = true;
    switch (launch.operation) {
      case Operation::all_reduce: done = in(half_floats, &StagedCommunicator::sum_chunk); break;
      case Operation::reduce_scatter: done = in(half_floats / size(), &StagedCommunicator::slice_chunk); break;
      case Operation::all_gather: done = in(half_bytes, &StagedCommunicator::gather_chunk); break;
      case Operation::broadcast: done = in(half_bytes, &StagedCommunicator::broadcast_chunk); break;
      case Operation::barrier: break;
    }
    if (!done) return false;
  }
  return true;
}

std::byte *StagedCommunicator::own_half() const noexcept {
  return staging_->writable() + (2 * rank_ + (step_ + 1) % 2) * half_bytes;
}

const std::byte *StagedCommunicator::half(uint32_t r) const noexcept {
  return staging_->data() + (2 * r + step_ % 2) * half_bytes;
}

bool StagedCommunicator::meet(const Launch &launch) {
  words_[rank_].raise(++step_);
  return calls_->await_step(launch, words_, step_);
}

void StagedCommunicator::sum(float *to, uint64_t offset, uint64_t count, bool accumulate) const {
  add_in_rank_order(half(0) + offset * sizeof(float), 2 * half_bytes, size(), to, count, accumulate);
}

// Two steps: each rank sums its slice of the chunk, and then all have the sums.
bool StagedCommunicator::sum_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t count) {
  float *values = floats(piece.to) + offset;
  const uint64_t slice = (count + size() - 1) / size();
  const auto begin = [&](uint32_t r) { return std::min(r * slice, count); };
  const auto length = [&](uint32_t r) { return begin(r + 1) - begin(r); };
  device::kernels::copy_bytes(own_half(), values, count * sizeof(float));
  if (!meet(launch)) return false;
  sum(floats(own_half()), begin(rank_), length(rank_), false);
  count_sent((count - length(rank_) + (size() - 1) * length(rank_)) * sizeof(float));
  if (!meet(launch)) return false;
  for (uint32_t r = 0; r < size(); ++r)
    device::kernels::copy_bytes(values + begin(r), half(r), length(r) * sizeof(float));
  return true;
}

bool StagedCommunicator::slice_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t count) {
  const auto *values = reinterpret_cast<const float *>(piece.values);
  for (uint32_t r = 0; r < size(); ++r)
    device::kernels::copy_bytes(floats(own_half()) + r * count, values + r * piece.count + offset,
                                count * sizeof(float));
  count_sent((size() - 1) * count * sizeof(float));
  if (!meet(launch)) return false;
  sum(floats(piece.to) + offset, rank_ * count, count, piece.accumulate);
  return true;
}

bool StagedCommunicator::gather_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t bytes) {
  device::kernels::copy_bytes(own_half(), piece.to + rank_ * piece.count + offset, bytes);
  count_sent((size() - 1) * bytes);
  if (!meet(launch)) return false;
  for (uint32_t r = 0; r < size(); ++r)
    if (r != rank_) device::kernels::copy_bytes(piece.to + r * piece.count + offset, half(r), bytes);
  return true;
}

bool StagedCommunicator::broadcast_chunk(const Launch &launch, const Piece &piece, uint64_t offset, uint64_t bytes) {
  const bool gives = rank_ == launch.root;
  if (gives) {
    device::kernels::copy_bytes(own_half(), piece.to + offset, bytes);
    count_sent((size() - 1) * bytes);
  }
  if (!meet(launch)) return false;
  if (!gives) device::kernels::copy_bytes(piece.to + offset, half(launch.root), bytes);
  return true;
}

}  // namespace fsdp::comm
