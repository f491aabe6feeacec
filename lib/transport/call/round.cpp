// SPDX-License-Identifier: Apache-2.0
#include "transport/call/round.h"

namespace fsdp::transport {

Round::Round(std::byte *base, uint64_t stride, uint32_t rank, std::span<const uint32_t> ranks)
    : base_(base), stride_(stride), rank_(rank), ranks_(ranks) {}

uint64_t Round::enqueue() {
  const uint64_t number = enqueued_.load(std::memory_order_relaxed);
  if (ended_) fail(FSDP_INTERNAL, "a collective after the end of round {} of its communicator", round_);
  if (number >= max_collectives) fail(FSDP_INTERNAL, "more than {} collectives in one round", max_collectives);
  enqueued_.store(number + 1, std::memory_order_relaxed);
  state(rank_).ended.called.store(first_phase(round_) + (number + 1) * parts, std::memory_order_release);
  return number;
}

uint32_t Round::flags(uint32_t r, uint64_t round) const noexcept {
  const uint64_t flags = state(r).ended.flags.load(std::memory_order_acquire);
  return flags >> 32 == round ? static_cast<uint32_t>(flags) : 0;
}

bool Round::ends_before(uint32_t r, uint64_t phase) const noexcept {
  return flags(r, round_of(phase)) & RoundState::enqueued_all &&
         phase > state(r).ended.last.load(std::memory_order_relaxed);
}

void Round::end(RoundState::Flag flag, uint32_t blamed) noexcept {
  std::lock_guard lock(mutex_);  // the caller may end a round, and so may a task that breaks
  RoundState &mine = state(rank_);
  if (flag == RoundState::enqueued_all) {
    const uint64_t enqueued = enqueued_.load(std::memory_order_relaxed);
    mine.ended.last.store(first_phase(round_) + enqueued * parts, std::memory_order_relaxed);
  }
  const uint32_t before = flags(rank_, round_);
  if (before & (RoundState::broken | RoundState::abandoned)) blamed = RoundState::blamed(before);
  const uint64_t all = (before & 0xff) | flag;
  mine.ended.flags.store(round_ << 32 | uint64_t{blamed} << 8 | all, std::memory_order_release);
  mine.phase.nudge();
}

void Round::quiesce() noexcept {
  ended_ = true;
  end(RoundState::enqueued_all, rank_);
}

void Round::abandon() noexcept {
  ended_ = true;
  skipped_.store(round_, std::memory_order_release);
  end(RoundState::abandoned, rank_);
}

// All ranks come to the same phase, even if collectives were skipped. What a peer has written of the previous round has
// another round number.
void Round::next() noexcept {
  std::lock_guard lock(mutex_);
  ++round_;
  enqueued_.store(0, std::memory_order_relaxed);
  ended_ = false;
  broken_.reset();
  state(rank_).phase.raise(first_phase(round_));
}

std::optional<Error> Round::broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

bool Round::hopeless(uint64_t phase) const noexcept {
  const uint64_t round = round_of(phase);
  if (skipped(round)) return true;
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    const uint32_t ended = flags(r, round);
    if (ended & RoundState::abandoned || ends_before(r, phase)) return true;
    if (ended & RoundState::broken && !state(r).phase.reached(phase)) return true;
  }
  return false;
}

// Blames the first rank that discarded the step. If there is none, blames the first that ended the round early, and
// then the first that broke for such a reason.
Error Round::explain(uint64_t phase, const std::string &call, uint32_t &blamed) const {
  const uint64_t round = round_of(phase);
  for (uint32_t r = 0; r < ranks_.size(); ++r)
    if (RoundState::discards(flags(r, round), r)) {
      blamed = r;
      return Error(FSDP_INVALID_STATE, format_text("{}: rank {} discarded the step", call, ranks_[r]),
                   static_cast<int32_t>(ranks_[r]));
    }
  for (uint32_t r = 0; r < ranks_.size(); ++r)
    if (ends_before(r, phase)) {
      blamed = r;
      const uint64_t made = number_of(state(r).ended.last.load(std::memory_order_relaxed));
      return Error(FSDP_MISMATCH,
                   format_text("rank {} finished the step without {}: it made {} of the {} calls made here", ranks_[r],
                               call, made, enqueued_.load(std::memory_order_relaxed)),
                   static_cast<int32_t>(ranks_[r]));
    }
  blamed = rank_;
  for (uint32_t r = 0; r < ranks_.size(); ++r)
    if (const uint32_t ended = flags(r, round); ended & (RoundState::broken | RoundState::abandoned))
      blamed = RoundState::blamed(ended) < ranks_.size() ? RoundState::blamed(ended) : r;
  return Error(FSDP_MISMATCH, format_text("rank {} ended the step before {}", ranks_[blamed], call),
               static_cast<int32_t>(ranks_[blamed]));
}

void Round::break_at(uint64_t phase, const std::string &call) {
  uint32_t blamed = rank_;
  {
    std::lock_guard lock(mutex_);
    if (!broken_) broken_.emplace(explain(phase, call, blamed));
  }
  skipped_.store(round_of(phase), std::memory_order_release);
  end(RoundState::broken, blamed);
}

}  // namespace fsdp::transport
