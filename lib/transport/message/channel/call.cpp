// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/call.h"

#include <algorithm>
#include <cstring>

#include "transport/call/launch.h"

namespace fsdp::transport::messages {
namespace {

// A short call has smaller chunks, so that its chunks, too, are summed while others are sent.
constexpr uint64_t least_chunks = 4, least_chunk_bytes = uint64_t{64} << 10;

}  // namespace

void Call::start(const Launch &launch, uint32_t rank, uint32_t ranks, uint64_t chunk_bytes) {
  launch_ = &launch;
  rank_ = rank;
  ranks_ = ranks;
  uint64_t all = 0;
  for (const Piece &piece : launch.pieces) all += slice_bytes(piece);
  chunk_bytes_ = std::min(chunk_bytes, std::max(least_chunk_bytes, all / least_chunks / 64 * 64));
  chunks_ = 0;
  first_.clear();
  for (const Piece &piece : launch.pieces) {
    first_.push_back(chunks_);
    chunks_ += (slice_bytes(piece) + chunk_bytes_ - 1) / chunk_bytes_;
  }
}

bool Call::reduces() const noexcept {
  return operation() == Operation::all_reduce || operation() == Operation::reduce_scatter;
}

uint64_t Call::gathered_from(uint32_t r) const noexcept {
  if (operation() == Operation::broadcast) return r == launch_->root ? chunks_ : 0;
  return operation() == Operation::reduce_scatter ? 0 : chunks_;
}

// The length of the longest slice.
uint64_t Call::slice_bytes(const Piece &piece) const noexcept {
  return reduces() ? Slices(piece.count, ranks_).longest() * sizeof(float) : piece.count;
}

// Begin and length of a rank's slice in the piece, in bytes.
std::pair<uint64_t, uint64_t> Call::bounds(const Piece &piece, uint32_t r) const noexcept {
  if (operation() == Operation::broadcast) return {0, piece.count};
  if (!reduces()) return {r * piece.count, piece.count};
  const Slices slices(piece.count, ranks_);
  return {slices.begin(r) * sizeof(float), slices.length(r) * sizeof(float)};
}

Call::Cut Call::cut(uint32_t r, uint64_t chunk) const noexcept {
  const auto after =
      std::upper_bound(first_.begin(), first_.end(), chunk);  // empty pieces begin where the next one does
  const auto index = static_cast<size_t>(after - first_.begin()) - 1;
  const Piece &piece = launch_->pieces[index];
  const uint64_t length = bounds(piece, r).second;
  const uint64_t offset = std::min((chunk - first_[index]) * chunk_bytes_, length);
  return {&piece, offset, std::min(chunk_bytes_, length - offset)};
}

// Sums that go everywhere are in place.
ByteSpan Call::slice(uint32_t r, uint64_t chunk) const noexcept {
  const Cut at = cut(r, chunk);
  std::byte *whole = reduces() ? at.piece->from.own : at.piece->to.own;
  return {whole + bounds(*at.piece, r).first + at.offset, at.bytes};
}

ByteSpan Call::sum(uint64_t chunk, bool &accumulate) const noexcept {
  const Cut at = cut(rank_, chunk);
  accumulate = at.piece->accumulate;
  if (operation() == Operation::all_reduce) return slice(rank_, chunk);
  return {at.piece->to.own + at.offset, at.bytes};
}

void Call::place_own(const Launch &launch, uint32_t rank) noexcept {
  if (launch.operation != Operation::all_gather) return;
  for (const Piece &piece : launch.pieces) {
    std::byte *place = piece.to.own + rank * piece.count;
    if (place != piece.from.own && piece.count) std::memcpy(place, piece.from.own, piece.count);
  }
}

}  // namespace fsdp::transport::messages
