// SPDX-License-Identifier: Apache-2.0
#include "membership/liveness/watch.h"

#include <sched.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "base/failure.h"
#include "base/word.h"

namespace fsdp::membership {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint32_t cycle_ms = 100;  // no shorter wait counts as a cycle, because showing a wait takes memory
constexpr auto longest_doubt = std::chrono::milliseconds(1200);
// Messages of a rank of another node may arrive after the news that it left: they use different connections, and a lost
// packet is sent again only after a second or more.
constexpr auto remote_leaver_time = std::chrono::milliseconds(2000);
constexpr auto death_gap = std::chrono::milliseconds(40);  // maximum time between deaths that count as simultaneous
// About two futex round trips, because an immediate sleep would cost as much.
constexpr auto spin_time = std::chrono::microseconds(20);

}  // namespace

Watch::Watch(Control &control, Links &links, const Pulse &pulse, uint32_t rank, const Waiter &waiter, Failure &failure)
    : control_(control), links_(links), pulse_(pulse), rank_(rank), waiter_(waiter), failure_(failure) {
  waiter.set_observer(this);
}

Watch::~Watch() { waiter_.set_observer(nullptr); }

void Watch::enter_caller() noexcept { caller_.store(thread_number(), std::memory_order_relaxed); }

// Yielding costs little if no other thread wants the core, and otherwise lets a peer run. Callers and streams of the
// same ranks compete even if there are as many cores as ranks.
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

void Watch::look_for_cycle(Awaited &awaited, std::optional<StreamWait> &stream, std::optional<ShownWait> &shown) {
  const auto missed = first_missed_caller(awaited, control_.world_size(), rank_);
  if (stream)
    stream->look(missed, awaited);
  else if (const auto cycle = shown->look(missed, waiter_.call_text(), awaited); !cycle.empty() && !awaited.come())
    condemn_cycle(*shown, cycle);
}

bool Watch::wait(Awaited &awaited) {
  if (awaited.come() || spin(awaited)) return true;
  const bool on_caller = caller_.load(std::memory_order_relaxed) == thread_number();
  const auto start = Clock::now();
  const auto timeout = std::chrono::milliseconds(waiter_.timeout_ms());
  const int slice = slice_ms_of(control_.world_size());
  auto last_look = start;
  Clock::time_point left_since{};
  std::optional<ShownWait> shown;
  std::optional<StreamWait> stream;
  if (on_caller)
    shown.emplace(control_.waits(), control_.world_size(), rank_);
  else
    stream.emplace(streams_, thread_number());
  for (;;) {
    if (awaited.come()) return true;
    check();  // first: if a rank left because of a verdict, the verdict is the error
    if (awaited.given_up()) {
      check();  // again: the verdict may have come between the two
      return false;
    }
    if (on_caller) waiter_.poll();
    check_leavers(awaited, left_since);
    const auto now = Clock::now();
    if (now - last_look >= std::chrono::milliseconds(slice)) {
      last_look = now;
      check_deaths(awaited);
      check_silence(awaited);
      if (now - start >= std::chrono::milliseconds(cycle_ms)) look_for_cycle(awaited, stream, shown);
    }
    if (now - start >= timeout) {
      if (awaited.come()) return true;
      time_out(awaited);
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(timeout - (now - start)).count() + 1;
    awaited.sleep(static_cast<uint32_t>(std::min<int64_t>(slice, left)));
  }
}

void Watch::check() {
  control_.settle();
  if (control_.accused()) throw_verdict();
  if (!failure_.failed()) return;
  // Tells the peers, which would otherwise wait for this rank until their timeout.
  const Error error = *failure_.get();
  control_.accuse(error.status == FSDP_ABORTED ? FailureKind::aborted : FailureKind::failed, rank_,
                  format_text("rank {} failed: {}", rank_, error.message));
  throw error;
}

// A suspicion also counts, because a verdict follows: the coordinator's, or the suspicion itself if no leader answers.
bool Watch::has_failed() noexcept {
  try {
    check();
    return control_.suspected();
  } catch (const Error &) {
    return true;
  }
}

void Watch::look_at(std::span<const uint32_t> ranks, const std::string &what, bool waited) {
  check();
  for (const uint32_t rank : ranks) {
    const Membership state = control_.membership(rank);
    if (waited && (state == Membership::left || state == Membership::gone)) condemn_leaver(rank, what);
  }
  const auto ours = [&](uint32_t rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
  Deaths dead;
  find_dead(dead);
  const auto found = dead.ranks().list();
  if (std::any_of(found.begin(), found.end(), ours)) {
    std::this_thread::sleep_for(death_gap);
    find_dead(dead);
    condemn(dead.accuse(what + ": ", control_));
  }
  if (pulse_.silent(ours).empty()) return;
  const std::vector<uint32_t> silent = pulse_.silent([](uint32_t) { return true; });
  condemn(accuse_ranks(FailureKind::stopped, silent, format_text("{}: {}", what, pulse_.text(silent))));
}

// If a rank closed or destroyed its context, that is an error only for ranks that wait for it. Its membership is read
// before the data that it wrote: if it did its part before it left, misses() sees that. Only messages from another node
// may still be in transit.
void Watch::check_leavers(Awaited &awaited, Clock::time_point &left_since) {
  if (!control_.any_left()) return;
  for (uint32_t rank = 0; rank < control_.world_size(); ++rank) {
    const Membership state = control_.membership(rank);
    if (state != Membership::left && state != Membership::gone) continue;
    if (!awaited.misses(rank)) continue;
    if (control_.remote(rank)) {
      if (left_since == Clock::time_point()) left_since = Clock::now();
      if (Clock::now() - left_since < remote_leaver_time) continue;
    }
    condemn_leaver(rank, awaited.text());
  }
}

void Watch::condemn_leaver(uint32_t rank, const std::string &what) {
  const bool closed = control_.membership(rank) == Membership::left;
  condemn(FailureKind::left, rank,
          format_text("{}: rank {} {}", what, rank,
                      closed ? "has closed its context" : "has destroyed its context without closing it"));
}

// Simultaneous deaths are one failure, so a rank that finds one death looks for others before it accuses.
void Watch::check_deaths(Awaited &awaited) {
  Deaths dead;
  find_dead(dead);
  if (dead.empty() || awaited.come()) return;  // a rank that has done its part may end
  for (int looks = 0; looks < 4 && !control_.accused(); ++looks) {
    std::this_thread::sleep_for(death_gap / 4);
    find_dead(dead);
  }
  if (!awaited.come()) condemn(dead.accuse(awaited.text() + ": ", control_));
}

void Watch::check_silence(Awaited &awaited) {
  if (pulse_.silent([&](uint32_t rank) { return awaited.misses(rank); }).empty() || awaited.come()) return;
  // Names all silent ranks, because a rank that has done its part of this wait may have stopped as well.
  const std::vector<uint32_t> silent = pulse_.silent([](uint32_t) { return true; });
  condemn(accuse_ranks(FailureKind::stopped, silent, format_text("{}: {}", awaited.text(), pulse_.text(silent))));
}

// The callers of these ranks wait for each other in a cycle, so none of the waits can end.
void Watch::condemn_cycle(const ShownWait &shown, const std::vector<uint32_t> &ranks) {
  std::vector<uint32_t> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  std::string text;
  for (const uint32_t rank : sorted)
    text += format_text("{}rank {} is in {}", text.empty() ? "" : ", ", rank, shown.text(rank));
  Accusation accusation = accuse_ranks(FailureKind::mismatch, sorted, text + ": they wait for each other");
  accusation.rank = static_cast<int32_t>(sorted.back());
  condemn(accusation);
}

void Watch::look(uint64_t thread) {
  if (!stream_wait_) stream_wait_.emplace(control_.waits(), control_.world_size(), rank_);
  const auto cycle = stream_wait_->look_through(streams_.find(thread), waiter_.call_text());
  if (!cycle.empty()) condemn_cycle(*stream_wait_, cycle);
}

// The missed rank may wait for another rank, as in collectives over several hosts. The waits that ranks show lead from
// rank to rank to one that does not wait. If they lead into a cycle, the missed rank is returned, because a timeout
// does not judge cycles.
uint32_t Watch::find_late(uint32_t missing) const {
  const Waits waits = control_.waits();
  uint32_t at = missing;
  for (uint32_t steps = 0; steps < control_.world_size(); ++steps) {
    if (look_count(waits[at].wait_and_looks.load(std::memory_order_acquire)) == 0) return at;
    const uint32_t next = waits[at].awaited_rank.load(std::memory_order_relaxed);
    if (next >= control_.world_size()) return at;
    if (next == rank_) return missing;
    at = next;
  }
  return missing;
}

void Watch::time_out(Awaited &awaited) {
  std::vector<uint32_t> missing, late;
  for (uint32_t rank = 0; rank < control_.world_size(); ++rank)
    if (awaited.lags(rank)) missing.push_back(rank);
  if (missing.empty()) missing.push_back(rank_);
  for (const uint32_t rank : missing) late.push_back(rank == rank_ ? rank : find_late(rank));
  std::ranges::sort(late);
  late.erase(std::unique(late.begin(), late.end()), late.end());
  const bool one = missing.size() == 1;
  std::string text = format_text("{}: {} {} not come within {} ms", awaited.text(), rank_list(missing),
                                 one ? "has" : "have", waiter_.timeout_ms());
  if (late != missing) text += format_text(": {} for {}", one ? "it waits" : "they wait", rank_list(late));
  condemn(accuse_ranks(FailureKind::timeout, late, text));
}

void Watch::condemn(FailureKind kind, uint32_t rank, const std::string &text, fsdp_origin origin, int32_t origin_code) {
  Accusation accusation = accuse_rank(kind, rank, text);
  accusation.origin = origin;
  accusation.origin_code = origin_code;
  condemn(accusation);
}

// On a single node the verdict exists immediately. If a leader asks the coordinator, the verdict comes within the time
// that Control gives the leader.
void Watch::condemn(const Accusation &accusation) {
  const auto last = Clock::now() + longest_doubt;
  control_.accuse(accusation);
  while (!control_.accused()) {
    if (Clock::now() >= last) control_.decide(accusation);  // its writer died before the end of the write
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    control_.settle();
  }
  throw_verdict();
}

void Watch::throw_verdict() {
  failure_.set(control_.verdict(rank_));
  throw *failure_.get();
}

}  // namespace fsdp::membership
