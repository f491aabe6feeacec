// SPDX-License-Identifier: Apache-2.0
// The end of a step. finish_grads, begin_update, discard_step and what publishes all meet: every rank says why it came and
// what it misses, so that they agree on what happens next. When all have met to finish, nobody holds weights and no
// gradient buffer is being read: the update window may open.
#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "engine/capture.h"
#include "engine/meeting.h"
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

// Everything this rank has enqueued ends: completed, or given up because a peer does not take part.
void Model::end_step(Intent intent, double value, std::string missing, device::Stream &caller) {
  Runtime &state = *runtime_;
  gatherer_->drop_all(false);
  if (context_->on_host()) {
    state.reduce_comm->quiesce();
    if (state.outer) state.outer->sum_comm().quiesce();
  } else {
    await_readers(caller);
  }
  state.wait_idle(caller);
  auto broken = state.reduce_comm->broken();
  if (!broken && state.outer) broken = state.outer->sum_comm().broken();
  if (!broken && !context_->on_host()) broken = state.gather_comm->broken();
  if (broken) missing += format_text("{}{}", missing.empty() ? "" : "; ", broken->message);
  meet(intent, value, missing);
  check_meeting(intent, value);
  state.calls.restart();
  realign();
  state.leave_window(caller);
}

// Weights that are kept in place are read by streams of the caller's, of which this is the only word.
void Model::await_readers(device::Stream &caller) {
  Runtime &state = *runtime_;
  state.join_window(caller);
  for (Group &group : state.groups)
    for (GatherSlot &slot : group.slots)
      if (!group.plan->copies) caller.wait(*slot.left);
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

// A new round of reduces: sequence numbers agree again, and nobody starts before all have come. Messages of a step that has
// ended well go on as they are: the GPU may still be at them.
void Model::realign() {
  Runtime &state = *runtime_;
  if (!context_->on_host()) {
    state.reduce_trace->next_round();
    if (state.outer) state.outer->trace_next_round();
    return;
  }
  state.reduce_comm->next_round();
  state.reduce_trace->next_round();
  if (state.outer) state.outer->next_round();
  state.round_gate->arrive(++state.round);
  state.round_entered = false;
}

// All ranks give this step up, and what some of them have enqueued others may not have: where that is so it is given up too,
// so that the streams can be waited for. Only when those of all ranks are idle may their numbers be realigned.
void Model::end_messages(fsdp_stream stream) {
  Runtime &state = *runtime_;
  Meeting &mine = meetings_.back();
  mine.sound = 1;
  state.teams.for_each_data([&](comm::Team &team) { mine.sound = team.agree() && mine.sound; });
  exchange_meetings();
  if (std::any_of(meetings_.begin(), meetings_.begin() + state.teams.all->size(), [](const Meeting &meeting) { return !meeting.sound; })) {
    state.teams.for_each_data([](comm::Team &team) { team.cut(); });
    state.teams.for_each_data([](comm::Team &team) { team.renew(); });
    state.team_news.tell();
  }
  reducer_->await_writers(stream);
  device::Stream &caller = context_->device().caller_stream(stream);
  await_readers(caller);
  state.synchronize(caller);
  exchange_meetings();
  realign_messages();
}

// Nothing is under way any more. The exchange is what must be passed before the next collective.
void Model::realign_messages() {
  Runtime &state = *runtime_;
  state.reduce_comm->next_round();
  state.gather_comm->next_round();
  state.reduce_trace->next_round();
  if (state.outer) state.outer->next_round();
  state.calls.restart();
  exchange_meetings();
}

void Model::exchange_meetings() {
  Runtime &state = *runtime_;
  const WaitSpan span(state, Awaited::peers);
  state.teams.all->exchange_fixed(&meetings_.back(), sizeof(Meeting), meetings_.data(), "the end of a step");
}

void Model::finish_grads(double scale, fsdp_stream stream) {
  constexpr auto call = "fsdp_finish_grads";
  Runtime &state = runtime(call);
  const CallSpan span(state, "finish_grads");
  state.require_weights(call);
  device::Stream &caller = state.caller_stream(stream, call);
  std::string missing = reducer_->list_missing();
  if (const std::string holds = gatherer_->list_holds(); !holds.empty())
    missing += (missing.empty() ? "" : "; ") + holds;
  if (missing.empty()) reducer_->gather_whole();
  end_step(Intent::finish, scale, std::move(missing), caller);
  state.window_open = state.window_has_grads = true;
  optimizer_->scale_grads(scale, caller);
}

void Model::begin_update(fsdp_stream stream) {
  constexpr auto call = "fsdp_begin_update";
  Runtime &state = runtime(call);
  state.require_eager(call);
  const CallSpan span(state, "begin_update");
  state.require_weights(call);
  device::Stream &caller = state.caller_stream(stream, call);
  std::string missing = unfinished();
  end_step(Intent::update, 1.0, std::move(missing), caller);
  state.window_open = true;
  state.window_has_grads = false;
}

void Model::publish(fsdp_stream stream, const char *call) {
  Runtime &state = runtime(call);
  const CallSpan span(state, "publish_weights");
  state.require_window(call);
  device::Stream &caller = state.caller_stream(stream, call);
  meet(Intent::publish, 1.0, {});
  try {
    check_meeting(Intent::publish, 1.0);
  } catch (const Error &error) {
    // The caller may have written main weights here and not there: no version can be trusted any more.
    if (state.version && !capture_) context_->failure().set(error);
    throw;
  }
  state.join_window(caller);
  optimizer_->cast_weights(caller);
  close_window(caller);
}

// The parts of other outer ranks are written by their communicator: it raises the version when they have come.
device::Stream &Model::gather_outer_weights(device::Stream &caller) {
  Runtime &state = *runtime_;
  caller.record(*state.order);
  device::Stream &stream = state.outer->stream();
  if (!state.order->done()) stream.wait(*state.order);
  for (Group &group : state.groups) state.outer->gather_weights(group, state.version);
  return stream;
}

// The compute weights are written: raise the version and let readers in.
void Model::close_window(device::Stream &caller) {
  Runtime &state = *runtime_;
  ++state.version;
  device::Stream &writer = state.outer && state.outer->gathers() ? gather_outer_weights(caller) : caller;
  if (context_->on_host()) state.version_gate->arrive(state.version, writer);
  writer.record(*state.published);
  if (state.timeline) {
    const uint64_t now = trace::now_ns();
    state.timeline->record({"published", nullptr, now, now, 0, static_cast<uint32_t>(state.version), trace::caller_lane,
                            trace::Kind::instant});
  }
  state.version_ready = !context_->on_host() || (state.inner().size() == 1 && !(state.outer && state.outer->gathers()));
  state.window_open = state.window_has_grads = false;
  if (!context_->on_host()) caller.wait(*state.published);
  refresh_whole_weights(caller);
  state.leave_window(caller);
  reducer_->start_step();
  gatherer_->start_step();
}

// Whole weights that peers have parts of: copied ones are pulled now, mapped ones are there when all have published.
void Model::refresh_whole_weights(device::Stream &caller) {
  Runtime &state = *runtime_;
  // Nobody near has parts of them, but other outer ranks may.
  if (!state.communicates()) {
    if (state.outer && state.outer->gathers()) state.await_version();
    return;
  }
  bool copies = false, any = false;
  for (Group &group : state.groups) {
    if (group.plan->gathers || group.plan->home == memory::ComputeHome::local) continue;
    any = true;
    ++state.stats.gathers;
    if (group.refresh_spans.empty()) continue;
    if (!copies) {
      state.gather_stream->wait(*state.published);
      state.gather_trace->await(*state.version_gate, state.version, "the refresh of whole weights", "wait for publish", nullptr,
                                state.version);
    }
    copies = true;
    state.gather_trace->begin("all_gather", group, group.pulled_bytes);
    state.gather(group.refresh_spans, group);
    state.gather_trace->end("all_gather", group, group.pulled_bytes, state.version);
    ++state.stats.all_gathers;
    state.stats.gathered_bytes += group.pulled_bytes;
  }
  if (copies) state.wait_idle(*state.gather_stream, Awaited::gather, caller);
  if (any) state.await_version();
}

// Ranks that came to finish or to update learn from this meeting that the step is discarded, fail, and come again.
void Model::discard(fsdp_stream stream) {
  constexpr auto call = "fsdp_discard_step";
  Runtime &state = runtime(call);
  state.require_eager(call);
  const CallSpan span(state, "discard_step");
  if (state.version == 0)
    fail(FSDP_INVALID_STATE, "{}: nothing was published yet, so there is no step to discard; call fsdp_publish_weights", call);
  state.caller_stream(stream, call);
  state.abandon();
  gatherer_->drop_all(true);
  device::Stream &caller = context_->device().caller_stream(stream);
  state.wait_idle(caller);
  const auto all_discard = [&] {
    return std::all_of(meetings_.begin(), meetings_.begin() + state.teams.all->size(),
                       [](const Meeting &meeting) { return meeting.intent == Intent::discard; });
  };
  do meet(Intent::discard, 1.0, {});
  while (!all_discard());
  check_versions();
  if (context_->on_host()) realign();
  else end_messages(stream);
  state.step_failure.clear();
  state.window_open = state.window_has_grads = false;
  reducer_->start_step();
  gatherer_->start_step();
}

void Model::require_grads(const char *call) {
  Runtime &state = runtime(call);
  state.require_window(call);
  if (!state.window_has_grads)
    fail(FSDP_INVALID_STATE, "{}: there are no gradients in this update window; fsdp_finish_grads opens one that has them", call);
}

device::Stream &Model::require_measurable(fsdp_stream stream, const char *call) {
  runtime(call).require_eager(call);
  require_grads(call);
  return runtime_->caller_stream(stream, call);
}

void Model::require_adamw(const char *call) const {
  if (optimizer_kind_ != FSDP_OPTIMIZER_ADAMW)
    fail(FSDP_INVALID_STATE, "{}: the model was created with FSDP_OPTIMIZER_CALLER and has no AdamW states", call);
}

void Model::step_adamw(double lr, const fsdp_adamw_options &options, fsdp_stream stream, const char *call) {
  const CallSpan span(runtime(call), "step_adamw");
  require_grads(call);
  require_adamw(call);
  device::Stream &caller = runtime_->caller_stream(stream, call);
  // Before a weight is touched: if a rank discards this step instead, all of them still can.
  meet(Intent::step, lr, {});
  check_meeting(Intent::step, lr);
  if (capture_) {
    capture_->add_step(options);
    optimizer_->step_adamw_captured(caller);
  } else {
    optimizer_->step_adamw(lr, options, caller);
  }
  close_window(caller);
}

double Model::apply_grads(const fsdp_grad *grads, uint64_t count, double lr, double max_norm,
                          const fsdp_adamw_options &options, fsdp_stream stream, bool want_norm) {
  constexpr auto call = "fsdp_apply_grads";
  Runtime &state = runtime(call);
  const CallSpan span(state, "apply_grads");
  if (max_norm > 0 || want_norm) state.require_eager(call);
  state.require_weights(call);
  require_adamw(call);
  state.caller_stream(stream, call);
  check_grads(grads, count, call);
  // In backward order, as a backward pass would give them: what the gradient pool was planned for.
  uint64_t end = count;
  for (size_t g = state.groups.size(); g-- > 0;) {
    Group &group = state.groups[g];
    uint64_t own = 0;
    for (const auto &param : group.spec->params) own += !param.frozen();
    uint64_t next = end - own;
    end = next;
    for (uint32_t i = 0; i < group.spec->params.size(); ++i) {
      if (group.spec->params[i].frozen()) continue;
      const fsdp_grad &grad = grads[next++];
      reducer_->put(group, i, grad.data, grad.dtype, grad.element_count, stream);
    }
    reducer_->reduce(group, FSDP_LAST, stream);
  }
  finish_grads(1.0, stream);
  device::Stream &caller = state.caller_stream(stream, call);
  double norm = 0;
  if (max_norm > 0)
    norm = optimizer_->clip_grads(max_norm, caller);
  else if (want_norm)
    norm = optimizer_->grad_norm(caller);
  step_adamw(lr, options, stream, call);
  return norm;
}

// All of them before the first is put: a bad call leaves the step as it was.
void Model::check_grads(const fsdp_grad *grads, uint64_t count, const char *call) const {
  uint64_t expected = 0;
  for (const auto &group : spec_.groups)
    for (const auto &param : group.params) {
      if (param.frozen()) continue;
      const uint64_t index = expected++;
      if (index >= count) continue;
      if (grads[index].reserved)
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}].reserved is {:#x}, it must be 0", call, index, grads[index].reserved);
      if (!grads[index].data) continue;
      if (grads[index].element_count != param.element_count)
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}] is parameter '{}' with {} elements, element_count is {}", call, index,
             param.name, param.element_count, grads[index].element_count);
      if (!dtype_size(grads[index].dtype))
        fail(FSDP_INVALID_ARGUMENT, "{}: grads[{}].dtype: {} is not a dtype", call, index, grads[index].dtype);
    }
  if (count != expected)
    fail(FSDP_INVALID_ARGUMENT, "{}: grad_count is {}, the model has {} trainable parameters", call, count, expected);
}

}  // namespace fsdp::engine
