// SPDX-License-Identifier: Apache-2.0
// Which collectives the callers of peers have enqueued. A peer whose stream is late tells nothing by that; one whose
// caller waits elsewhere, and never comes to a call, may be in a circle of callers that wait for each other. So a rank
// that waits long asks, again and again: an answer holds for the time at which it was asked. It comes by the same way
// as the call, which may be lost and sent again long after the peer's leader has said that it waits. Where the peer has
// no such channel yet its transport answers. A lower rank that has not connected to this one has no channel with it: it
// is in no exchange with it, unless it is connecting. That it is taken for missing then makes no circle of ranks that
// make the same call: all edges without an answer lead from higher to lower ranks.
#include <algorithm>
#include <utility>

#include "base/failure.h"
#include "transport/message/channel/channel.h"

namespace fsdp::transport::messages {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint64_t ask_period_ns = 100'000'000;
// Of one that was asked often already: of a large job thousands may wait for one that is late, and ask each other.
constexpr uint64_t patient_period_ns = 400'000'000;
constexpr uint32_t often = 20;
// Shorter than the time for which circles are looked at before they are one.
constexpr uint64_t fresh_ns = 500'000'000;

// All of these times are so much longer in a job of so many ranks, as the looks are.
uint64_t times_of(uint32_t ranks) noexcept { return static_cast<uint64_t>(slice_ms_of(ranks) / slice_ms); }

uint64_t clock_ns() noexcept { return static_cast<uint64_t>(Clock::now().time_since_epoch().count()); }

}  // namespace

bool Channel::misses_caller(uint32_t world_rank, const Launch &launch, bool on_caller) {
  const auto lock = transport_.lock();
  const uint32_t r = lane_of(world_rank);
  if (r >= size() || r == rank_ || lanes_[r].met) return false;
  if (!transport_.connected(world_rank)) return on_caller && world_rank < ranks_[rank_];
  ask(r);
  if (clock_ns() - lanes_[r].answered_ns >= fresh_ns * times_of(seat_->control.world_size())) return false;
  return !round_.called(r, phase_of(launch.round, launch.number, Phase::ready));
}

void Channel::ask(uint32_t r) {
  const uint64_t now = clock_ns(), times = times_of(seat_->control.world_size());
  Lane &lane = lanes_[r];
  if (now - lane.asked_ns < times * (lane.asked < often ? ask_period_ns : patient_period_ns)) return;
  lane.asked = now - lane.asked_ns < times * fresh_ns ? lane.asked + 1 : 1;  // of this wait
  lane.asked_ns = now;
  Header question = header(Kind::ask);
  question.chunk = now;
  transport_.send_control(ranks_[r], question, nullptr, 0);
  transport_.wake();
}

// Later: within a transport's callback nothing is sent.
void Channel::take_question(uint32_t r, const Header &header) noexcept {
  lanes_[r].question_ns = header.chunk;
  questions_ = true;
}

void Channel::answer_questions() {
  if (!questions_) return;
  questions_ = false;
  for (uint32_t r = 0; r < size(); ++r) {
    if (!lanes_[r].question_ns) continue;
    Header answer = header(Kind::answer);
    answer.chunk = std::exchange(lanes_[r].question_ns, 0);
    answer.bytes = words_[rank_].ended.called.load(std::memory_order_acquire);
    transport_.send_control(ranks_[r], answer, nullptr, 0);
  }
}

void Channel::take_answer(uint32_t r, const Header &header) noexcept {
  Lane &lane = lanes_[r];
  if (header.chunk > lane.asked_ns) return;  // no question of this rank
  lane.answered_ns = std::max(lane.answered_ns, header.chunk);
  std::atomic<uint64_t> &called = words_[r].ended.called;
  called.store(std::max(called.load(std::memory_order_relaxed), header.bytes), std::memory_order_release);
}

}  // namespace fsdp::transport::messages
