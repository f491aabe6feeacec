// SPDX-License-Identifier: Apache-2.0
// The chunks of one call, from the device to the slots and back.
#pragma once

#include <array>
#include <optional>
#include <span>

#include "transport/staging/collectives.h"

namespace fsdp::transport::staging {

// What one slot has of the spans of a call.
template <class Span>
struct SlotSpans {
  std::array<Span, most_pieces> spans;
  uint64_t count = 0;
  void add(const Span &span) { spans[count++] = span; }
  std::span<const Span> all() const { return {spans.data(), count}; }
};

template <class Send>
void StagedCollectives::step(const Fingerprint &call, uint64_t chunk, Send &&send) {
  device::HostLane &lane = conveyor_.lane();
  const Tag tag{call.what, call.name, &call};
  lane.wait(conveyor_.brought(chunk % Conveyor::slots));
  if (slots_) {
    lane.wait(conveyor_.taken((chunk + Conveyor::slots - lag) % Conveyor::slots));
    host_->barrier(tag, lane.stream());
  } else {
    send(tag);
  }
  lane.release(up());
}

template <class Bring, class Send, class Take>
void StagedCollectives::carry(const Fingerprint &call, uint64_t count, Bring &&bring, Send &&send, Take &&take) {
  struct Chunk {
    Cursor from;
    uint64_t number;
  };
  const auto finish = [&](const Chunk &chunk) {
    const uint64_t slot = chunk.number % Conveyor::slots;
    step(call, chunk.number, [&](const Tag &tag) { send(chunk.from, slot, tag); });
    take(chunk.from, slot);
    conveyor_.mark_taken(chunk.number);
  };
  std::optional<Chunk> before;
  Cursor next;
  do {  // at least one, in which calls are compared
    const Chunk chunk{next, chunks_++};
    const uint64_t slot = chunk.number % Conveyor::slots;
    conveyor_.pace(chunk.number);
    await_slot(slot);
    next = bring(chunk.from, slot);
    conveyor_.mark_brought(slot);
    if (before) finish(*before);
    before = chunk;
  } while (next.span < count);
  finish(*before);
}

}  // namespace fsdp::transport::staging
