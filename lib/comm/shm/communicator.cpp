// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/communicator.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "device/host/kernels.h"

namespace fsdp::comm {
namespace {

// Rank r's bytes of a source, as this rank reads them.
const std::byte *address(const Source &from, uint32_t r) { return from.arena->data() + from.offset + r * from.stride; }

Piece gather_piece(const GatherSpan &span) { return {span.from, {}, span.to, span.bytes, 0, 0, 1.0F, false}; }

}  // namespace

class ShmCommunicator::AwaitedPart final : public AwaitedWords {
 public:
  // launch: whose fingerprints are compared as peers come; NULL: none.
  AwaitedPart(ShmCommunicator &communicator, uint64_t phase, const Fingerprint &fingerprint, const Launch *launch)
      : AwaitedWords(communicator.words_, phase),
        communicator_(communicator),
        fingerprint_(fingerprint),
        launch_(launch) {}

  // Who has enqueued it comes by what its stream does.
  bool misses_caller(uint32_t world_rank) const override {
    for (uint32_t r = 0; r < communicator_.words_.size(); ++r)
      if (communicator_.words_.world_rank(r) == world_rank)
        return misses(world_rank) && !communicator_.round_.called(r, target_);
    return false;
  }
  bool given_up() override { return communicator_.round_.hopeless(target_); }
  std::string text() const override { return fingerprint_.text(number_of(target_)); }

 private:
  void met(uint32_t r) override {
    if (launch_) communicator_.compare(*launch_, r);
  }

  ShmCommunicator &communicator_;
  const Fingerprint &fingerprint_;
  const Launch *launch_;
};

class ShmCommunicator::AwaitedStep final : public AwaitedWords {
 public:
  AwaitedStep(ShmCommunicator &communicator, const Words &steps, uint64_t target, const Launch &launch)
      : AwaitedWords(steps, target), communicator_(communicator), launch_(launch) {}

  // Who ended the round before the end of this launch may not come to this step.
  bool given_up() override {
    return communicator_.round_.hopeless(phase_of(launch_.round, launch_.number, Part::read));
  }
  std::string text() const override { return launch_.fingerprint.text(launch_.number); }

 private:
  ShmCommunicator &communicator_;
  const Launch &launch_;
};

ShmCommunicator::ShmCommunicator(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks,
                                 uint32_t reduction_block, Mapping memory)
    : seat_(std::move(seat)),
      rank_(rank),
      ranks_(std::move(ranks)),
      block_(reduction_block ? reduction_block : static_cast<uint32_t>(ranks_.size())),
      memory_(std::move(memory)),
      words_(memory_.data() + offsetof(Place, words.phase), sizeof(Place), ranks_),
      round_(memory_.data() + offsetof(Place, words), sizeof(Place), rank, ranks_) {
  static_assert(sizeof(Place) % 64 == 0);
  // As next_round does; creation ends with a meeting of all ranks before the first collective.
  words_[rank_].raise(first_phase(round_.number()));
}

Launch &ShmCommunicator::start(Operation operation, const Tag &tag, uint64_t piece_count) {
  Launch &launch = launches_.take(piece_count);
  launch.start(operation, tag);
  return launch;
}

Ticket ShmCommunicator::enqueue(Launch &launch, device::Stream &stream) {
  seat_->watch.enter_caller();
  launch.round = round_.number();
  launch.number = round_.enqueue();
  enqueued_[launch.number % fingerprints_kept] = launch.fingerprint;
  const Ticket ticket{phase_of(launch.round, launch.number, Part::read)};
  stream.run([this, pending = &launch] { perform(*pending); });
  return ticket;
}

void ShmCommunicator::gather_stable(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) {
  if (spans.empty()) return;
  seat_->watch.enter_caller();
  Launch &launch = start(Operation::all_gather, tag, spans.size());
  for (const GatherSpan &span : spans) launch.pieces.push_back(gather_piece(span));
  stream.run([this, pending = &launch] {
    const LaunchReturn guard(*pending);
    for (const Piece &piece : pending->pieces) gather(piece);
  });
}

Ticket ShmCommunicator::all_gather(std::span<const GatherSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::all_gather, tag, spans.size());
  for (const GatherSpan &span : spans) {
    launch.pieces.push_back(gather_piece(span));
    launch.fingerprint.add_span(0, 0, span.bytes);
  }
  return enqueue(launch, stream);
}

Ticket ShmCommunicator::reduce_scatter(std::span<const ReduceSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::reduce_scatter, tag, spans.size());
  for (const ReduceSpan &span : spans) {
    launch.pieces.push_back({span.from,
                             {},
                             reinterpret_cast<std::byte *>(span.to),
                             span.shard_count,
                             span.dtype,
                             span.wire_dtype,
                             span.factor,
                             span.accumulate});
    launch.fingerprint.add_span(span.dtype, span.wire_dtype, span.shard_count * words_.size());
  }
  return enqueue(launch, stream);
}

Ticket ShmCommunicator::all_reduce(std::span<const AllReduceSpan> spans, Tag tag, device::Stream &stream) {
  Launch &launch = start(Operation::all_reduce, tag, spans.size());
  for (const AllReduceSpan &span : spans) {
    launch.pieces.push_back({span.from, span.whole, span.whole_writable, span.shard_count, span.dtype, span.wire_dtype,
                             span.factor, span.accumulate});
    launch.fingerprint.add_span(span.dtype, span.wire_dtype, span.shard_count * words_.size());
  }
  return enqueue(launch, stream);
}

Ticket ShmCommunicator::broadcast(const Source &from, uint32_t root, std::byte *to, uint64_t bytes, Tag tag,
                                  device::Stream &stream) {
  if (root >= words_.size()) fail(FSDP_INTERNAL, "broadcast from rank {} of {}", root, words_.size());
  Launch &launch = start(Operation::broadcast, tag, 1);
  launch.root = root;
  launch.pieces.push_back({from, {}, to, bytes, 0, 0, 1.0F, false});
  launch.fingerprint.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
  return enqueue(launch, stream);
}

Ticket ShmCommunicator::barrier(Tag tag, device::Stream &stream) {
  return enqueue(start(Operation::barrier, tag, 0), stream);
}

void ShmCommunicator::await_release(Ticket ticket, device::Stream &stream) {
  if (released(ticket)) return;
  seat_->watch.enter_caller();
  // Of the last ones: nobody waits for one that came long before.
  stream.run([this, phase = ticket.phase, fingerprint = enqueued_[number_of(ticket.phase) % fingerprints_kept]] {
    await_phase(phase, fingerprint);
  });
}

// A round that is skipped releases everything: what it would still read is of no use to anybody.
bool ShmCommunicator::released(Ticket ticket) const noexcept {
  return ticket.phase == 0 || words_.reached(ticket.phase) || round_.skipped(round_of(ticket.phase));
}

void ShmCommunicator::await_phase(uint64_t phase, const Fingerprint &fingerprint) {
  if (round_.skipped(round_of(phase))) return;
  AwaitedPart awaited(*this, phase, fingerprint, nullptr);
  if (!seat_->watch.wait(awaited)) round_.break_at(phase, awaited.text());
}

void ShmCommunicator::arrive(const Launch &launch, Part part) {
  words_[rank_].raise(phase_of(launch.round, launch.number, part));
}

bool ShmCommunicator::await(const Launch &launch, Part part) {
  AwaitedPart awaited(*this, phase_of(launch.round, launch.number, part), launch.fingerprint,
                      part == Part::ready ? &launch : nullptr);
  if (seat_->watch.wait(awaited)) return true;
  round_.break_at(phase_of(launch.round, launch.number, part), awaited.text());
  return false;
}

bool ShmCommunicator::await_step(const Launch &launch, const Words &steps, uint64_t target) {
  AwaitedStep awaited(*this, steps, target, launch);
  if (seat_->watch.wait(awaited)) return true;
  round_.break_at(phase_of(launch.round, launch.number, Part::read), awaited.text());
  return false;
}

void ShmCommunicator::perform(Launch &launch) {
  const LaunchReturn guard(launch);
  const uint64_t ready = phase_of(launch.round, launch.number, Part::ready);
  if (round_.skipped(launch.round)) return round_.break_at(ready, launch.fingerprint.text(launch.number));
  if (words_[rank_].value.load(std::memory_order_relaxed) + 2 < ready)
    fail(FSDP_INTERNAL, "{} ran before the collective enqueued before it", launch.fingerprint.text(launch.number));
  place(rank_).fingerprints[launch.number % fingerprints_kept] = launch.fingerprint;
  words_[rank_].notes[launch.number % Word::note_count].store(launch.fingerprint.hash, std::memory_order_relaxed);
  // A barrier reads nothing: who has come has read it too.
  const bool reads = launch.operation != Operation::barrier;
  arrive(launch, reads ? Part::ready : Part::read);
  if (!await(launch, Part::ready)) return;
  work(launch);
}

void ShmCommunicator::work(const Launch &launch) {
  if (launch.worker) {
    if (launch.worker->work(launch)) arrive(launch, Part::read);
    return;
  }
  switch (launch.operation) {
    case Operation::all_gather:
      for (const Piece &piece : launch.pieces) gather(piece);
      break;
    case Operation::reduce_scatter:
      for (const Piece &piece : launch.pieces) reduce(piece, reinterpret_cast<float *>(piece.to));
      break;
    case Operation::all_reduce:
      if (!all_reduce(launch)) return;
      break;
    case Operation::broadcast:
      pull(launch.pieces[0].from, launch.root, launch.pieces[0].to, launch.pieces[0].count);
      break;
    case Operation::barrier: return;
  }
  arrive(launch, Part::read);
}

// A peer that is at this collective or later has its fingerprint there; both sides see a difference, the first is told.
void ShmCommunicator::compare(const Launch &launch, uint32_t r) {
  // The hash came with the word. A peer is at most one collective ahead of one that it waits for.
  if (words_[r].notes[launch.number % Word::note_count].load(std::memory_order_relaxed) == launch.fingerprint.hash)
    return;
  const Fingerprint &theirs = place(r).fingerprints[launch.number % fingerprints_kept];
  const uint32_t first = std::min(r, rank_), second = std::max(r, rank_);
  const auto text = [&](uint32_t of) {
    const Fingerprint &fingerprint = of == rank_ ? launch.fingerprint : theirs;
    return format_text("rank {} called {}", words_.world_rank(of), fingerprint.text(launch.number));
  };
  seat_->watch.condemn(Verdict::mismatch, words_.world_rank(second), format_text("{}, {}", text(first), text(second)));
}

void ShmCommunicator::pull(const Source &from, uint32_t r, std::byte *to, uint64_t bytes) const {
  const std::byte *source = address(from, r);
  const bool in_place = to == source || to == from.arena->writable() + from.offset + r * from.stride;
  if (!in_place && bytes) device::kernels::copy_bytes(to, source, bytes);
}

// Each rank starts at its own piece, so that not all read the same memory at once.
void ShmCommunicator::gather(const Piece &piece) const {
  for (uint32_t i = 0; i < words_.size(); ++i) {
    const uint32_t r = (rank_ + i) % words_.size();
    pull(piece.from, r, piece.to + r * piece.count, piece.count);
  }
}

void ShmCommunicator::reduce(const Piece &piece, float *out) const {
  if (piece.count == 0) return;
  const uint64_t slice = rank_ * piece.count * dtype_size(piece.dtype);
  const std::byte *own = piece.from.arena->writable() + piece.from.offset + rank_ * piece.from.stride + slice;
  const device::RankSum sum{address(piece.from, 0) + slice,
                            piece.from.stride,
                            words_.size(),
                            piece.dtype,
                            piece.wire_dtype,
                            out,
                            piece.count,
                            piece.factor,
                            piece.accumulate,
                            own == reinterpret_cast<const std::byte *>(out)};
  if (block_ >= words_.size())
    device::kernels::rank_sum(sum);
  else
    reduce_blocks(sum);
}

// A few at a time in a buffer of its own, since `out` may be what a later block still adds.
void ShmCommunicator::reduce_blocks(device::RankSum sum) const {
  constexpr uint64_t chunk = 1024;
  alignas(64) float sums[chunk];
  float *out = sum.out;
  const bool accumulate = sum.accumulate;
  const std::byte *base = sum.base;
  for (uint64_t done = 0; done < sum.count; done += chunk) {
    device::RankSum part = sum;
    part.count = std::min(chunk, sum.count - done);
    part.out = sums;
    part.in_place = false;
    part.accumulate = accumulate;
    if (accumulate) std::memcpy(sums, out + done, part.count * sizeof(float));
    for (uint32_t first = 0; first < sum.ranks; first += block_, part.accumulate = true) {
      part.ranks = std::min(block_, sum.ranks - first);
      part.base = base + first * sum.stride + done * dtype_size(sum.source_dtype);
      device::kernels::rank_sum(part);
    }
    std::memcpy(out + done, sums, part.count * sizeof(float));
  }
}

bool ShmCommunicator::all_reduce(const Launch &launch) {
  for (const Piece &piece : launch.pieces) reduce(piece, reinterpret_cast<float *>(piece.to) + rank_ * piece.count);
  arrive(launch, Part::middle);
  if (!await(launch, Part::middle)) return false;
  for (const Piece &piece : launch.pieces) {
    const uint64_t bytes = piece.count * sizeof(float);
    for (uint32_t i = 1; i < words_.size(); ++i) {
      const uint32_t r = (rank_ + i) % words_.size();
      if (bytes) device::kernels::copy_bytes(piece.to + r * bytes, address(piece.whole, r) + r * bytes, bytes);
    }
  }
  return true;
}

}  // namespace fsdp::comm
