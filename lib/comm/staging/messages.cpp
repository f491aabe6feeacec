// SPDX-License-Identifier: Apache-2.0
#include "comm/staging/messages.h"

#include <array>

#include "comm/staging/renewal.h"

namespace fsdp::comm::staging {
namespace {

float *floats(std::byte *bytes) { return reinterpret_cast<float *>(bytes); }

// The spans of one slot.
template <class Span>
struct SlotSpans {
  std::array<Span, most_pieces> spans;
  uint64_t count = 0;
  void add(const Span &span) { spans[count++] = span; }
  std::span<const Span> all() const { return {spans.data(), count}; }
};

}  // namespace

DeviceMessages::DeviceMessages(std::shared_ptr<Team> team, std::unique_ptr<MessageCommunicator> host,
                               device::Device &device, const Sizes &sizes, const std::string &what)
    : team_(std::move(team)),
      device_(device),
      sizes_(sizes),
      host_(std::move(host)),
      rank_(team_->rank()),
      size_(team_->size()),
      memory_(device.allocate_host(Conveyor::slots * sizes.slot_bytes, what.c_str())),
      done_(device.create_event()),
      conveyor_(device, what) {
  if (sizes.slot_bytes / (size_ + 1) < piece_alignment)
    fail(FSDP_UNSUPPORTED, "{}: staging for messages between {} ranks in slots of {} bytes", what, size_,
         sizes.slot_bytes);
}

// Work that waits for peers ends now, here and there; peers that have what this rank sent do not notice.
DeviceMessages::~DeviceMessages() { host_->abandon(); }

template <class Body>
void DeviceMessages::enqueue(Fingerprint &call, device::Stream &stream, Body &&body) {
  refuse_capture(stream, call);
  if (chunks_ >= sizes_.chunks_of_round) begin_new_round(*team_, device_, *done_, [this] { next_round(); });
  call.number_call(calls_);
  try {
    conveyor_.begin(stream);
    body();
    conveyor_.end(stream, *done_);
  } catch (...) {
    host_->abandon();  // no rank can go on
    throw;
  }
  ++calls_;
}

template <class Bring, class Send, class Take>
void DeviceMessages::carry(const Fingerprint &call, uint64_t span_count, Bring &&bring, Send &&send, Take &&take) {
  const Tag tag{call.what, call.name, &call};
  Cursor next;
  do {  // at least one, in which calls are compared
    const Cursor from = next;
    const uint64_t chunk = chunks_++, index = chunk % Conveyor::slots;
    conveyor_.pace(chunk);
    down().wait(conveyor_.taken(index));
    next = bring(from, slot(index));
    conveyor_.mark_brought(index);
    conveyor_.lane().wait(conveyor_.brought(index));
    send(from, slot(index), tag);
    conveyor_.lane().release(up());
    take(from, slot(index));
    conveyor_.mark_taken(chunk);
  } while (next.span < span_count);
}

void DeviceMessages::all_reduce(std::span<const SumSpan> spans, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::all_reduce, tag);
  for (const SumSpan &span : spans) call.add_span(FSDP_FLOAT32, FSDP_FLOAT32, span.count);
  const auto fill = [&](Cursor from, auto &&piece) {
    return fill_slot(
        from, spans.size(), sizes_.slot_bytes,
        [&](uint64_t i) {
          return SpanSize{spans[i].count, sizeof(float)};
        },
        piece);
  };
  const auto bring = [&](Cursor from, std::byte *at) {
    return fill(from, [&](const Piece &piece) {
      down().copy(at + piece.place, spans[piece.span].values + piece.first, piece.count * sizeof(float));
    });
  };
  const auto send = [&](Cursor from, std::byte *at, const Tag &step) {
    SlotSpans<SumSpan> sums;
    fill(from, [&](const Piece &piece) { sums.add({floats(at + piece.place), piece.count}); });
    host_->all_reduce(sums.all(), step, host_stream());
  };
  const auto take = [&](Cursor from, std::byte *at) {
    fill(from, [&](const Piece &piece) {
      up().copy(spans[piece.span].values + piece.first, at + piece.place, piece.count * sizeof(float));
    });
  };
  enqueue(call, stream, [&] { carry(call, spans.size(), bring, send, take); });
}

// Of a piece, the slot has every rank's slice and then what they are added to: the host adds each slice to it, in rank
// order.
void DeviceMessages::reduce_scatter(std::span<const SliceSumSpan> spans, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::reduce_scatter, tag);
  for (const SliceSumSpan &span : spans) call.add_span(FSDP_FLOAT32, FSDP_FLOAT32, span.count * size_);
  const uint64_t room = sizes_.slot_bytes / (size_ + 1) / piece_alignment * piece_alignment;
  const auto fill = [&](Cursor from, auto &&piece) {
    return fill_slot(
        from, spans.size(), room,
        [&](uint64_t i) {
          return SpanSize{spans[i].count, sizeof(float)};
        },
        piece);
  };
  const auto values = [&](std::byte *at, const Piece &piece) { return floats(at + (size_ + 1) * piece.place); };
  const auto sum = [&](std::byte *at, const Piece &piece) { return values(at, piece) + size_ * piece.count; };
  const auto bring = [&](Cursor from, std::byte *at) {
    return fill(from, [&](const Piece &piece) {
      const SliceSumSpan &span = spans[piece.span];
      for (uint32_t r = 0; r < size_; ++r)
        down().copy(values(at, piece) + r * piece.count, span.values + r * span.count + piece.first,
                    piece.count * sizeof(float));
      if (span.accumulate) down().copy(sum(at, piece), span.to + piece.first, piece.count * sizeof(float));
    });
  };
  const auto send = [&](Cursor from, std::byte *at, const Tag &step) {
    SlotSpans<SliceSumSpan> sums;
    fill(from, [&](const Piece &piece) {
      sums.add({values(at, piece), piece.count, sum(at, piece), spans[piece.span].accumulate});
    });
    host_->reduce_scatter(sums.all(), step, host_stream());
  };
  const auto take = [&](Cursor from, std::byte *at) {
    fill(from, [&](const Piece &piece) {
      up().copy(spans[piece.span].to + piece.first, sum(at, piece), piece.count * sizeof(float));
    });
  };
  enqueue(call, stream, [&] { carry(call, spans.size(), bring, send, take); });
}

void DeviceMessages::all_gather(std::span<const WholeSpan> spans, Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::all_gather, tag);
  for (const WholeSpan &span : spans) call.add_span(0, 0, span.bytes);
  const uint64_t room = sizes_.slot_bytes / size_ / piece_alignment * piece_alignment;
  const auto fill = [&](Cursor from, auto &&piece) {
    return fill_slot(
        from, spans.size(), room,
        [&](uint64_t i) {
          return SpanSize{spans[i].bytes, 1};
        },
        piece);
  };
  const auto part = [&](std::byte *at, const Piece &piece, uint32_t r) {
    return at + size_ * piece.place + r * piece.count;
  };
  const auto whole = [&](const Piece &piece, uint32_t r) {
    return spans[piece.span].whole + r * spans[piece.span].bytes + piece.first;
  };
  const auto bring = [&](Cursor from, std::byte *at) {
    return fill(from,
                [&](const Piece &piece) { down().copy(part(at, piece, rank_), whole(piece, rank_), piece.count); });
  };
  const auto send = [&](Cursor from, std::byte *at, const Tag &step) {
    SlotSpans<WholeSpan> wholes;
    fill(from, [&](const Piece &piece) { wholes.add({part(at, piece, 0), piece.count}); });
    host_->all_gather(wholes.all(), step, host_stream());
  };
  const auto take = [&](Cursor from, std::byte *at) {
    fill(from, [&](const Piece &piece) {
      for (uint32_t r = 0; r < size_; ++r)
        if (r != rank_) up().copy(whole(piece, r), part(at, piece, r), piece.count);
    });
  };
  enqueue(call, stream, [&] { carry(call, spans.size(), bring, send, take); });
}

void DeviceMessages::broadcast(std::byte *data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  if (root >= size_) fail(FSDP_INTERNAL, "broadcast from rank {} of {}", root, size_);
  Fingerprint call = Fingerprint::of(Operation::broadcast, tag);
  call.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
  const auto fill = [&](Cursor from, auto &&piece) {
    return fill_slot(
        from, 1, sizes_.slot_bytes,
        [&](uint64_t) {
          return SpanSize{bytes, 1};
        },
        piece);
  };
  const auto bring = [&](Cursor from, std::byte *at) {
    return fill(from, [&](const Piece &piece) {
      if (rank_ == root) down().copy(at, data + piece.first, piece.count);
    });
  };
  const auto send = [&](Cursor from, std::byte *at, const Tag &step) {
    uint64_t count = 0;
    fill(from, [&](const Piece &piece) { count = piece.count; });
    host_->broadcast(at, count, root, step, host_stream());
  };
  const auto take = [&](Cursor from, std::byte *at) {
    fill(from, [&](const Piece &piece) {
      if (rank_ != root) up().copy(data + piece.first, at, piece.count);
    });
  };
  enqueue(call, stream, [&] { carry(call, 1, bring, send, take); });
}

void DeviceMessages::barrier(Tag tag, device::Stream &stream) {
  Fingerprint call = Fingerprint::of(Operation::barrier, tag);
  const auto none = [](Cursor, std::byte *) { return Cursor{1, 0}; };
  const auto send = [&](Cursor, std::byte *, const Tag &step) { host_->barrier(step, host_stream()); };
  enqueue(call, stream, [&] { carry(call, 1, none, send, none); });
}

void DeviceMessages::next_round() {
  host_->next_round();
  calls_ = chunks_ = 0;
}

}  // namespace fsdp::comm::staging
