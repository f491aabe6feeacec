// SPDX-License-Identifier: Apache-2.0
// How the spans of a call are cut into pieces that fill slots. Every rank cuts alike, since their calls are alike.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fsdp::transport::staging {

// Where a slot begins in the spans of a call.
struct Cursor {
  uint64_t span = 0;
  uint64_t element = 0;
};

// Elements [first, first + count) of a span, which lie at byte `place` of the slot's room.
struct Piece {
  uint64_t span;
  uint64_t first;
  uint64_t count;
  uint64_t place;
};

struct SpanSize {
  uint64_t count;  // elements
  uint64_t unit;   // bytes of one
};

constexpr uint64_t piece_alignment = 128;
constexpr uint64_t most_pieces = 8;  // of a slot

// Calls take(piece) for what goes into `room` bytes; returns where the next slot begins. extent(i) is that of span i.
template <class ExtentOf, class Take>
Cursor fill_slot(Cursor at, uint64_t span_count, uint64_t room, ExtentOf &&extent, Take &&take) {
  uint64_t used = 0;
  for (uint64_t pieces = 0; at.span < span_count;) {
    const SpanSize whole = extent(at.span);
    const uint64_t left = whole.count - at.element;
    const uint64_t count = used < room ? std::min(left, (room - used) / whole.unit) : 0;
    if (left && (count == 0 || pieces == most_pieces)) break;
    if (count) {
      take(Piece{at.span, at.element, count, used});
      ++pieces;
      used += (count * whole.unit + piece_alignment - 1) / piece_alignment * piece_alignment;
      at.element += count;
    }
    if (at.element < whole.count) break;
    at = {at.span + 1, 0};
  }
  return at;
}

}  // namespace fsdp::transport::staging
