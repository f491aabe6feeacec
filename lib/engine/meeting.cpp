// SPDX-License-Identifier: Apache-2.0
// Where all ranks agree: finish_grads, begin_update, discard_step and what publishes all meet, and each says why it came and what
// it misses.
#include "engine/meeting.h"

#include <algorithm>
#include <cstring>

#include "engine/capture.h"
#include "engine/model.h"

namespace fsdp::engine {
namespace {

void describe_meeting(std::string &text, uint32_t rank, const Meeting &meeting, Intent expected) {
  if (meeting.intent != expected)
    text += format_text("{}rank {} called {}", text.empty() ? "" : "; ", rank, intent_call(meeting.intent));
  if (!meeting.sound) text += format_text("{}rank {}: {}", text.empty() ? "" : "; ", rank, meeting.text);
}

std::string describe_capture(const Meeting &meeting) {
  if (meeting.capture == 0) return "is in no capture";
  const char *what = meeting.intent == Intent::replay ? "replayed" : "is in";
  return format_text("{} capture {}", what, meeting.capture);
}

}  // namespace

void Model::meet(Intent intent, double value, const std::string &missing, uint32_t capture) {
  Runtime &state = *runtime_;
  state.replays.check();
  Meeting &mine = meetings_.back();
  mine = {};
  mine.intent = intent;
  mine.sound = missing.empty();
  mine.version = state.version;
  mine.value = value;
  mine.reduces = intent == Intent::finish ? reducer_->count_reduces() : 0;
  mine.calls = state.calls.hash();
  mine.capture = capture_ ? capture_->number() : capture;
  std::strncpy(mine.text, missing.c_str(), sizeof mine.text - 1);
  state.gather_trace->settle();
  state.reduce_trace->settle();
  const WaitSpan span(state, Awaited::peers);
  const trace::FlightScope exchange(*state.meeting_flights, intent_call(intent), 0);
  // One name for all intents: the meeting itself tells who called what.
  state.teams.all->exchange_fixed(&mine, sizeof mine, meetings_.data(), "the end of a step");
  // Captures are counted here, where all ranks see the same: also one that could not be begun on this rank.
  for (uint32_t r = 0; r < state.teams.all->size(); ++r)
    capture_count_ = std::max(capture_count_, static_cast<uint32_t>(meetings_[r].capture));
  failed_begin_.clear();
}

void Model::exchange_meetings() {
  Runtime &state = *runtime_;
  const WaitSpan span(state, Awaited::peers);
  state.teams.all->exchange_fixed(&meetings_.back(), sizeof(Meeting), meetings_.data(), "the end of a step");
}

// Throws if the ranks did not come for the same, or one of them misses something.
void Model::check_meeting(Intent intent, double value) {
  Runtime &state = *runtime_;
  std::string problems = compare_calls();
  bool same_call = problems.empty(), all_came = same_call;
  for (uint32_t r = 0; r < state.teams.all->size(); ++r) {
    const Meeting &other = meetings_[r];
    const bool same_intent = other.intent == intent;
    // A rank that discards did nothing wrong: it is the wrong moment, and the way on is the same.
    // Replicas meet in the last reduce alone: nothing else tells that one had more micro-batches.
    const bool same_reduces = !same_intent || !other.sound || !meetings_.back().sound || other.reduces == meetings_.back().reduces;
    const bool same_capture = !same_intent || other.capture == meetings_.back().capture;
    same_call = same_call &&
                (same_intent ? other.value == value && same_reduces && same_capture : other.intent == Intent::discard);
    all_came = all_came && same_intent;
    if (!same_reduces)
      problems += format_text("{}rank {} reduced {} contributions of groups in this step, this rank {}", problems.empty() ? "" : "; ",
                              state.teams.all->world_rank(r), other.reduces, meetings_.back().reduces);
    if (same_intent && other.value != value)
      problems +=
          format_text("{}rank {} gave {} {}, this rank {}", problems.empty() ? "" : "; ",
                      state.teams.all->world_rank(r), intent == Intent::finish ? "scale" : "lr", other.value, value);
    if (!same_capture)
      problems +=
          format_text("{}rank {} {}, this rank {}", problems.empty() ? "" : "; ", state.teams.all->world_rank(r),
                      describe_capture(other), describe_capture(meetings_.back()));
    describe_meeting(problems, state.teams.all->world_rank(r), other, intent);
  }
  if (problems.empty()) return check_versions();
  const fsdp_status status = same_call ? FSDP_INVALID_STATE : FSDP_MISMATCH;
  // Nothing has been done yet, on any rank.
  if (all_came && intent == Intent::capture)
    fail(status, "{}: the graph is of no use, and the model is as before it: {}", intent_call(intent), problems);
  if (all_came && intent == Intent::replay)
    fail(status, "{}: the graph must not be launched, and the model is as before: {}", intent_call(intent), problems);
  state.step_failure = problems;
  fail(status, "{}: the step cannot end: {}; {} to go on", intent_call(intent), problems,
       capture_ ? "end the capture with fsdp_capture_end on every rank" : "call fsdp_discard_step on every rank");
}

// Ranks that have published different numbers of times hold different weights: there is no way on from there.
void Model::check_versions() {
  Runtime &state = *runtime_;
  for (uint32_t r = 0; r < state.teams.all->size(); ++r) {
    if (meetings_[r].version == state.version) continue;
    const Error error(FSDP_MISMATCH,
                      format_text("rank {} has published {} times, rank {} {} times", state.teams.all->world_rank(r),
                                  meetings_[r].version, state.teams.all->world_rank(state.teams.all->rank()), state.version),
                      static_cast<int32_t>(state.teams.all->world_rank(r)));
    context_->failure().set(error);
    throw error;
  }
}

}  // namespace fsdp::engine
