// SPDX-License-Identifier: Apache-2.0
// Carries the chunks of calls from the device to slots of pinned memory, lets the host process each chunk, and carries
// the results back. It has two streams of the device, one for each direction, and a lane of the host between them.
//
// The time of a call is bounded by its bytes over the link between host and device. Each direction has its own copy
// engine and its own stream, and the host only waits between the two, so both directions are busy at the same time. For
// this several chunks are under way:
//
//   down   | bring 4 | bring 5 |         |          the device's bytes into a slot
//   lane             | step 3  | step 4  |          every rank has brought its bytes of the chunk
//   up                         | take 3  | take 4   from the slots to the device, and sums there
//
// The calling thread enqueues everything, each piece of work after those on which it depends. So streams that share a
// hardware queue wait in an order in which all of them finish. At most `ahead` chunks are under way. A caller that
// enqueues more waits for the device, so that no queue of CUDA fills up, because a wait for room in such a queue would
// have no end and no timeout.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transport/team.h"

namespace fsdp::transport::staging {

// How much of a call is under way at the same time. The sizes must be the same on all ranks.
struct ConveyorSizes {
  // With these sizes a chunk takes about as long on the link as the calling thread takes to enqueue it.
  uint64_t part_bytes = uint64_t{4} << 20;  // size of a rank's part in each shared slot
  uint64_t slot_bytes = uint64_t{4} << 20;  // size of a slot that is not shared
  // After this many chunks a new round begins; see begin_new_round().
  uint64_t chunks_of_round = uint64_t{1} << 28;
  // Returns sizes that are no larger than the longest call needs. A slot has room for an aligned piece of every rank.
  ConveyorSizes bounded(uint64_t longest_call, uint64_t ranks) const noexcept {
    constexpr uint64_t granule = uint64_t{64} << 10, room_of_a_rank = uint64_t{4} << 10;
    const auto bound = [&](uint64_t bytes) {
      if (longest_call >= bytes) return bytes;
      const uint64_t wanted = longest_call + ranks * room_of_a_rank;
      return std::min(bytes, (wanted + granule - 1) / granule * granule);
    };
    return {bound(part_bytes), bound(slot_bytes), chunks_of_round};
  }
};

// The place in the spans of a call at which a slot begins. Spans are divided into pieces that fill slots. All ranks
// divide them in the same way, because their calls are alike.
struct Cursor {
  uint64_t span = 0;
  uint64_t element = 0;
};

// Elements [first, first + count) of a span, which begin at byte `place` of the slot's room.
struct ChunkPiece {
  uint64_t span;
  uint64_t first;
  uint64_t count;
  uint64_t place;
};

struct SpanSize {
  uint64_t count;  // number of elements
  uint64_t unit;   // bytes per element
};
constexpr uint64_t piece_alignment = 128;
constexpr uint64_t max_pieces = 8;  // maximum number of pieces in a slot
// Calls take(piece) for the pieces that fit into `room` bytes, and returns where the next slot begins. extent(i)
// returns the size of span i.
template <class ExtentOf, class Take>
Cursor fill_slot(Cursor at, uint64_t span_count, uint64_t room, ExtentOf &&extent, Take &&take) {
  uint64_t used = 0;
  for (uint64_t pieces = 0; at.span < span_count;) {
    const SpanSize whole = extent(at.span);
    const uint64_t left = whole.count - at.element;
    const uint64_t count = used < room ? std::min(left, (room - used) / whole.unit) : 0;
    if (left && (count == 0 || pieces == max_pieces)) break;
    if (count) {
      take(ChunkPiece{at.span, at.element, count, used});
      ++pieces;
      used += (count * whole.unit + piece_alignment - 1) / piece_alignment * piece_alignment;
      at.element += count;
    }
    if (at.element < whole.count) break;
    at = {at.span + 1, 0};
  }
  return at;
}

// The moves of an exchange as chunks. A chunk has one slot of each rank's moves to other ranks. It also has some of
// each rank's moves to itself, which need no room in slots.
class MoveChunks {
 public:
  enum class Destination { others, itself };

  // `room` is the room for the moves of one rank in a slot.
  MoveChunks(std::span<const Move> moves, uint64_t room) : moves_(moves), room_(room) {}
  // Calls take(piece) for the pieces of one chunk that `source` moves, and returns where the next chunk begins.
  template <class Take>
  Cursor fill(uint32_t source, Destination to, Cursor from, Take &&take) const {
    const auto extent = [&](uint64_t i) {
      const Move &move = moves_[i];
      const Destination of_move = move.target == move.source ? Destination::itself : Destination::others;
      return SpanSize{move.source == source && of_move == to ? move.bytes : 0, 1};
    };
    return fill_slot(from, moves_.size(), to == Destination::itself ? UINT64_MAX : room_, extent, take);
  }
  // The number of chunks on the rank that has the most, which is the number for all ranks.
  uint64_t count(uint32_t ranks) const;

 private:
  std::span<const Move> moves_;
  uint64_t room_;
};

// Pinned memory of the host that the ranks of a team share, divided into slots that are used in turn. In a slot every
// rank has a part. Its device writes the part, and the devices of the others read it; the host copies no bytes.

class Slots {
 public:
  // Collective over the team.
  Slots(Team &team, device::Device &device, uint64_t count, uint64_t part_bytes, const std::string &what);
  ~Slots();
  Slots(const Slots &) = delete;
  Slots &operator=(const Slots &) = delete;

  uint64_t part_bytes() const noexcept { return part_bytes_; }
  std::byte *part(uint64_t slot, uint32_t rank) const noexcept {
    return arena_->writable() + (rank * count_ + slot) * part_bytes_;
  }

 private:
  void unpin() noexcept;

  device::Device &device_;
  uint64_t count_;
  uint64_t part_bytes_;
  std::unique_ptr<Arena> arena_;
  uint64_t registered_bytes_ = 0;
};

class Conveyor {
 public:
  static constexpr uint64_t slots = 4;
  static constexpr uint64_t ahead = 32;

  Conveyor(device::Device &device, const std::string &name);

  device::Stream &down() { return *down_; }
  device::Stream &up() { return *up_; }
  device::HostLane &lane() { return *lane_; }
  // Events of the chunk that was last brought to the slot: brought() when its bytes are in the slot, taken() when they
  // have been taken.
  const device::Event &brought(uint64_t slot) const { return *brought_[slot]; }
  const device::Event &taken(uint64_t slot) const { return *taken_[slot]; }

  // begin() orders the next chunks after the work on the stream. end() orders later work on the stream after the
  // chunks, and records `done`.
  void begin(device::Stream &stream);
  void end(device::Stream &stream, device::Event &done);
  // Orders all later brought chunks after the chunks that were taken so far.
  void turn();
  // These functions are called for each chunk, in this order. pace() comes before the chunk is enqueued; `chunk` counts
  // from 0 since the conveyor was last idle.
  void pace(uint64_t chunk);
  void mark_brought(uint64_t slot) { down_->record(*brought_[slot]); }
  void mark_taken(uint64_t chunk);

 private:
  static constexpr uint64_t stride = ahead / 2;

  device::Device &device_;
  std::unique_ptr<device::Event> turn_;
  std::array<std::unique_ptr<device::Event>, slots> brought_, taken_;
  std::array<std::unique_ptr<device::Event>, 2> paces_;
  // The streams are the last members, so that they end first, because their work refers to the events and to the
  // owner's members.
  std::unique_ptr<device::Stream> down_, up_;
  std::unique_ptr<device::HostLane> lane_;
};

// Throws UNSUPPORTED if the stream is being captured. Called before anything is recorded or given up.
void refuse_capture(const device::Stream &stream, const Fingerprint &call);

// A round of the host's communicators has numbers for about a billion collectives. A call of a device consists of many
// collectives, and rounds end only with failed steps. So a training run of weeks would use up the numbers. Long before
// that, all ranks wait for each other at the same call and begin the next round. next_round() is called between two
// barriers, when the streams of all ranks have done `last`.
template <class NextRound>
void begin_new_round(Team &team, device::Device &device, const device::Event &last, NextRound &&next_round) {
  const auto meet = [&] { team.barrier("a new round of collectives"); };
  device.synchronize(last);
  meet();
  next_round();
  meet();
}

}  // namespace fsdp::transport::staging
