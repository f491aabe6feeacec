// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/call.h"

#include <algorithm>
#include <cstring>

#include "transport/call/launch.h"

namespace fsdp::transport::messages {
namespace {

// A short call has smaller chunks, so that it can also sum some chunks while it sends others.
constexpr uint64_t least_chunks = 4, least_chunk_bytes = uint64_t{64} << 10;

}  // namespace

void Call::start(const Launch &launch, uint32_t rank, uint32_t ranks, uint64_t chunk_bytes) {
  launch_ = &launch;
  rank_ = rank;
  ranks_ = ranks;
  slices_.clear();
  exchanges() ? start_moves(chunk_bytes) : start_slices(chunk_bytes);
}

void Call::start_slices(uint64_t chunk_bytes) {
  uint64_t all = 0;
  for (const Piece &piece : launch_->pieces) all += slice_bytes(piece);
  chunk_bytes_ = std::min(chunk_bytes, std::max(least_chunk_bytes, all / least_chunks / 64 * 64));
  for (const Piece &piece : launch_->pieces) slices_.add(piece, slice_bytes(piece), chunk_bytes_);
}

// Nothing is summed, so shorter chunks would bring no gain. Moves of this rank to itself are among its own chunks,
// which no lane sends.
void Call::start_moves(uint64_t chunk_bytes) {
  chunk_bytes_ = chunk_bytes;
  for (auto *all : {&sent_, &received_}) {
    all->resize(ranks_);
    for (Chunks &chunks : *all) chunks.clear();
  }
  for (const Piece &piece : launch_->pieces) {
    Chunks &chunks = piece.source == rank_ ? sent_[piece.target] : received_[piece.source];
    chunks.add(piece, piece.count, chunk_bytes_);
  }
}

void Call::Chunks::clear() noexcept {
  firsts_.clear();
  count_ = 0;
}

void Call::Chunks::add(const Piece &piece, uint64_t bytes, uint64_t chunk_bytes) {
  firsts_.push_back({count_, &piece});
  count_ += (bytes + chunk_bytes - 1) / chunk_bytes;
}

// An empty piece begins at the same chunk as the next one.
const Piece &Call::Chunks::find(uint64_t &chunk) const noexcept {
  const auto after = std::upper_bound(firsts_.begin(), firsts_.end(), chunk,
                                      [](uint64_t number, const First &first) { return number < first.chunk; });
  const First &first = *std::prev(after);
  chunk -= first.chunk;
  return *first.piece;
}

bool Call::reduces() const noexcept {
  return operation() == Operation::all_reduce || operation() == Operation::reduce_scatter;
}

uint64_t Call::sent_to(uint32_t r) const noexcept {
  if (exchanges()) return sent_[r].count();
  return gathered_from(rank_);
}

uint64_t Call::received_from(uint32_t r) const noexcept {
  if (exchanges()) return received_[r].count();
  return gathered_from(r);
}

uint64_t Call::gathered_from(uint32_t r) const noexcept {
  if (operation() == Operation::broadcast) return r == launch_->root ? chunks() : 0;
  return operation() == Operation::reduce_scatter ? 0 : chunks();
}

ByteSpan Call::outgoing(uint32_t r, uint64_t chunk) const noexcept {
  return exchanges() ? move(sent_[r], chunk, &Piece::from) : slice(rank_, chunk);
}

ByteSpan Call::incoming(uint32_t r, uint64_t chunk) const noexcept {
  return exchanges() ? move(received_[r], chunk, &Piece::to) : slice(r, chunk);
}

ByteSpan Call::move(const Chunks &chunks, uint64_t chunk, Part Piece::*end) const noexcept {
  const Piece &piece = chunks.find(chunk);
  const uint64_t offset = chunk * chunk_bytes_;
  return {(piece.*end).own + offset, std::min(chunk_bytes_, piece.count - offset)};
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
  const Piece &piece = slices_.find(chunk);
  const uint64_t length = bounds(piece, r).second;
  const uint64_t offset = std::min(chunk * chunk_bytes_, length);
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
  const bool gathers = launch.operation == Operation::all_gather, exchanges = launch.operation == Operation::exchange;
  for (const Piece &piece : launch.pieces) {
    if (!gathers && !(exchanges && piece.source == piece.target)) continue;
    std::byte *place = piece.to.own + (gathers ? rank * piece.count : 0);
    if (place != piece.from.own && piece.count) std::memcpy(place, piece.from.own, piece.count);
  }
}

}  // namespace fsdp::transport::messages
