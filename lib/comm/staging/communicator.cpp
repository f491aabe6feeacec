// SPDX-License-Identifier: Apache-2.0
#include "comm/staging/communicator.h"

#include <optional>

#include "base/dtype.h"
#include "comm/staging/renewal.h"

namespace fsdp::comm::staging {

struct DeviceCommunicator::Gathered {
  const std::byte *own;
  std::byte *to;
  uint64_t bytes;
};

struct DeviceCommunicator::Reduced {
  const std::byte *own;
  fsdp_dtype dtype;
  fsdp_dtype wire_dtype;
  uint64_t shard_count;
  float *to;
  float factor;
  bool accumulate;
};

DeviceCommunicator::DeviceCommunicator(std::shared_ptr<Team> team, std::unique_ptr<Communicator> host,
                                       std::unique_ptr<Slots> slots, device::Device &device, const Sizes &sizes,
                                       uint32_t reduction_block, const std::string &what)
    : team_(std::move(team)),
      device_(device),
      sizes_(sizes),
      host_(std::move(host)),
      slots_(std::move(slots)),
      rank_(team_->rank()),
      size_(team_->size()),
      block_(reduction_block ? reduction_block : size_),
      room_(slots_->part_bytes() / size_ / piece_alignment * piece_alignment),
      sums_(device.allocate(slots_->part_bytes(), what.c_str())),
      conveyor_(device, what) {
  if (room_ == 0)
    fail(FSDP_UNSUPPORTED, "{}: staging for {} ranks of one host in parts of {} bytes", what, size_,
         slots_->part_bytes());
  for (auto &event : done_) event = device.create_event();
}

// Work that waits for peers ends now, here and there; peers that have met this rank in it do not notice.
DeviceCommunicator::~DeviceCommunicator() { host_->abandon(); }

namespace {

// Rounded before it travels, if that makes less of it: the sum of what is rounded already is the same.
template <class Span>
bool travels_rounded(const Span &span) {
  return span.wire && dtype_size(span.wire_dtype) < dtype_size(span.dtype);
}

}  // namespace

template <class Body>
Ticket DeviceCommunicator::enqueue(Fingerprint &call, device::Stream &stream, Body &&body) {
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

void DeviceCommunicator::step(const Fingerprint &call, uint64_t chunk) {
  device::HostLane &lane = conveyor_.lane();
  lane.wait(conveyor_.brought(chunk % Conveyor::slots));
  lane.wait(conveyor_.taken((chunk + Conveyor::slots - lag) % Conveyor::slots));
  host_->barrier({call.what, call.name, &call}, lane.stream());
  lane.release(conveyor_.up());
}

template <class Bring, class Take>
void DeviceCommunicator::carry(const Fingerprint &call, uint64_t span_count, Bring &&bring, Take &&take) {
  struct Chunk {
    Cursor from;
    uint64_t number;
  };
  const auto finish = [&](const Chunk &chunk) {
    step(call, chunk.number);
    take(chunk.from, chunk.number % Conveyor::slots);
    conveyor_.mark_taken(chunk.number);
  };
  std::optional<Chunk> before;
  Cursor next;
  do {  // at least one, in which calls are compared
    const Chunk chunk{next, chunks_++};
    conveyor_.pace(chunk.number);
    conveyor_.lane().release(conveyor_.down());  // the slot is free: see lag
    next = bring(chunk.from, chunk.number % Conveyor::slots);
    conveyor_.mark_brought(chunk.number % Conveyor::slots);
    if (before) finish(*before);
    before = chunk;
  } while (next.span < span_count);
  finish(*before);
}

template <class SpanAt>
void DeviceCommunicator::carry_gather(const Fingerprint &call, uint64_t span_count, SpanAt &&span_at) {
  const auto fill = [&](Cursor from, auto &&piece) {
    return fill_slot(
        from, span_count, slots_->part_bytes(),
        [&](uint64_t i) {
          return SpanSize{span_at(i).bytes, 1};
        },
        piece);
  };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const Piece &piece) {
      if (size_ > 1)
        conveyor_.down().copy(slots_->part(slot, rank_) + piece.place, span_at(piece.span).own + piece.first,
                              piece.count);
    });
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    fill(from, [&](const Piece &piece) {
      const Gathered span = span_at(piece.span);
      for (uint32_t r = 0; r < size_; ++r) {
        std::byte *to = span.to + r * span.bytes + piece.first;
        const std::byte *source = r == rank_ ? span.own + piece.first : slots_->part(slot, r) + piece.place;
        if (to != source) conveyor_.up().copy(to, source, piece.count);
      }
    });
  };
  carry(call, span_count, bring, take);
}

void DeviceCommunicator::gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) {
  if (spans.empty()) return;
  all_gather(spans, tag, stream);
  // Nobody asks whether a gather was given up, by a peer that has ended: it must fail the context, as one that waits
  // does.
  conveyor_.lane().stream().run([host = host_.get()] {
    if (auto error = host->broken()) throw *std::move(error);
  });
}

Ticket DeviceCommunicator::all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::all_gather, tag);
  for (const GatherSpan &span : spans) call.add_span(0, 0, span.bytes);
  return enqueue(call, stream, [&] {
    carry_gather(call, spans.size(), [&](uint64_t i) {
      return Gathered{own(spans[i].from), spans[i].to, spans[i].bytes};
    });
  });
}

// In a part, the slices of the pieces lie by the rank that they are for, so that each rank takes one range of it.
void DeviceCommunicator::bring_slices(const Reduced &span, const Piece &piece, std::byte *part) {
  const uint64_t unit = dtype_size(span.dtype);
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_)
      conveyor_.down().copy(part + r * room_ + piece.place, span.own + (r * span.shard_count + piece.first) * unit,
                            piece.count * unit);
}

void DeviceCommunicator::take_slices(uint64_t slot, uint64_t bytes) {
  for (uint32_t r = 0; r < size_; ++r)
    if (r != rank_ && bytes)
      conveyor_.up().copy(sums_->data() + r * room_, slots_->part(slot, r) + rank_ * room_, bytes);
}

// As the host's communicator adds: block by block if there are any.
void DeviceCommunicator::sum(const Reduced &span, const Piece &piece) {
  const uint64_t unit = dtype_size(span.dtype);
  std::byte *base = sums_->data() + piece.place;
  conveyor_.up().copy(base + rank_ * room_, span.own + (rank_ * span.shard_count + piece.first) * unit,
                      piece.count * unit);
  for (uint32_t first = 0; first < size_; first += block_)
    conveyor_.up().rank_sum({base + first * room_, room_, std::min(block_, size_ - first), span.dtype, span.wire_dtype,
                             span.to + piece.first, piece.count, span.factor, span.accumulate || first > 0});
}

template <class SpanAt>
void DeviceCommunicator::carry_reduce(const Fingerprint &call, uint64_t span_count, SpanAt &&span_at) {
  const auto fill = [&](Cursor from, auto &&piece) {
    const auto extent = [&](uint64_t i) { return SpanSize{span_at(i).shard_count, dtype_size(span_at(i).dtype)}; };
    return fill_slot(from, span_count, room_, extent, piece);
  };
  const auto bring = [&](Cursor from, uint64_t slot) {
    return fill(from, [&](const Piece &piece) { bring_slices(span_at(piece.span), piece, slots_->part(slot, rank_)); });
  };
  const auto take = [&](Cursor from, uint64_t slot) {
    uint64_t bytes = 0;
    fill(from, [&](const Piece &piece) { bytes = piece.place + piece.count * dtype_size(span_at(piece.span).dtype); });
    take_slices(slot, bytes);
    fill(from, [&](const Piece &piece) { sum(span_at(piece.span), piece); });
  };
  carry(call, span_count, bring, take);
}

template <class Span>
void DeviceCommunicator::round_to_wire(const Span &span) {
  if (travels_rounded(span))
    conveyor_.down().cast(span.wire, span.wire_dtype, own(span.from), span.dtype, span.shard_count * size_);
}

template <class Span>
DeviceCommunicator::Reduced DeviceCommunicator::reduced(const Span &span, float *to) const {
  const bool rounded = travels_rounded(span);
  return {rounded ? span.wire : own(span.from),
          rounded ? span.wire_dtype : span.dtype,
          span.wire_dtype,
          span.shard_count,
          to,
          span.factor,
          span.accumulate};
}

Ticket DeviceCommunicator::reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::reduce_scatter, tag);
  for (const ReduceSpan &span : spans) call.add_span(span.dtype, span.wire_dtype, span.shard_count * size_);
  return enqueue(call, stream, [&] {
    for (const ReduceSpan &span : spans) round_to_wire(span);
    carry_reduce(call, spans.size(), [&](uint64_t i) { return reduced(spans[i], spans[i].to); });
  });
}

Ticket DeviceCommunicator::all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::all_reduce, tag);
  for (const AllReduceSpan &span : spans) call.add_span(span.dtype, span.wire_dtype, span.shard_count * size_);
  const auto slice = [&](uint64_t i) {
    return reinterpret_cast<float *>(spans[i].whole_writable) + rank_ * spans[i].shard_count;
  };
  return enqueue(call, stream, [&] {
    for (const AllReduceSpan &span : spans) round_to_wire(span);
    carry_reduce(call, spans.size(), [&](uint64_t i) { return reduced(spans[i], slice(i)); });
    conveyor_.turn();  // the slice of the sums is brought next
    carry_gather(call, spans.size(), [&](uint64_t i) {
      return Gathered{reinterpret_cast<const std::byte *>(slice(i)), spans[i].whole_writable,
                      spans[i].shard_count * sizeof(float)};
    });
  });
}

Ticket DeviceCommunicator::broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                                     device::Stream &stream) {
  if (root >= size_) fail(FSDP_INTERNAL, "broadcast from rank {} of {}", root, size_);
  Fingerprint call = Fingerprint::of(Operation::broadcast, tag);
  call.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
  const bool gives = rank_ == root;
  const auto fill = [&](Cursor at, auto &&piece) {
    return fill_slot(
        at, 1, slots_->part_bytes(),
        [&](uint64_t) {
          return SpanSize{bytes, 1};
        },
        piece);
  };
  const auto bring = [&](Cursor at, uint64_t slot) {
    return fill(at, [&](const Piece &piece) {
      if (gives && size_ > 1)
        conveyor_.down().copy(slots_->part(slot, rank_) + piece.place, own(from) + piece.first, piece.count);
    });
  };
  const auto take = [&](Cursor at, uint64_t slot) {
    fill(at, [&](const Piece &piece) {
      const std::byte *source = gives ? own(from) + piece.first : slots_->part(slot, root) + piece.place;
      if (to + piece.first != source) conveyor_.up().copy(to + piece.first, source, piece.count);
    });
  };
  return enqueue(call, stream, [&] { carry(call, 1, bring, take); });
}

Ticket DeviceCommunicator::barrier(Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::barrier, tag);
  const auto none = [](Cursor, uint64_t) { return Cursor{1, 0}; };
  return enqueue(call, stream, [&] { carry(call, 1, none, none); });
}

// Who has taken the chunks of a call has brought its own before. A call that came long ago is done when a later one is.
void DeviceCommunicator::await_release(Ticket ticket, device::Stream &stream) {
  if (!released(ticket)) stream.wait(*done_[(ticket.phase - 1) % calls_kept]);
}

bool DeviceCommunicator::released(Ticket ticket) const noexcept {
  return ticket.phase == 0 || done_[(ticket.phase - 1) % calls_kept]->done();
}

// All streams are idle, so every slot is free, also where ranks have come to different ones.
void DeviceCommunicator::next_round() {
  host_->next_round();
  calls_ = chunks_ = 0;
}

}  // namespace fsdp::comm::staging
