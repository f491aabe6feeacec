// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/collectives.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "base/float_environment.h"
#include "device/host/futex.h"
#include "device/host/kernels.h"
#include "transport/call/launch.h"

namespace fsdp::transport {
namespace {

// If all ranks' addends have at most this many bytes, each rank computes a sum everywhere by itself. Measured with two
// ranks, for 16 KiB to 1 MiB.
constexpr uint64_t max_summed_at_once = uint64_t{512} << 10;

// A caller that has borrowed a stream waits at most this long for its peers. Then the stream's thread does the sum.
constexpr auto longest_wait = std::chrono::microseconds(5);

}  // namespace

class ShmCollectives::AwaitedPart final : public AwaitedWords {
 public:
  // `launch` is the launch whose fingerprints are compared when peers come; NULL: nothing is compared.
  AwaitedPart(ShmCollectives &calls, uint64_t phase, const Fingerprint &fingerprint, const Launch *launch)
      : AwaitedWords(calls.words_, phase), calls_(calls), fingerprint_(fingerprint), launch_(launch) {}

  // A rank whose caller has enqueued the collective needs only its stream to reach it.
  bool misses_caller(uint32_t world_rank) const override {
    for (uint32_t r = 0; r < calls_.words_.size(); ++r)
      if (calls_.words_.world_rank(r) == world_rank) return misses(world_rank) && !calls_.round_.called(r, target_);
    return false;
  }
  bool given_up() override { return calls_.round_.hopeless(target_); }
  std::string text() const override { return fingerprint_.text(number_of(target_)); }

 private:
  void met(uint32_t r) override {
    if (launch_) calls_.compare(*launch_, r);
  }

  ShmCollectives &calls_;
  const Fingerprint &fingerprint_;
  const Launch *launch_;
};

class ShmCollectives::AwaitedStep final : public AwaitedWords {
 public:
  AwaitedStep(ShmCollectives &calls, const Words &steps, uint64_t target, const Launch &launch)
      : AwaitedWords(steps, target), calls_(calls), launch_(launch) {}

  // A rank that ended the round before the end of this launch may never come to this step.
  bool given_up() override { return calls_.round_.hopeless(phase_of(launch_.round, launch_.number, Phase::read)); }
  std::string text() const override { return launch_.fingerprint.text(launch_.number); }

 private:
  ShmCollectives &calls_;
  const Launch &launch_;
};

ShmCollectives::ShmCollectives(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, uint32_t block,
                               Mapping memory, std::unique_ptr<Relay> relay)
    : seat_(std::move(seat)),
      rank_(rank),
      ranks_(std::move(ranks)),
      block_(block ? block : static_cast<uint32_t>(ranks_.size())),
      memory_(std::move(memory)),
      words_(memory_.data() + offsetof(RankPlace, state.phase), sizeof(RankPlace), ranks_),
      round_(memory_.data() + offsetof(RankPlace, state), sizeof(RankPlace), rank, ranks_),
      relay_(std::move(relay)) {
  static_assert(sizeof(RankPlace) % 64 == 0);
  // As in next_round(). Creation ends with a barrier of all ranks, before the first collective.
  words_[rank_].raise(first_phase(round_.number()));
}

Ticket ShmCollectives::enqueue(Launch &launch, device::Stream &stream) {
  seat_->watch.enter_caller();
  launch.round = round_.number();
  launch.number = round_.enqueue();
  enqueued_[launch.number % fingerprints_kept] = launch.fingerprint;
  const Ticket ticket{phase_of(launch.round, launch.number, Phase::read)};
  if (!perform_on_caller(launch, stream)) stream.run([this, pending = &launch] { perform(*pending); });
  return ticket;
}

// Peers learn here that this rank has come. If they are late, the stream's thread does the rest.
bool ShmCollectives::perform_on_caller(Launch &launch, device::Stream &stream) {
  const bool sums = launch.operation == Operation::reduce_scatter || launch.operation == Operation::all_reduce;
  if (!stream.is_borrowed() || !sums) return false;
  bool met = false;
  if (waits_once(launch) && !round_.skipped(launch.round))
    stream.run([this, &launch, &met] {
      const FloatEnvironment standard;  // the modes that the stream's thread has
      begin(launch);
      const auto all_came = [&] { return words_.reached(phase_of(launch.round, launch.number, Phase::ready)); };
      met = all_came() || (!seat_->control.crowded() && device::spin_until(all_came, longest_wait));
      if (met) perform(launch);
    });
  if (!met) stream.give_back();
  return met;
}

// Does this sum wait for peers only once, before it reads their addends? Others also wait in the middle.
bool ShmCollectives::waits_once(const Launch &launch) const noexcept {
  return !relay_ && (launch.operation == Operation::reduce_scatter || is_summed_at_once(launch));
}

// No rank waits for another, so the gather has no number and nothing is compared. With private buffers all ranks must
// take part.
void ShmCollectives::gather_stable(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  if (gathers.empty()) return;
  if (relay_) {
    gather(gathers, tag, stream);
    return;
  }
  seat_->watch.enter_caller();
  Launch &launch = launches_.take(Operation::all_gather, tag, gathers.size());
  launch.add(gathers);
  stream.run([this, pending = &launch] {
    const LaunchReturn guard(*pending);
    for (const Piece &piece : pending->pieces) gather(piece);
  });
}

Ticket ShmCollectives::gather(std::span<const Gather> gathers, Tag tag, device::Stream &stream) {
  Launch &launch = launches_.take(Operation::all_gather, tag, gathers.size());
  launch.add(gathers);
  return enqueue(launch, stream);
}

Ticket ShmCollectives::sum(std::span<const Sum> sums, bool accumulate, Tag tag, device::Stream &stream) {
  const Shape shape = relay_ ? Shape::messages() : Shape();
  const Operation operation = operation_of(sums, accumulate, shape, words_.size(), tag);
  Launch &launch = launches_.take(operation, tag, sums.size());
  launch.add(sums, accumulate);
  return enqueue(launch, stream);
}

Ticket ShmCollectives::broadcast(const Part &data, uint64_t bytes, uint32_t root, Tag tag, device::Stream &stream) {
  require_root(root, words_.size());
  Launch &launch = launches_.take(Operation::broadcast, tag, 1);
  launch.add_broadcast(data, bytes, root);
  return enqueue(launch, stream);
}

Ticket ShmCollectives::exchange(const Part &from, std::span<const Move> moves, Tag tag, device::Stream &stream) {
  require_moves(from, moves, relay_ ? Shape::messages() : Shape(), words_.size(), tag);
  Launch &launch = launches_.take(Operation::exchange, tag, count_moves(moves, rank_));
  launch.add(from, moves, rank_, words_.size());
  return enqueue(launch, stream);
}

Ticket ShmCollectives::barrier(Tag tag, device::Stream &stream) {
  return enqueue(launches_.take(Operation::barrier, tag, 0), stream);
}

void ShmCollectives::await_release(Ticket ticket, device::Stream &stream) {
  if (released(ticket)) return;
  seat_->watch.enter_caller();
  // Only the last fingerprints are kept, because no rank waits for a collective from long before.
  stream.run([this, phase = ticket.phase, fingerprint = enqueued_[number_of(ticket.phase) % fingerprints_kept]] {
    await_phase(phase, fingerprint);
  });
}

// A skipped round releases everything, because no rank needs the remaining reads.
bool ShmCollectives::released(Ticket ticket) const noexcept {
  return ticket.phase == 0 || words_.reached(ticket.phase) || round_.skipped(round_of(ticket.phase));
}

void ShmCollectives::await_phase(uint64_t phase, const Fingerprint &fingerprint) {
  if (round_.skipped(round_of(phase))) return;
  AwaitedPart awaited(*this, phase, fingerprint, nullptr);
  if (!seat_->watch.wait(awaited)) round_.break_at(phase, awaited.text());
}

void ShmCollectives::arrive(const Launch &launch, Phase phase) {
  words_[rank_].raise(phase_of(launch.round, launch.number, phase));
}

bool ShmCollectives::await(const Launch &launch, Phase phase) {
  AwaitedPart awaited(*this, phase_of(launch.round, launch.number, phase), launch.fingerprint,
                      phase == Phase::ready ? &launch : nullptr);
  if (seat_->watch.wait(awaited)) return true;
  round_.break_at(phase_of(launch.round, launch.number, phase), awaited.text());
  return false;
}

bool ShmCollectives::await_step(const Launch &launch, const Words &steps, uint64_t target) {
  AwaitedStep awaited(*this, steps, target, launch);
  if (seat_->watch.wait(awaited)) return true;
  round_.break_at(phase_of(launch.round, launch.number, Phase::read), awaited.text());
  return false;
}

void ShmCollectives::perform(Launch &launch) {
  const LaunchReturn guard(launch);
  const uint64_t ready = phase_of(launch.round, launch.number, Phase::ready);
  if (round_.skipped(launch.round)) return round_.break_at(ready, launch.fingerprint.text(launch.number));
  if (!launch.begun) begin(launch);
  if (!await(launch, Phase::ready)) return;
  if (carry(launch) && launch.operation != Operation::barrier) arrive(launch, Phase::read);
}

// Tells the peers that this rank has made the call, and that its inputs are ready. A barrier reads nothing, so a rank
// that has come to it has also finished reading.
void ShmCollectives::begin(Launch &launch) {
  launch.begun = true;
  const uint64_t ready = phase_of(launch.round, launch.number, Phase::ready);
  if (words_[rank_].value.load(std::memory_order_relaxed) + 2 < ready)
    fail(FSDP_INTERNAL, "{} ran before the collective enqueued before it", launch.fingerprint.text(launch.number));
  place(rank_).fingerprints[launch.number % fingerprints_kept] = launch.fingerprint;
  words_[rank_].notes[launch.number % Word::note_count].store(launch.fingerprint.hash, std::memory_order_relaxed);
  arrive(launch, launch.operation == Operation::barrier ? Phase::read : Phase::ready);
}

bool ShmCollectives::carry(const Launch &launch) {
  if (relay_) return relay_->carry(*this, launch);
  switch (launch.operation) {
    case Operation::all_gather:
      for (const Piece &piece : launch.pieces) gather(piece);
      break;
    case Operation::reduce_scatter:
      for (const Piece &piece : launch.pieces) reduce_own(piece, piece.to.floats());
      break;
    case Operation::all_reduce: return all_reduce(launch);
    case Operation::broadcast:
      pull(launch.pieces[0].from, launch.root, launch.pieces[0].to.own, launch.pieces[0].count);
      break;
    case Operation::exchange: pull_moves(launch); break;
    case Operation::barrier: break;
  }
  return true;
}

// A peer that is at this collective or a later one has its fingerprint there. Both sides see a difference; the first
// difference is reported.
void ShmCollectives::compare(const Launch &launch, uint32_t r) {
  // The hash was stored with the word. A peer is at most one collective ahead of one for which it waits.
  if (words_[r].notes[launch.number % Word::note_count].load(std::memory_order_relaxed) == launch.fingerprint.hash)
    return;
  const Fingerprint &theirs = place(r).fingerprints[launch.number % fingerprints_kept];
  const uint32_t first = std::min(r, rank_), second = std::max(r, rank_);
  const auto text = [&](uint32_t of) {
    const Fingerprint &fingerprint = of == rank_ ? launch.fingerprint : theirs;
    return format_text("rank {} called {}", words_.world_rank(of), fingerprint.text(launch.number));
  };
  seat_->watch.condemn(FailureKind::mismatch, words_.world_rank(second),
                       format_text("{}, {}", text(first), text(second)));
}

void ShmCollectives::pull(const Part &from, uint32_t r, std::byte *to, uint64_t bytes) const {
  const std::byte *source = from.of(r);
  const bool in_place = to == source || to == from.arena->writable() + from.offset + r * from.stride;
  if (!in_place && bytes) device::kernels::copy_bytes(to, source, bytes);
}

// Each rank starts at its own piece, so that the ranks do not all read the same memory at the same time.
void ShmCollectives::gather(const Piece &piece) const {
  for (uint32_t i = 0; i < words_.size(); ++i) {
    const uint32_t r = (rank_ + i) % words_.size();
    pull(piece.from, r, piece.to.own + r * piece.count, piece.count);
  }
}

// As in gather(), each rank starts with the bytes of a different source.
void ShmCollectives::pull_moves(const Launch &launch) const {
  for (uint32_t i = 0; i < words_.size(); ++i) {
    const uint32_t source = (rank_ + i) % words_.size();
    for (const Piece &piece : launch.pieces)
      if (piece.source == source && piece.target == rank_) pull(piece.from, source, piece.to.own, piece.count);
  }
}

void ShmCollectives::reduce_own(const Piece &piece, float *out) const {
  const uint64_t count = piece.count / words_.size();
  reduce(piece, rank_ * count, count, out);
}

void ShmCollectives::reduce(const Piece &piece, uint64_t first, uint64_t count, float *out) const {
  const uint64_t slice = first * dtype_size(piece.dtype);
  if (count == 0) return;
  const device::RankSum sum{piece.from.of(0) + slice,
                            piece.from.stride,
                            words_.size(),
                            piece.dtype,
                            piece.wire,
                            out,
                            count,
                            piece.factor,
                            piece.accumulate,
                            piece.from.own + slice == reinterpret_cast<const std::byte *>(out),
                            piece.results_bytes};
  if (block_ >= words_.size())
    device::kernels::rank_sum(sum);
  else
    reduce_blocks(sum);
}

// Adds a few elements at a time in a separate buffer, because `out` may be an addend of a later block.
void ShmCollectives::reduce_blocks(device::RankSum sum) const {
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
    part.results_bytes = 0;
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

// If there is little to sum, each rank sums all of it. The rank then reads more, but does not read sums that a peer has
// just written, and waits once less.
bool ShmCollectives::is_summed_at_once(const Launch &launch) const noexcept {
  uint64_t bytes = 0;
  for (const Piece &piece : launch.pieces) {
    if (piece.accumulate || piece.to.own == piece.from.own) return false;
    bytes += words_.size() * piece.count * dtype_size(piece.dtype);
  }
  return bytes <= max_summed_at_once;
}

bool ShmCollectives::all_reduce(const Launch &launch) {
  if (is_summed_at_once(launch)) {
    for (const Piece &piece : launch.pieces) reduce(piece, 0, piece.count, piece.to.floats());
    return true;
  }
  for (const Piece &piece : launch.pieces) reduce_own(piece, piece.to.floats() + rank_ * (piece.count / words_.size()));
  arrive(launch, Phase::middle);
  if (!await(launch, Phase::middle)) return false;
  for (const Piece &piece : launch.pieces) {
    const uint64_t bytes = piece.count / words_.size() * sizeof(float);
    for (uint32_t i = 1; i < words_.size(); ++i) {
      const uint32_t r = (rank_ + i) % words_.size();
      if (bytes) device::kernels::copy_bytes(piece.to.own + r * bytes, piece.to.of(r) + r * bytes, bytes);
    }
  }
  return true;
}

}  // namespace fsdp::transport
