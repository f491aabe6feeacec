// SPDX-License-Identifier: Apache-2.0
#include "transport/message/channel/short_calls.h"

#include <algorithm>
#include <cstring>

#include "device/host/kernels.h"

namespace fsdp::transport::messages {
namespace {

uint64_t bytes_of(const Launch &launch, const Piece &piece) noexcept {
  return launch.operation == Operation::all_reduce ? piece.count * sizeof(float) : piece.count;
}

}  // namespace

ShortCalls::ShortCalls(uint32_t rank, uint32_t ranks, uint64_t limit, std::byte *memory)
    : rank_(rank),
      ranks_(ranks),
      limit_(limit),
      box_bytes_(net_box_bytes(limit)),
      memory_(memory),
      boxes_(2 * size_t{ranks}),
      chosen_(ranks) {}

// A barrier is short, too, although it gives nothing. A reduce_scatter or an exchange is never short, because each peer
// gets different bytes.
bool ShortCalls::fits(const Launch &launch) const noexcept {
  if (launch.operation == Operation::reduce_scatter || launch.operation == Operation::exchange) return false;
  uint64_t bytes = 0;
  for (const Piece &piece : launch.pieces) bytes += std::min(bytes_of(launch, piece), limit_ + 1);
  return limit_ > 0 && bytes <= limit_;
}

uint64_t ShortCalls::given_by(uint32_t r, const Launch &launch) noexcept {
  if (launch.operation == Operation::broadcast && r != launch.root) return 0;
  uint64_t bytes = 0;
  for (const Piece &piece : launch.pieces) bytes += bytes_of(launch, piece);
  return bytes;
}

void ShortCalls::pack(const Launch &launch) noexcept {
  packed_ = 0;
  if (given_by(rank_, launch) == 0) return;
  std::byte *to = box(rank_, 0);
  std::memcpy(to, &launch.fingerprint, sizeof launch.fingerprint);
  packed_ = sizeof launch.fingerprint;
  for (const Piece &piece : launch.pieces) {
    const uint64_t bytes = bytes_of(launch, piece);
    if (bytes) std::memcpy(to + packed_, piece.from.own, bytes);
    packed_ += bytes;
  }
}

void ShortCalls::choose(const Launch &launch) noexcept {
  for (uint32_t r = 0; r < ranks_; ++r) chosen_[r] = r == rank_ ? box(r, 0) : find(r, launch);
}

void ShortCalls::unpack(const Launch &launch) noexcept {
  if (launch.operation == Operation::all_reduce) return add(launch);
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r == rank_ || given_by(r, launch) == 0) continue;
    const std::byte *from = chosen_[r] + sizeof(Fingerprint);
    for (const Piece &piece : launch.pieces) {
      const uint64_t offset = launch.operation == Operation::all_gather ? r * piece.count : 0;
      if (piece.count) std::memcpy(piece.to.own + offset, from, piece.count);
      from += piece.count;
    }
  }
}

// The sum replaces this rank's own part. On rank 0 the other parts are added to it, in order; on other ranks rank 0's
// part is copied there first. a + b and b + a have the same bits, so with two ranks neither needs a copy.
void ShortCalls::add(const Launch &launch) noexcept {
  if (given_by(rank_, launch) == 0) return;
  uint64_t offset = sizeof(Fingerprint);
  const auto part = [&](uint32_t r) { return chosen_[r] + offset; };
  for (const Piece &piece : launch.pieces) {
    const bool in_place = ranks_ == 2 || rank_ == 0;
    if (!in_place) device::kernels::copy_bytes(piece.to.own, part(0), piece.count * sizeof(float));
    for (uint32_t r = ranks_ == 2 ? 0 : 1; r < ranks_; ++r)
      if (ranks_ > 2 || r != rank_)
        device::kernels::add(piece.to.own, FSDP_FLOAT32, part(r), FSDP_FLOAT32, piece.count);
    offset += piece.count * sizeof(float);
  }
}

const std::byte *ShortCalls::find(uint32_t r, const Launch &launch) const noexcept {
  for (size_t i = 0; i < 2; ++i) {
    const BoxState &state = boxes_[2 * r + i];
    if (state.fill == BoxState::Fill::full && state.is_of(launch) &&
        state.bytes == sizeof(Fingerprint) + given_by(r, launch))
      return box(r, i);
  }
  return nullptr;
}

// ---- received messages ----

// One of the two boxes may have the message of the running call. The other one may have that of the next call. If a
// peer sends a third message, it has ended the round, so the message of the next call is not needed any more.
Place ShortCalls::place(uint32_t r, const Header &header, const Launch *running) noexcept {
  const Place misfit{nullptr, true};
  if (limit_ == 0 || header.bytes <= sizeof(Fingerprint) || header.bytes > sizeof(Fingerprint) + limit_) return misfit;
  BoxState *best = nullptr;
  for (BoxState *each = &boxes_[2 * r]; each != &boxes_[2 * r] + 2; ++each) {
    const bool filled = each->fill != BoxState::Fill::empty;
    if (filled && each->round == header.round && each->number == header.number) return misfit;  // it came twice
    if (each->fill == BoxState::Fill::arriving || (filled && running && each->is_of(*running))) continue;
    const bool better = !filled || (best && best->fill != BoxState::Fill::empty && each->older_than(*best));
    if (!best || better) best = each;
  }
  if (!best) return misfit;
  *best = {BoxState::Fill::arriving, header.round, header.number, header.bytes};
  ++arriving_;
  return {box(r, static_cast<size_t>(best - &boxes_[2 * r]))};
}

std::span<const std::byte> ShortCalls::arrived(uint32_t r) noexcept {
  for (size_t i = 0; i < 2; ++i) {
    BoxState &arriving = boxes_[2 * r + i];
    if (arriving.fill != BoxState::Fill::arriving) continue;
    arriving.fill = BoxState::Fill::full;
    --arriving_;
    return {box(r, i), arriving.bytes};
  }
  return {};
}

bool ShortCalls::arriving_from(uint32_t r) const noexcept {
  return boxes_[2 * r].fill == BoxState::Fill::arriving || boxes_[2 * r + 1].fill == BoxState::Fill::arriving;
}

void ShortCalls::lost(uint32_t r) noexcept {
  for (size_t i = 0; i < 2; ++i) {
    if (boxes_[2 * r + i].fill != BoxState::Fill::arriving) continue;
    boxes_[2 * r + i].fill = BoxState::Fill::empty;
    --arriving_;
  }
}

}  // namespace fsdp::transport::messages
