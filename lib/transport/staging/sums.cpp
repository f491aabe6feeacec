// SPDX-License-Identifier: Apache-2.0
// Sums through slots: by the device where they are shared, by the host's collectives where they are not.
#include "base/dtype.h"
#include "transport/staging/carry.h"

namespace fsdp::transport::staging {

// Rounded before it travels, if that makes less of it: the sum of what is rounded already is the same.
struct StagedCollectives::Addends {
  const std::byte *own;
  fsdp_dtype dtype, wire;
  uint64_t slice;  // elements
  float *to;
  float factor;
};

namespace {

bool travels_rounded(const Sum &sum) { return sum.rounded && dtype_size(sum.wire) < dtype_size(sum.dtype); }

}  // namespace

void StagedCollectives::round_to_wire(const Sum &sum) {
  if (travels_rounded(sum)) down().cast(sum.rounded, sum.wire, sum.from.own, sum.dtype, sum.count);
}

StagedCollectives::Addends StagedCollectives::addends_of(const Sum &sum) const {
  const bool rounded = travels_rounded(sum);
  const uint64_t slice = sum.count / size_;
  return {rounded ? sum.rounded : sum.from.own,
          rounded ? sum.wire : sum.dtype,
          sum.wire,
          slice,
          sum.to.floats() + (sum.everywhere ? rank_ * slice : 0),
          sum.factor};
}

// In a part, the slices of the pieces lie by the rank that they are for, so that each rank takes one range of it.
void StagedCollectives::bring_slices(const Addends &sum, const Piece &piece, std::byte *part) {
  const uint64_t unit = dtype_size(sum.dtype), room = room_of(size_);
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_)
      down().copy(part + r * room + piece.place, sum.own + (r * sum.slice + piece.first) * unit, piece.count * unit);
}

void StagedCollectives::take_slices(uint64_t slot, uint64_t bytes) {
  const uint64_t room = room_of(size_);
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_ && bytes) up().copy(sums_->data() + r * room, slots_->part(slot, r) + rank_ * room, bytes);
}

// As the host's collectives add: block by block if there are any.
void StagedCollectives::add(const Addends &sum, bool accumulate, const Piece &piece) {
  const uint64_t unit = dtype_size(sum.dtype), room = room_of(size_);
  std::byte *base = sums_->data() + piece.place;
  up().copy(base + rank_ * room, sum.own + (rank_ * sum.slice + piece.first) * unit, piece.count * unit);
  for (uint32_t first = 0; first < size_; first += block_)
    up().rank_sum({base + first * room, room, std::min(block_, size_ - first), sum.dtype, sum.wire,
                   sum.to + piece.first, piece.count, sum.factor, accumulate || first > 0});
}

void StagedCollectives::carry_shared(const Fingerprint &call, std::span<const Sum> sums, bool accumulate) {
  for (const Sum &sum : sums) round_to_wire(sum);
  const auto at = [&](uint64_t i) { return addends_of(sums[i]); };
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t i) { return SpanSize{at(i).slice, dtype_size(at(i).dtype)}; };
    return fill_slot(from, sums.size(), room_of(size_), extent, piece);
  };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const Piece &piece) { bring_slices(at(piece.span), piece, slots_->part(slot, rank_)); });
  };
  const auto send = [](Cursor, uint64_t, const Tag &) {};
  const auto take = [&](Cursor from, uint64_t slot) {
    uint64_t bytes = 0;
    fill(from, [&](const Piece &piece) { bytes = piece.place + piece.count * dtype_size(at(piece.span).dtype); });
    take_slices(slot, bytes);
    fill(from, [&](const Piece &piece) { add(at(piece.span), accumulate, piece); });
  };
  carry(call, sums.size(), bring, send, take);
}

// Of a piece, the slot has every rank's slice and then what they are added to: the host adds each slice to it, in rank
// order.
void StagedCollectives::carry_slices(const Fingerprint &call, std::span<const Sum> sums, bool accumulate) {
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t i) { return SpanSize{sums[i].count / size_, sizeof(float)}; };
    return fill_slot(from, sums.size(), room_of(size_ + 1), extent, piece);
  };
  const auto values = [&](uint64_t slot, const Piece &piece) {
    return reinterpret_cast<float *>(own_slot(slot) + (size_ + 1) * piece.place);
  };
  const auto result = [&](uint64_t slot, const Piece &piece) { return values(slot, piece) + size_ * piece.count; };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const Piece &piece) {
      const Sum &sum = sums[piece.span];
      for (uint32_t r = 0; r < size_; ++r)
        down().copy(values(slot, piece) + r * piece.count, sum.from.floats() + r * (sum.count / size_) + piece.first,
                    piece.count * sizeof(float));
      if (accumulate) down().copy(result(slot, piece), sum.to.floats() + piece.first, piece.count * sizeof(float));
    });
  };
  const auto send = [&](Cursor from, uint64_t slot, const Tag &step) {
    SlotSpans<Sum> pieces;
    fill(from, [&](const Piece &piece) {
      pieces.add({.from = Part::alone(values(slot, piece)),
                  .to = Part::alone(result(slot, piece)),
                  .count = size_ * piece.count});
    });
    host_->sum(pieces.all(), accumulate, step, host_stream());
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const Piece &piece) {
      up().copy(sums[piece.span].to.floats() + piece.first, result(slot, piece), piece.count * sizeof(float));
    });
  };
  carry(call, sums.size(), bring, send, take);
}

void StagedCollectives::carry_wholes(const Fingerprint &call, std::span<const Sum> sums) {
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t i) { return SpanSize{sums[i].count, sizeof(float)}; };
    return fill_slot(from, sums.size(), slot_room(), extent, piece);
  };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const Piece &piece) {
      down().copy(own_slot(slot) + piece.place, sums[piece.span].from.floats() + piece.first,
                  piece.count * sizeof(float));
    });
  };
  const auto send = [&](Cursor from, uint64_t slot, const Tag &step) {
    SlotSpans<Sum> pieces;
    fill(from, [&](const Piece &piece) {
      const Part at = Part::alone(own_slot(slot) + piece.place);
      pieces.add({.from = at, .to = at, .count = piece.count, .everywhere = true});
    });
    host_->sum(pieces.all(), false, step, host_stream());
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const Piece &piece) {
      up().copy(sums[piece.span].to.floats() + piece.first, own_slot(slot) + piece.place, piece.count * sizeof(float));
    });
  };
  carry(call, sums.size(), bring, send, take);
}

}  // namespace fsdp::transport::staging
