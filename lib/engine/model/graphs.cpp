// SPDX-License-Identifier: Apache-2.0
#include "engine/model/graphs.h"

#include <utility>

namespace fsdp::engine {

// A graph cannot skip parameters: ranks agree on the host which ones a step skips, but a graph has the same kernels for
// all steps.
void Graphs::require_no_skips(const char *call) const {
  for (const memory::GroupSpec &group : runtime_.spec.groups)
    for (const memory::ParamSpec &param : group.params)
      if (param.skips_missing())
        fail(FSDP_UNSUPPORTED,
             "{}: parameter '{}' of group '{}' has FSDP_MISSING_GRAD_SKIP, and a graph cannot leave it out in one step "
             "and not in another; declare it with FSDP_MISSING_GRAD_ZEROS to capture",
             call, param.name, group.name);
}

void Graphs::begin_capture(fsdp_stream stream) {
  constexpr auto call = "fsdp_begin_capture";
  require_no_replay(call);
  require_no_skips(call);
  if (!runtime_.has_graphs) fail(FSDP_UNSUPPORTED, "{}: the host device has no graphs", call);
  if (runtime_.spec.schedule == FSDP_SCHEDULE_ANY)
    fail(FSDP_UNSUPPORTED,
         "{}: the model has FSDP_SCHEDULE_ANY, whose weights have other addresses at each hold, which a graph cannot "
         "follow; give fsdp_set_schedule another kind",
         call);
  if (runtime_.storage->home_file())
    fail(FSDP_UNSUPPORTED,
         "{}: the model has planes at home in a file (FSDP_HOME_FILE), and a graph cannot read files; give state_home "
         "and "
         "main_home FSDP_HOME_HOST or FSDP_HOME_DEVICE",
         call);
  if (capture_) fail(FSDP_INVALID_STATE, "{}: the model is being captured already; call fsdp_end_capture first", call);
  const auto failed = capture_error([&] {
    runtime_.context.require_no_other_capture(&runtime_, call);
    runtime_.step.require_unfailed(call);
    runtime_.step.require_returned(call);
    capture_ = std::make_shared<Capture>(runtime_, gatherer_, reducer_, optimizer_, meetings_.captures() + 1, stream);
  });
  failed_begin_ = failed ? describe_failure(call, *failed) : std::string();
  failed_at_ = meetings_.count();
  if (failed) throw *failed;
}

// Other ranks may have begun the capture and now wait. This meeting tells them why their graph cannot be used.
void Graphs::end_failed_begin() {
  meetings_.meet(
      {.intent = Intent::capture, .value = 0, .missing = failed_begin_, .capture = meetings_.captures() + 1});
  meetings_.check(Intent::capture);
}

// The state is restored in every case, so a failed capture leaves the model as it was. The library's streams leave the
// capture, too, so that CUDA's capture can end.
std::shared_ptr<Capture> Graphs::end_capture(fsdp_stream stream) {
  constexpr auto call = "fsdp_end_capture";
  require_no_replay(call);
  if (!capture_ && !failed_begin_.empty() && failed_at_ == meetings_.count()) end_failed_begin();  // throws
  if (!capture_) fail(FSDP_INVALID_STATE, "{}: the model is not being captured; call fsdp_begin_capture first", call);
  const auto failed = capture_error([&] {
    const auto apart = capture_error([&] { capture_->join(stream); });
    const std::string &spoilt = capture_->failure();
    meetings_.meet({.intent = Intent::capture,
                    .value = 0,
                    .missing = spoilt.empty() && apart ? apart->message : spoilt,
                    .capture = number()});
    meetings_.check(Intent::capture);
  });
  const std::shared_ptr<Capture> capture = std::move(capture_);
  capture->end();
  if (failed) throw *failed;
  return capture;
}

void Graphs::refuse_prepared(const char *call) {
  if (prepared_.capture.expired()) return give_up_replay();
  fail(FSDP_INVALID_STATE,
       "{}: a replay of capture {} was prepared; launch the graph and call fsdp_commit_replay, or "
       "fsdp_cancel_replay, first",
       call, prepared_.number);
}

// Why this rank cannot replay the capture now; empty if it can.
std::string Graphs::find_obstacle(const Capture &capture, fsdp_stream stream) {
  if (capture_) return "the model is being captured; call fsdp_end_capture first";
  if (runtime_.step.failed())
    return "this step has failed and must be discarded with fsdp_discard_step: " + runtime_.step.failure();
  if (runtime_.step.collected()) return "matrices are collected; call fsdp_return_matrices first";
  const auto refused = capture_error([&] {
    runtime_.caller_stream(stream, "the stream of the launch");
    for (const Group &group : runtime_.groups) reducer_.check_writers(group, "the stream of the launch");
  });
  return refused ? refused->message : capture.find_difference();
}

// The ranks meet before any graph is launched. If they would replay different graphs, or one of them cannot replay, all
// ranks throw an error.
void Graphs::prepare_replay(const std::shared_ptr<Capture> &capture, double lr, fsdp_stream stream) {
  require_no_replay("fsdp_prepare_replay");
  runtime_.replays.await_room();
  if (capture->opens_window()) checkpoints_.await_copied();
  reducer_.forget_hidden();
  const double value = capture->has_step() ? lr : 0;
  const StepNumbers numbers = capture->has_step() ? optimizer_.numbers(capture->adamw()) : StepNumbers();
  meetings_.meet({.intent = Intent::replay,
                  .value = value,
                  .missing = find_obstacle(*capture, stream),
                  .numbers = numbers,
                  .capture = capture_ ? number() : capture->number()});
  meetings_.check(Intent::replay);
  runtime_.record_call({CallKind::replay, capture->number()});
  prepared_ = {capture->number(), capture, stream};
  const auto failed = capture_error([&] { capture->enter(lr, stream); });
  if (!failed) return;
  give_up_replay();
  throw *failed;
}

void Graphs::require_prepared(const Capture &capture, fsdp_stream stream, const char *call) const {
  if (prepared_.number != capture.number())
    fail(FSDP_INVALID_STATE,
         "{}: no replay of this capture was prepared; call fsdp_prepare_replay before the graph is launched", call);
  if (prepared_.stream != stream)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: the stream is {}, and fsdp_prepare_replay was given {}; the graph belongs on that one", call,
         static_cast<const void *>(stream), static_cast<const void *>(prepared_.stream));
}

void Graphs::commit_replay(Capture &capture, fsdp_stream stream) {
  require_prepared(capture, stream, "fsdp_commit_replay");
  prepared_ = {};
  const auto failed = capture_error([&] { capture.leave(runtime_.context.device().caller_stream(stream)); });
  if (!failed) return;
  runtime_.context.fail_for_good(*failed, false);  // the graph runs, but no later work is ordered after it
  throw *failed;
}

void Graphs::cancel_replay(Capture &capture, fsdp_stream stream) {
  require_prepared(capture, stream, "fsdp_cancel_replay");
  give_up_replay();
}

// Gives the prepared replay up. If peers do not, their calls differ from here on, and the next meeting reports the
// difference.
void Graphs::give_up_replay() {
  runtime_.record_call({CallKind::cancel, prepared_.number});
  prepared_ = {};
}

// The prepared graph may have been launched. Orders the library's streams after the graph, and then waits for these
// streams.
void Graphs::await_prepared() noexcept {
  if (prepared_.number == 0 || prepared_.capture.expired()) return;
  const auto join = [this] {
    device::Stream &caller = runtime_.context.device().caller_stream(prepared_.stream);
    caller.record(*runtime_.marks.order);
    for (device::Stream *library : runtime_.library_streams()) library->wait(*runtime_.marks.order);
  };
  const auto failed = capture_error([&] {
    if (!runtime_.context.run_alone(join)) fail(FSDP_BUSY, "another thread is inside the context");
  });
  if (failed)
    runtime_.context.log(
        FSDP_LOG_WARNING,
        format_text("a model of rank {} was destroyed before fsdp_commit_replay, and a graph that was launched "
                    "may still use its memory: {}",
                    runtime_.context.rank(), failed->message));
}

void Graphs::note_failure(const char *call, Error &error) noexcept {
  try {
    if (capture_) capture_->spoil(call, error);
    if (error.status != FSDP_TIMEOUT) return;
    const std::string replay = runtime_.replays.describe_oldest();
    if (!replay.empty() && error.message.find("the replay of") == std::string::npos) error.message += "; " + replay;
  } catch (...) {  // out of memory: the error is reported without this text
  }
}

std::string Graphs::describe_open() const {
  if (capture_) return "it is being captured; end that with fsdp_end_capture";
  if (prepared_.number && !prepared_.capture.expired())
    return format_text("a replay of capture {} was prepared; end that with fsdp_commit_replay or fsdp_cancel_replay",
                       prepared_.number);
  return {};
}

}  // namespace fsdp::engine
