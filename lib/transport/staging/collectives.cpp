// SPDX-License-Identifier: Apache-2.0

#include "transport/staging/collectives.h"

#include "base/dtype.h"
#include "transport/call/launch.h"
#include "transport/exchange.h"
#include "transport/staging/conveyor.h"

namespace fsdp::transport::staging {

StagedCollectives::StagedCollectives(std::shared_ptr<Team> team, std::unique_ptr<Collectives> host,
                                     std::unique_ptr<Slots> slots, device::Device &device, const ConveyorSizes &sizes,
                                     const Shape &shape, const std::string &what)
    : team_(std::move(team)),
      device_(device),
      sizes_(sizes),
      shape_(shape),
      host_(std::move(host)),
      slots_(std::move(slots)),
      rank_(team_->rank()),
      size_(team_->size()),
      block_(shape.block ? shape.block : size_),
      conveyor_(device, what) {
  if (slots_) {
    if (room_of(size_) == 0)
      fail(FSDP_UNSUPPORTED, "{}: staging for {} ranks of one host in parts of {} bytes", what, size_, slot_room());
    sums_ = device.allocate(slots_->part_bytes(), what.c_str());
  } else {
    if (room_of(size_ + 1) == 0)
      fail(FSDP_UNSUPPORTED, "{}: staging for messages between {} ranks in slots of {} bytes", what, size_,
           slot_room());
    memory_ = device.allocate_host(Conveyor::slots * sizes.slot_bytes, what.c_str());
  }
  for (auto &event : done_) event = device.create_event();
}

// Work that waits for peers ends now, on this rank and on peers. Peers that already have this rank's bytes do not
// notice.
StagedCollectives::~StagedCollectives() { host_->abandon(); }

template <class Body>
Ticket StagedCollectives::enqueue(Fingerprint &call, device::Stream &stream, Body &&body) {
  refuse_capture(stream, call);
  if (chunks_ >= sizes_.chunks_of_round) begin_new_round(*team_, device_, *last_, [this] { next_round(); });
  call.number_call(calls_);
  device::Event &done = *done_[calls_ % calls_kept];
  try {
    conveyor_.begin(stream);
    body();
    conveyor_.end(stream, done);
  } catch (...) {
    host_->abandon();
    throw;
  }
  last_ = &done;
  return {++calls_};
}

// A shared slot is free when all ranks have come far enough; see `lag`.
void StagedCollectives::await_slot(uint64_t slot) {
  if (slots_)
    conveyor_.lane().release(down());
  else
    down().wait(conveyor_.taken(slot));
}

std::byte *StagedCollectives::place(uint64_t slot, const ChunkPiece &piece, uint32_t r) const {
  if (slots_) return slots_->part(slot, r) + piece.place;
  return own_slot(slot) + size_ * piece.place + r * piece.count;
}

template <class GatherAt>
void StagedCollectives::carry_gathers(const Fingerprint &call, uint64_t count, GatherAt &&gather_at) {
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t i) { return SpanSize{gather_at(i).bytes, 1}; };
    return fill_slot(from, count, slots_ ? slot_room() : room_of(size_), extent, piece);
  };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const ChunkPiece &piece) {
      if (size_ > 1) down().copy(place(slot, piece, rank_), gather_at(piece.span).from.own + piece.first, piece.count);
    });
  };
  const auto send = [&](Cursor from, uint64_t slot, const Tag &step) {
    SlotSpans<Gather> pieces;
    fill(from, [&](const ChunkPiece &piece) {
      pieces.add({Part::alone(place(slot, piece, rank_)), place(slot, piece, 0), piece.count});
    });
    host_->gather(pieces.all(), step, host_stream());
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const ChunkPiece &piece) {
      const Gather gather = gather_at(piece.span);
      for (uint32_t r = 0; r < size_; ++r) {
        std::byte *to = gather.to + r * gather.bytes + piece.first;
        const std::byte *source = r == rank_ ? gather.from.own + piece.first : place(slot, piece, r);
        if (to != source) up().copy(to, source, piece.count);
      }
    });
  };
  carry(call, count, bring, send, take);
}

void StagedCollectives::gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  if (gathers.empty()) return;
  gather(gathers, tag, stream);
  // No later call checks whether a peer that has ended gave up the gather. So the gather itself must fail the context,
  // like a gather that waits.
  host_stream().run([host = host_.get()] {
    if (auto error = host->broken()) throw *std::move(error);
  });
}

Ticket StagedCollectives::gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::all_gather, tag);
  describe(call, gathers);
  return enqueue(call, stream, [&] { carry_gathers(call, gathers.size(), [&](uint64_t i) { return gathers[i]; }); });
}

Ticket StagedCollectives::sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) {
  const Operation operation = operation_of(sums, accumulate, shape_, size_, tag);
  const bool everywhere = operation == Operation::all_reduce;
  Fingerprint call = Fingerprint::of(operation, tag);
  describe(call, sums);
  return enqueue(call, stream, [&] {
    if (!slots_) return everywhere ? carry_wholes(call, sums) : carry_slices(call, sums, accumulate);
    carry_shared(call, sums, accumulate);
    if (!everywhere) return;
    conveyor_.turn();  // the slices of the sums are brought next
    carry_gathers(call, sums.size(), [&](uint64_t i) {
      const uint64_t bytes = sums[i].count / size_ * sizeof(float);
      return Gather{Part::alone(sums[i].to.own + rank_ * bytes), sums[i].to.own, bytes};
    });
  });
}

Ticket StagedCollectives::broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  require_root(root, size_);
  Fingerprint call = Fingerprint::of(Operation::broadcast, tag);
  describe_broadcast(call, bytes, root);
  const bool gives = rank_ == root;
  const auto at = [&](uint64_t slot) { return slots_ ? slots_->part(slot, root) : own_slot(slot); };
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t) { return SpanSize{bytes, 1}; };
    return fill_slot(from, 1, slot_room(), extent, piece);
  };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const ChunkPiece &piece) {
      if (gives && size_ > 1) down().copy(at(slot) + piece.place, data.own + piece.first, piece.count);
    });
  };
  const auto send = [&](Cursor from, uint64_t slot, const Tag &step) {
    uint64_t count = 0;
    fill(from, [&](const ChunkPiece &piece) { count = piece.count; });
    host_->broadcast(Part::alone(at(slot)), count, root, step, host_stream());
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const ChunkPiece &piece) {
      if (!gives) up().copy(data.own + piece.first, at(slot) + piece.place, piece.count);
    });
  };
  return enqueue(call, stream, [&] { carry(call, 1, bring, send, take); });
}

Ticket StagedCollectives::exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) {
  require_moves(from, moves, shape_, size_, tag);
  Fingerprint call = Fingerprint::of(Operation::exchange, tag);
  describe(call, moves);
  return enqueue(call, stream, [&] { carry_moves(call, from, moves); });
}

std::byte *StagedCollectives::moved(uint64_t slot, const ChunkPiece &piece, uint32_t r) const {
  return (slots_ ? slots_->part(slot, r) : own_slot(slot) + r * moving_room()) + piece.place;
}

// Cursors of carry() count the chunks here. The chunks of all ranks are taken in order, each starting at the end of the
// previous one.
void StagedCollectives::carry_moves(const Fingerprint &call, const Part &from, std::span<const Move> moves) {
  using Destination = MoveChunks::Destination;
  const MoveChunks chunks(moves, moving_room());
  const auto source = [&](const ChunkPiece &piece) { return from.own + moves[piece.span].offset + piece.first; };
  Cursor brought, copied;
  moves_taken_.assign(size_, {});
  const auto bring = [&](Cursor chunk, uint64_t slot) {
    brought = chunks.fill(rank_, Destination::others, brought, [&](const ChunkPiece &piece) {
      down().copy(moved(slot, piece, rank_), source(piece), piece.count);
    });
    return Cursor{chunk.span + 1, 0};
  };
  const auto send = [&](Cursor, uint64_t slot, const Tag &step) { send_moves(moves, chunks, slot, step); };
  const auto take = [&](Cursor, uint64_t slot) {
    for (uint32_t r = 0; r < size_; ++r)
      moves_taken_[r] = chunks.fill(r, Destination::others, moves_taken_[r], [&](const ChunkPiece &piece) {
        const Move &move = moves[piece.span];
        if (move.target == rank_) up().copy(move.to + piece.first, moved(slot, piece, r), piece.count);
      });
    copied = chunks.fill(rank_, Destination::itself, copied, [&](const ChunkPiece &piece) {
      std::byte *to = moves[piece.span].to + piece.first;
      if (to != source(piece)) up().copy(to, source(piece), piece.count);
    });
  };
  carry(call, chunks.count(size_), bring, send, take);
}

void StagedCollectives::send_moves(std::span<const Move> moves, const MoveChunks &chunks, uint64_t slot,
                                   const Tag &step) {
  host_moves_.clear();
  for (uint32_t r = 0; r < size_; ++r)
    chunks.fill(r, MoveChunks::Destination::others, moves_taken_[r], [&](const ChunkPiece &piece) {
      host_moves_.push_back({r, moves[piece.span].target, piece.place, piece.count, moved(slot, piece, r)});
    });
  host_->exchange(Part::alone(moved(slot, {}, rank_)), host_moves_, step, host_stream());
}

Ticket StagedCollectives::barrier(Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::barrier, tag);
  const auto none = [](Cursor, uint64_t) { return Cursor{1, 0}; };
  const auto send = [&](Cursor, uint64_t, const Tag &step) { host_->barrier(step, host_stream()); };
  return enqueue(call, stream, [&] { carry(call, 1, none, send, none); });
}

// A rank that has taken the chunks of a call has brought its own before. If the call is too old to be kept, it is done
// when a later call is done.
void StagedCollectives::await_release(Ticket ticket, device::Stream &stream) {
  if (!released(ticket)) stream.wait(*done_[(ticket.phase - 1) % calls_kept]);
}

bool StagedCollectives::released(Ticket ticket) const noexcept {
  return ticket.phase == 0 || done_[(ticket.phase - 1) % calls_kept]->done();
}

// All streams are idle, so every slot is free, even if ranks are at different slots.
void StagedCollectives::next_round() {
  host_->next_round();
  calls_ = chunks_ = 0;
}

// Sums through slots. The device adds if the slots are shared, and the host's collectives add if they are not. Addends
// are rounded before they are sent if that makes them smaller, because the sum is the same.
struct StagedCollectives::Addends {
  const std::byte *own;
  fsdp_dtype dtype, wire;
  uint64_t slice;  // number of elements
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

// In a part, the slices of the pieces are ordered by receiver, so that each rank takes one range.
void StagedCollectives::bring_slices(const Addends &sum, const ChunkPiece &piece, std::byte *part) {
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

// Adds in the same order as the host's collectives, block by block if there are blocks.
void StagedCollectives::add(const Addends &sum, bool accumulate, const ChunkPiece &piece) {
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
    return fill(from, [&](const ChunkPiece &piece) { bring_slices(at(piece.span), piece, slots_->part(slot, rank_)); });
  };
  const auto send = [](Cursor, uint64_t, const Tag &) {};
  const auto take = [&](Cursor from, uint64_t slot) {
    uint64_t bytes = 0;
    fill(from, [&](const ChunkPiece &piece) { bytes = piece.place + piece.count * dtype_size(at(piece.span).dtype); });
    take_slices(slot, bytes);
    fill(from, [&](const ChunkPiece &piece) { add(at(piece.span), accumulate, piece); });
  };
  carry(call, sums.size(), bring, send, take);
}

// For each piece, the slot has every rank's slice, followed by the values to which the host adds each slice in rank
// order.
void StagedCollectives::carry_slices(const Fingerprint &call, std::span<const Sum> sums, bool accumulate) {
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t i) { return SpanSize{sums[i].count / size_, sizeof(float)}; };
    return fill_slot(from, sums.size(), room_of(size_ + 1), extent, piece);
  };
  const auto values = [&](uint64_t slot, const ChunkPiece &piece) {
    return reinterpret_cast<float *>(own_slot(slot) + (size_ + 1) * piece.place);
  };
  const auto result = [&](uint64_t slot, const ChunkPiece &piece) { return values(slot, piece) + size_ * piece.count; };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const ChunkPiece &piece) {
      const Sum &sum = sums[piece.span];
      for (uint32_t r = 0; r < size_; ++r)
        down().copy(values(slot, piece) + r * piece.count, sum.from.floats() + r * (sum.count / size_) + piece.first,
                    piece.count * sizeof(float));
      if (accumulate) down().copy(result(slot, piece), sum.to.floats() + piece.first, piece.count * sizeof(float));
    });
  };
  const auto send = [&](Cursor from, uint64_t slot, const Tag &step) {
    SlotSpans<Sum> pieces;
    fill(from, [&](const ChunkPiece &piece) {
      pieces.add({.from = Part::alone(values(slot, piece)),
                  .to = Part::alone(result(slot, piece)),
                  .count = size_ * piece.count});
    });
    host_->sum(pieces.all(), accumulate, step, host_stream());
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const ChunkPiece &piece) {
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
    return fill(from, [&](const ChunkPiece &piece) {
      down().copy(own_slot(slot) + piece.place, sums[piece.span].from.floats() + piece.first,
                  piece.count * sizeof(float));
    });
  };
  const auto send = [&](Cursor from, uint64_t slot, const Tag &step) {
    SlotSpans<Sum> pieces;
    fill(from, [&](const ChunkPiece &piece) {
      const Part at = Part::alone(own_slot(slot) + piece.place);
      pieces.add({.from = at, .to = at, .count = piece.count, .everywhere = true});
    });
    host_->sum(pieces.all(), false, step, host_stream());
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const ChunkPiece &piece) {
      up().copy(sums[piece.span].to.floats() + piece.first, own_slot(slot) + piece.place, piece.count * sizeof(float));
    });
  };
  carry(call, sums.size(), bring, send, take);
}

// The slots, and the memory in which the other ranks' parts are summed.
uint64_t communicator_bytes(const ConveyorSizes &sizes) noexcept { return (Conveyor::slots + 1) * sizes.part_bytes; }
uint64_t messages_bytes(const ConveyorSizes &sizes) noexcept { return Conveyor::slots * sizes.slot_bytes; }

std::unique_ptr<Collectives> StagedTeam::create_collectives(const std::string &what, const Shape &shape) {
  auto calls = host_->create_collectives(what, {.arenas = shape.arenas, .sums = shape.sums});
  const ConveyorSizes sizes = sizes_.bounded(shape.longest_call, size());
  std::unique_ptr<Slots> slots;
  if (shape.arenas) slots = std::make_unique<Slots>(*host_, device_, Conveyor::slots, sizes.part_bytes, what);
  std::unique_ptr<Collectives> made;
  attempt_together(*host_, what, [&] {
    made = std::make_unique<StagedCollectives>(host_, std::move(calls), std::move(slots), device_, sizes, shape, what);
  });
  return made;
}

}  // namespace fsdp::transport::staging
