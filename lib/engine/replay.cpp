// SPDX-License-Identifier: Apache-2.0
#include "engine/replay.h"

#include "engine/capture.h"

namespace fsdp::engine {

void Replays::make_room() {
  const std::lock_guard lock(mutex_);
  for (Replay &replay : replays_) {
    replay.begun = context_.device().create_event();
    replay.ended = context_.device().create_event();
  }
}

void Replays::await_room() {
  const auto full = [this] {
    const std::lock_guard lock(mutex_);
    complete();
    return next_ - oldest_ == most;
  };
  if (!full()) return;
  context_.device().synchronize(*at(next_).ended);  // of the oldest
  settle();
}

void Replays::join(device::Stream &caller) const { caller.wait(*at(next_).begun); }

void Replays::join_last(device::Stream &stream) const {
  if (next_) stream.wait(*at(next_ - 1).ended);
}

void Replays::prepare(uint32_t capture, const char *name, device::Stream &caller) {
  Replay &replay = at(next_);
  replay.capture = capture;
  replay.name = name;
  caller.record(*replay.begun);
}

void Replays::commit(device::Stream &caller) {
  const std::lock_guard lock(mutex_);
  Replay &replay = at(next_);
  caller.record(*replay.ended);
  replay.handle = flights_->enqueue("replay", replay.name, 0);
  flights_->flight().start(replay.handle);
  ++next_;
}

// Nothing once the context has failed: then streams go on without having done their work.
void Replays::complete() noexcept {
  if (context_.failure().failed()) return;
  for (; oldest_ < next_ && at(oldest_).ended->done(); ++oldest_) flights_->flight().complete(at(oldest_).handle);
}

void Replays::settle() noexcept {
  const std::lock_guard lock(mutex_);
  complete();
}

// Is the GPU at one? What it waits for before that, the caller's own work, does not count: slow is not stuck.
bool Replays::at_oldest() noexcept {
  complete();
  if (oldest_ == next_ || !at(oldest_).begun->done()) return false;
  if (seen_ == oldest_) return true;
  seen_ = oldest_;
  since_ = Clock::now();
  return true;
}

void Replays::check() {
  std::unique_lock lock(mutex_);
  if (!at_oldest() || Clock::now() - since_ < std::chrono::milliseconds(context_.timeout_ms())) return;
  const Error error(
      FSDP_TIMEOUT,
      format_text("the replay of {} has been on the GPU of rank {} for {} ms and has not ended: a peer may not have "
                  "launched its graph",
                  at(oldest_).name, context_.rank(), context_.timeout_ms()));
  lock.unlock();
  context_.fail_for_good(error, false);
  throw error;
}

std::string Replays::describe_oldest() {
  const std::lock_guard lock(mutex_);
  if (!at_oldest()) return {};
  return format_text("the replay of {} has not ended on the GPU of rank {}", at(oldest_).name, context_.rank());
}

void Model::require_no_replay(const char *call) {
  if (prepared_.capture.expired()) return give_up_replay();
  fail(FSDP_INVALID_STATE,
       "{}: a replay of capture {} was prepared; launch the graph and call fsdp_commit_replay, or "
       "fsdp_cancel_replay, first",
       call, prepared_.number);
}

// Why this rank cannot replay the capture now; empty if it can.
std::string Model::find_obstacle(const Capture &capture, fsdp_stream stream) {
  Runtime &state = *runtime_;
  if (capture_) return "the model is being captured; call fsdp_capture_end first";
  if (!state.step_failure.empty())
    return "this step has failed and must be discarded with fsdp_discard_step: " + state.step_failure;
  const auto refused = catch_error([&] {
    state.caller_stream(stream, "the stream of the launch");
    for (const Group &group : state.groups) reducer_->check_writers(group, "the stream of the launch");
  });
  return refused ? refused->message : capture.find_difference();
}

// Ranks that would replay different graphs, or one that cannot, find out before any of them is launched.
void Model::prepare_replay(const std::shared_ptr<Capture> &capture, double lr, fsdp_stream stream) {
  Runtime &state = runtime("fsdp_prepare_replay");
  state.replays.await_room();
  const double value = capture->has_step() ? lr : 0;
  meet(Intent::replay, value, find_obstacle(*capture, stream), capture->number());
  check_meeting(Intent::replay, value);
  state.calls.add(CallSequence::Kind::replay, capture->number());
  prepared_ = {capture->number(), capture, stream};
  const auto failed = catch_error([&] { capture->enter(lr, stream); });
  if (!failed) return;
  give_up_replay();
  throw *failed;
}

void Model::require_prepared(const Capture &capture, fsdp_stream stream, const char *call) const {
  if (prepared_.number != capture.number())
    fail(FSDP_INVALID_STATE,
         "{}: no replay of this capture was prepared; call fsdp_prepare_replay before the graph is launched", call);
  if (prepared_.stream != stream)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: the stream is {}, and fsdp_prepare_replay was given {}; the graph belongs on that one", call,
         static_cast<const void *>(stream), static_cast<const void *>(prepared_.stream));
}

void Model::commit_replay(Capture &capture, fsdp_stream stream) {
  require_prepared(capture, stream, "fsdp_commit_replay");
  prepared_ = {};
  const auto failed = catch_error([&] { capture.leave(context_->device().caller_stream(stream)); });
  if (!failed) return;
  context_->fail_for_good(*failed, false);  // the graph is under way, and nothing is ordered behind it
  throw *failed;
}

void Model::cancel_replay(Capture &capture, fsdp_stream stream) {
  require_prepared(capture, stream, "fsdp_cancel_replay");
  give_up_replay();
}

// Peers that do not give it up differ from here on: the next meeting tells.
void Model::give_up_replay() {
  runtime_->calls.add(CallSequence::Kind::cancel, prepared_.number);
  prepared_ = {};
}

// Its graph may have been launched: the library's streams, whose end is waited for, come after it.
void Model::await_prepared() noexcept {
  if (prepared_.number == 0 || prepared_.capture.expired()) return;
  const auto join = [this] {
    device::Stream &caller = context_->device().caller_stream(prepared_.stream);
    caller.record(*runtime_->order);
    for (device::Stream *library : runtime_->library_streams()) library->wait(*runtime_->order);
  };
  const auto failed = catch_error([&] {
    if (!context_->run_alone(join)) fail(FSDP_BUSY, "another thread is inside the context");
  });
  if (failed)
    context_->log(
        FSDP_LOG_WARNING,
        format_text("a model of rank {} was destroyed before fsdp_commit_replay, and a graph that was launched "
                    "may still use its memory: {}",
                    context_->rank(), failed->message));
}

void Model::note_failure(const char *call, Error &error) noexcept {
  try {
    if (capture_) capture_->spoil(call, error);
    if (error.status != FSDP_TIMEOUT || !runtime_ || context_->on_host()) return;
    const std::string replay = runtime_->replays.describe_oldest();
    if (!replay.empty() && error.message.find("the replay of") == std::string::npos) error.message += "; " + replay;
  } catch (...) {  // out of memory: the error itself stays as it is
  }
}

std::string Model::open_graph() const {
  if (capture_) return "it is being captured; end that with fsdp_capture_end";
  if (prepared_.number && !prepared_.capture.expired())
    return format_text("a replay of capture {} was prepared; end that with fsdp_commit_replay or fsdp_cancel_replay",
                       prepared_.number);
  return {};
}

}  // namespace fsdp::engine
