// SPDX-License-Identifier: Apache-2.0
// The end of a step that all ranks give up, and the new round of collectives that begins where any step has ended.
#include <algorithm>

#include "engine/meeting.h"
#include "engine/model.h"

namespace fsdp::engine {

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

}  // namespace fsdp::engine
