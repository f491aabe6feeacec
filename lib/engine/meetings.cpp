// SPDX-License-Identifier: Apache-2.0
#include "engine/meetings.h"

#include <algorithm>
#include <cstring>
#include <utility>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp::engine {
namespace {

// Of all that ranks may not tell differently.
uint64_t hash(Meeting meeting) {
  meeting.waited_ns = 0;
  return XXH3_64bits(&meeting, sizeof meeting);
}

}  // namespace

Meetings::Meetings(Runtime &runtime) : runtime_(runtime), meetings_(runtime.teams.all->size() + 1) {}

void Meetings::meet(const Arrival &call) {
  runtime_.replays.check();
  Meeting &mine = meetings_.back();
  mine = {};
  mine.intent = call.intent;
  mine.sound = call.missing.empty();
  mine.blamed = call.blamed;
  mine.version = runtime_.step.version();
  mine.value = call.value;
  mine.reduces = call.reduces;
  mine.trained = runtime_.step.trained();
  mine.given = call.given;
  mine.calls = runtime_.calls.hash();
  mine.capture = call.capture;
  mine.flags = call.flags;
  mine.waited_ns = std::exchange(waited_ns_, 0);
  StepNumbers numbers = call.numbers;
  numbers.scalings = runtime_.step.scalings();
  numbers.lr_scales = runtime_.step.lr_scales();
  if (mine.sound)
    mine.put(numbers);
  else
    std::strncpy(mine.text, call.missing.c_str(), sizeof mine.text - 1);
  runtime_.gathers.trace->settle();
  runtime_.reduces.trace->settle();
  const trace::FlightScope flight(*runtime_.flights.meetings, intent_call(call.intent), 0);
  const uint64_t came = trace::now_ns();
  exchange();
  if (call.intent == Intent::finish) waited_ns_ = std::max<uint64_t>(1, trace::now_ns() - came);
  note_lag();
  ++count_;
  // Captures are counted here, where all ranks see the same: also one that could not be begun on this rank.
  for (const Meeting &one : told()) captures_ = std::max(captures_, static_cast<uint32_t>(one.capture));
}

// One name for all intents: the meeting itself tells who called what.
void Meetings::exchange() {
  const WaitSpan span(runtime_, WaitKind::peers);
  constexpr auto what = "the end of a step";
  const Meeting &mine = meetings_.back();
  ballot_ =
      runtime_.teams.all->agree({.same = hash(mine), .troubled = mine.sound == 0, .waited_ns = mine.waited_ns}, what);
  if (!ballot_.agreed()) runtime_.teams.all->all_gather(&mine, sizeof mine, meetings_.data(), what);
}

void Meetings::meet_again() { exchange(); }

bool Meetings::all_came_for(Intent intent) const {
  return std::ranges::all_of(told(), [&](const Meeting &one) { return one.intent == intent; });
}

bool Meetings::all_sound() const {
  return std::ranges::all_of(told(), [](const Meeting &one) { return one.sound != 0; });
}

bool Meetings::all_gave_alike() const {
  return std::ranges::all_of(told(), [&](const Meeting &one) { return one.given == told().front().given; });
}

// Clocks of hosts differ, so ranks tell how long they have waited: who waited least came last.
void Meetings::note_lag() {
  const transport::Team &team = *runtime_.teams.all;
  if (team.size() < 2 || ballot_.least_waited_ns == 0) return;
  last_rank_ = static_cast<int32_t>(team.world_rank(ballot_.last));
  last_lag_ns_ = ballot_.most_waited_ns - ballot_.least_waited_ns;
}

void Meetings::check(Intent intent) {
  if (ballot_.agreed()) return;
  const auto all = told();
  const transport::Team &team = *runtime_.teams.all;
  Differences found;
  compare_calls(found);
  const bool same_intent = compare_intents(all, team, found), all_came = found.text.empty();
  if (same_intent) compare(found);
  list_missing(all, team, found);
  if (found.text.empty()) return check_versions();
  const fsdp_status status = found.mismatch ? FSDP_MISMATCH : FSDP_INVALID_STATE;
  const uint32_t model = runtime_.teams.number;
  // Nothing has been done yet, on any rank.
  if (all_came && intent == Intent::capture)
    fail_rank(status, found.rank, "{}: model {}: the graph is of no use, and the model is as before it: {}",
              intent_call(intent), model, found.text);
  if (all_came && intent == Intent::replay)
    fail_rank(status, found.rank, "{}: model {}: the graph must not be launched, and the model is as before: {}",
              intent_call(intent), model, found.text);
  if (runtime_.step.version()) runtime_.step.fail(found.text);
  fail_rank(status, found.rank, "{}model {}: the step cannot end: {}; {}",
            same_intent ? format_text("{}: ", intent_call(intent)) : std::string(), model, found.text, way_on(all));
}

void Meetings::check_versions() {
  if (ballot_.agreed()) return;
  const transport::Team &team = *runtime_.teams.all;
  for (uint32_t r = 1; r < team.size(); ++r) {
    if (meetings_[r].version == meetings_[0].version) continue;
    const Error error(FSDP_MISMATCH,
                      format_text("model {}: rank {} has published {} times, rank {} {} times", runtime_.teams.number,
                                  team.world_rank(r), meetings_[r].version, team.world_rank(0), meetings_[0].version),
                      static_cast<int32_t>(team.world_rank(r)));
    runtime_.context.failure().set(error);
    throw error;
  }
}

}  // namespace fsdp::engine
