// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/watch.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "comm/shm/word.h"

namespace fsdp::comm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint32_t slice_ms = 20;
constexpr auto longest_doubt = std::chrono::milliseconds(1200);
constexpr auto death_gap = std::chrono::milliseconds(40);  // between deaths at the same time
// About two futex round trips: sleeping at once would cost as much.
constexpr auto spin_time = std::chrono::microseconds(20);

// Numbers are never used again, unlike thread ids: a library thread cannot be taken for a caller that ended.
uint64_t thread_number() noexcept {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t number = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return number;
}

}  // namespace

Watch::Watch(Control &control, Links &links, const Pulse &pulse, uint32_t rank, const Waiter &waiter, Failure &failure)
    : control_(control), links_(links), pulse_(pulse), rank_(rank), waiter_(waiter), failure_(failure) {}

void Watch::enter_caller() noexcept { caller_.store(thread_number(), std::memory_order_relaxed); }

// Yielding costs little where nobody else wants the core, and lets a peer come that does: callers and streams of the
// same ranks compete even where there are as many cores as ranks.
bool Watch::spin(Awaited &awaited) {
  const bool crowded = control_.crowded();
  for (int i = 0; i < (crowded ? 0 : 128); ++i) {
    if (awaited.come()) return true;
    relax();
  }
  const auto end = Clock::now() + spin_time;
  for (int i = 0; crowded ? i < 4 : Clock::now() < end; ++i) {
    ::sched_yield();
    if (awaited.come()) return true;
  }
  return false;
}

bool Watch::wait(Awaited &awaited) {
  if (awaited.come() || spin(awaited)) return true;
  const bool on_caller = caller_.load(std::memory_order_relaxed) == thread_number();
  const auto start = Clock::now();
  const auto timeout = std::chrono::milliseconds(waiter_.timeout_ms());
  auto last_look = start;
  ShownWait shown(control_.waits(), control_.world_size(), rank_);
  for (;;) {
    if (awaited.come()) return true;
    if (awaited.given_up()) return false;
    check();
    if (on_caller) waiter_.poll();
    check_leavers(awaited);
    const auto now = Clock::now();
    if (now - last_look >= std::chrono::milliseconds(slice_ms)) {
      last_look = now;
      check_deaths(awaited);
      check_silence(awaited);
      if (on_caller && awaited.needs_callers()) check_crossing(awaited, shown);
    }
    if (now - start >= timeout) {
      if (awaited.come()) return true;
      time_out(awaited);
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(timeout - (now - start)).count() + 1;
    awaited.sleep(static_cast<uint32_t>(std::min<int64_t>(slice_ms, left)));
  }
}

void Watch::check() {
  control_.settle();
  if (control_.accused()) throw_verdict();
  if (!failure_.failed()) return;
  // Peers would wait for this rank until their timeout.
  const Error error = *failure_.get();
  control_.accuse(error.status == FSDP_ABORTED ? Verdict::aborted : Verdict::failed, rank_,
                  format_text("rank {} failed: {}", rank_, error.message));
  throw error;
}

// One that closed its context or destroyed it is an error only to who waits for it. Its membership is read before what
// it wrote: had it come before it went, that is seen.
void Watch::check_leavers(Awaited &awaited) {
  for (uint32_t rank = 0; rank < control_.world_size(); ++rank) {
    const Membership state = control_.membership(rank);
    if (state != Membership::left && state != Membership::gone) continue;
    if (!awaited.misses(rank)) continue;
    condemn(Verdict::left, rank,
            format_text(
                "{}: rank {} {}", awaited.text(), rank,
                state == Membership::left ? "has closed its context" : "has destroyed its context without closing it"));
  }
}

void Watch::find_dead(RankSet &dead) {
  links_.find_dead([&](uint32_t rank) {
    const Membership state = control_.membership(rank);
    if (state != Membership::left && state != Membership::gone) dead.add(rank);
  });
}

// Deaths at the same time are one failure: who finds one looks for others before it accuses.
void Watch::check_deaths(Awaited &awaited) {
  RankSet dead;
  find_dead(dead);
  if (dead.empty() || awaited.come()) return;  // one that did its part may end
  for (int looks = 0; looks < 4 && !control_.accused(); ++looks) {
    std::this_thread::sleep_for(death_gap / 4);
    find_dead(dead);
  }
  if (!awaited.come()) condemn(accuse_dead(awaited.text() + ": ", dead));
}

void Watch::check_silence(Awaited &awaited) {
  const std::vector<uint32_t> silent = pulse_.silent([&](uint32_t rank) { return awaited.misses(rank); });
  if (silent.empty() || awaited.come()) return;
  condemn(Verdict::stopped, silent.front(), format_text("{}: {}", awaited.text(), pulse_.text(silent)));
}

// The peer's caller is inside another call and will not come before this one has come there.
void Watch::check_crossing(Awaited &awaited, ShownWait &shown) {
  const auto peer = shown.look(awaited, waiter_.call());
  if (!peer || awaited.come()) return;
  const uint32_t first = std::min(rank_, *peer), second = std::max(rank_, *peer);
  condemn(Verdict::mismatch, second,
          format_text("rank {} is in {}, rank {} is in {}: they wait for each other", first, shown.text(first), second,
                      shown.text(second)));
}

void Watch::time_out(Awaited &awaited) {
  std::vector<uint32_t> missing;
  for (uint32_t rank = 0; rank < control_.world_size(); ++rank)
    if (awaited.lags(rank)) missing.push_back(rank);
  if (missing.empty()) missing.push_back(rank_);
  condemn(Verdict::timeout, missing.front(),
          format_text("{}: {} {} not come within {} ms", awaited.text(), rank_list(missing),
                      missing.size() == 1 ? "has" : "have", waiter_.timeout_ms()));
}

void Watch::condemn(Verdict verdict, uint32_t rank, const std::string &text) {
  condemn(accuse_rank(verdict, rank, text));
}

// At once on a single node; where a leader asks the other nodes, within the time that Control gives it.
void Watch::condemn(const Accusation &accusation) {
  const auto last = Clock::now() + longest_doubt;
  control_.accuse(accusation);
  while (!control_.accused()) {
    if (Clock::now() >= last) control_.decide(accusation);  // who suspected first died in the middle of it
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    control_.settle();
  }
  throw_verdict();
}

void Watch::throw_verdict() {
  failure_.set(control_.verdict(rank_));
  throw *failure_.get();
}

}  // namespace fsdp::comm
