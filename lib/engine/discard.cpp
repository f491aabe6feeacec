// SPDX-License-Identifier: Apache-2.0
// The end of a step that all ranks give up, and the new round of collectives that begins where any step has ended.
#include "engine/update.h"

namespace fsdp::engine {

// Ranks that came to finish or to update learn from this meeting that the step is discarded, fail, and come again.
void UpdateWindow::discard(fsdp_stream stream) {
  constexpr auto call = "fsdp_discard_step";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "discard_step");
  if (runtime_.step.version() == 0)
    fail(FSDP_INVALID_STATE, "{}: nothing was published yet, so there is no step to discard; call fsdp_publish_weights",
         call);
  runtime_.caller_stream(stream, call);
  runtime_.storage->restore_all();  // copied weights are gathered again, too
  await_ended_steps();
  runtime_.abandon();
  gatherer_.drop_all(true);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  runtime_.wait_idle(caller);
  do meetings_.meet({.intent = Intent::discard, .capture = graphs_.number()});
  while (!meetings_.all_came_for(Intent::discard));
  meetings_.check_versions();
  if (runtime_.collectives().rounds_end_with_steps)
    realign();
  else
    end_messages(stream);
  runtime_.step.discard();
  gatherer_.show_whole(true);
  reducer_.start_step();
  gatherer_.start_step();
  runtime_.context.log(FSDP_LOG_DEBUG, format_text("model {}: the step after version {} was discarded",
                                                   runtime_.teams.number, runtime_.step.version()));
}

// What all ranks have enqueued in steps that ended well, and for a norm, may still be under way, and the weights depend
// on it, or who reads the norm. It comes to its end by itself; only what came after it is given up.
void UpdateWindow::await_ended_steps() {
  if (runtime_.collectives().rounds_end_with_steps) return;
  const WaitSpan span(runtime_, WaitKind::reduce);
  runtime_.context.device().synchronize(*runtime_.marks.window_work);
  runtime_.context.device().synchronize(*runtime_.marks.norm);
}

// A new round of reduces: sequence numbers agree again. Messages of a step that has ended well go on as they are where
// streams may still be at them.
void UpdateWindow::realign() {
  if (!runtime_.collectives().rounds_end_with_steps) {
    runtime_.reduces.trace->next_round();
    if (runtime_.outer) runtime_.outer->trace_next_round();
    return;
  }
  runtime_.reduces.comm->next_round();
  runtime_.reduces.trace->next_round();
  if (runtime_.outer) runtime_.outer->next_round();
}

// All ranks give this step up, and what some of them have enqueued others may not have: where that is so it is given up
// too, so that the streams can be waited for. Only when those of all ranks are idle may their numbers be realigned.
void UpdateWindow::end_messages(fsdp_stream stream) {
  bool sound = true;
  runtime_.teams.for_each_data([&](transport::Team &team) { sound = team.ends_alike() && sound; });
  meetings_.say_sound(sound);
  meetings_.meet_again();
  if (!meetings_.all_sound()) {
    runtime_.teams.for_each_data([](transport::Team &team) { team.cut(); });
    runtime_.teams.for_each_data([](transport::Team &team) { team.renew(); });
    runtime_.team_news.tell();
  }
  reducer_.await_writers(stream);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  await_readers(caller);
  runtime_.synchronize(caller);
  meetings_.meet_again();
  realign_messages();
}

// Nothing is under way any more. The exchange is what must be passed before the next collective.
void UpdateWindow::realign_messages() {
  runtime_.reduces.comm->next_round();
  runtime_.gathers.comm->next_round();
  runtime_.reduces.trace->next_round();
  if (runtime_.outer) runtime_.outer->next_round();
  runtime_.calls.restart();
  meetings_.meet_again();
}

}  // namespace fsdp::engine
