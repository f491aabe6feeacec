// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/relay.h"

#include <algorithm>

#include "device/host/kernels.h"
#include "transport/call/launch.h"
#include "transport/shm/collectives.h"
#include "transport/team.h"

namespace fsdp::transport {
namespace {

// With a few ranks the halves stay in the caches, and a wait costs little compared with the copies.
constexpr uint64_t half_bytes = uint64_t{256} << 10;
constexpr uint64_t half_floats = half_bytes / sizeof(float);
constexpr uint32_t step_bits = 36;
constexpr uint64_t first_step(uint64_t round) { return round << step_bits; }

// Calls piece(offset, length) for the chunks of [0, count). Returns false as soon as a call returns false.
template <class Do>
bool in_chunks(uint64_t count, uint64_t chunk, Do &&piece) {
  for (uint64_t offset = 0; offset < count; offset += chunk)
    if (!piece(offset, std::min(chunk, count - offset))) return false;
  return true;
}

float *floats(std::byte *bytes) { return reinterpret_cast<float *>(bytes); }

}  // namespace

uint64_t message_staging_bytes(uint32_t) noexcept { return 2 * half_bytes; }

Relay::Relay(std::unique_ptr<Arena> halves, Mapping steps, uint32_t rank, std::vector<uint32_t> ranks)
    : halves_(std::move(halves)),
      memory_(std::move(steps)),
      rank_(rank),
      ranks_(std::move(ranks)),
      words_(memory_.data(), sizeof(Word), ranks_) {
  if (size() > half_floats)
    fail(FSDP_UNSUPPORTED, "messages between {} ranks of one host, more than {}", size(), half_floats);
}

bool Relay::carry(ShmCollectives &calls, const Launch &launch) {
  step_ = std::max(step_, first_step(launch.round));
  if (launch.operation == Operation::exchange) return carry_moves({calls, launch});
  for (const Piece &piece : launch.pieces)
    if (!carry({calls, launch}, piece)) return false;
  return true;
}

bool Relay::carry(const Way &way, const Piece &piece) {
  const auto in = [&](uint64_t length, uint64_t chunk, auto member) {
    return in_chunks(length, chunk,
                     [&](uint64_t offset, uint64_t count) { return (this->*member)(way, piece, offset, count); });
  };
  switch (way.launch.operation) {
    case Operation::all_reduce: return in(piece.count, half_floats, &Relay::sum_chunk);
    case Operation::reduce_scatter: return in(piece.count / size(), half_floats / size(), &Relay::slice_chunk);
    case Operation::all_gather: return in(piece.count, half_bytes, &Relay::gather_chunk);
    case Operation::broadcast: return in(piece.count, half_bytes, &Relay::broadcast_chunk);
    case Operation::exchange:
    case Operation::barrier: break;
  }
  return true;
}

std::byte *Relay::own_half() const noexcept { return halves_->writable() + (2 * rank_ + (step_ + 1) % 2) * half_bytes; }

const std::byte *Relay::half(uint32_t r) const noexcept { return halves_->data() + (2 * r + step_ % 2) * half_bytes; }

bool Relay::meet(const Way &way) {
  words_[rank_].raise(++step_);
  return way.calls.await_step(way.launch, words_, step_);
}

void Relay::sum(float *to, uint64_t offset, uint64_t count, bool accumulate) const {
  add_in_rank_order(half(0) + offset * sizeof(float), 2 * half_bytes, size(), to, count, accumulate);
}

// Takes two steps: each rank sums its slice of the chunk, and then all ranks read the sums.
bool Relay::sum_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t count) {
  float *values = piece.to.floats() + offset;
  const Slices slices(count, size());
  const uint64_t own = slices.length(rank_);
  device::kernels::copy_bytes(own_half(), values, count * sizeof(float));
  if (!meet(way)) return false;
  sum(floats(own_half()), slices.begin(rank_), own, false);
  count_sent((count - own + (size() - 1) * own) * sizeof(float));
  if (!meet(way)) return false;
  for (uint32_t r = 0; r < size(); ++r)
    device::kernels::copy_bytes(values + slices.begin(r), half(r), slices.length(r) * sizeof(float));
  return true;
}

bool Relay::slice_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t count) {
  const float *values = piece.from.floats();
  for (uint32_t r = 0; r < size(); ++r)
    device::kernels::copy_bytes(floats(own_half()) + r * count, values + r * (piece.count / size()) + offset,
                                count * sizeof(float));
  count_sent((size() - 1) * count * sizeof(float));
  if (!meet(way)) return false;
  sum(piece.to.floats() + offset, rank_ * count, count, piece.accumulate);
  return true;
}

bool Relay::gather_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t bytes) {
  const auto place = [&](uint32_t r) { return piece.to.own + r * piece.count + offset; };
  device::kernels::copy_bytes(own_half(), piece.from.own + offset, bytes);
  if (place(rank_) != piece.from.own + offset)
    device::kernels::copy_bytes(place(rank_), piece.from.own + offset, bytes);
  count_sent((size() - 1) * bytes);
  if (!meet(way)) return false;
  for (uint32_t r = 0; r < size(); ++r)
    if (r != rank_) device::kernels::copy_bytes(place(r), half(r), bytes);
  return true;
}

bool Relay::broadcast_chunk(const Way &way, const Piece &piece, uint64_t offset, uint64_t bytes) {
  const bool gives = rank_ == way.launch.root;
  if (gives) {
    device::kernels::copy_bytes(own_half(), piece.to.own + offset, bytes);
    count_sent((size() - 1) * bytes);
  }
  if (!meet(way)) return false;
  if (!gives) device::kernels::copy_bytes(piece.to.own + offset, half(way.launch.root), bytes);
  return true;
}

// All ranks take the steps of the rank that sends most.
bool Relay::carry_moves(const Way &way) {
  for (const Piece &piece : way.launch.pieces)
    if (piece.source == piece.target && piece.to.own != piece.from.own)
      device::kernels::copy_bytes(piece.to.own, piece.from.own, piece.count);
  return in_chunks(*std::ranges::max_element(way.launch.sent), half_bytes,
                   [&](uint64_t first, uint64_t) { return move_chunk(way, first); });
}

// Moves a part of each rank's sent bytes, starting at byte `first`: as many as would fill one half.
bool Relay::move_chunk(const Way &way, uint64_t first) {
  const auto each = [&](auto &&copy) {
    for (const Piece &piece : way.launch.pieces) {
      if (piece.source == piece.target) continue;
      const uint64_t begin = std::max(piece.place, first),
                     end = std::min(piece.place + piece.count, first + half_bytes);
      if (begin < end) copy(piece, begin - piece.place, begin - first, end - begin);
    }
  };
  each([&](const Piece &piece, uint64_t offset, uint64_t place, uint64_t bytes) {
    if (piece.source != rank_) return;
    device::kernels::copy_bytes(own_half() + place, piece.from.own + offset, bytes);
    count_sent(bytes);
  });
  if (!meet(way)) return false;
  each([&](const Piece &piece, uint64_t offset, uint64_t place, uint64_t bytes) {
    if (piece.target == rank_) device::kernels::copy_bytes(piece.to.own + offset, half(piece.source) + place, bytes);
  });
  return true;
}

}  // namespace fsdp::transport
