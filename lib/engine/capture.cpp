// SPDX-License-Identifier: Apache-2.0
#include "engine/capture.h"

namespace fsdp::engine {

Capture::Capture(Model &model, Runtime &runtime, uint32_t number, fsdp_stream stream)
    : model_(model), runtime_(runtime), number_(number) {
  device::Device &device = runtime.context.device();
  device::Stream &caller = device.caller_stream(stream);
  const uint64_t id = caller.capture_id();
  if (id == 0)
    fail(FSDP_INVALID_STATE, "fsdp_capture_begin: the stream is not being captured; call cudaStreamBeginCapture on it first");
  await_library();
  before_ = read();
  calls_ = runtime.calls;
  step_failure_ = runtime.step_failure;
  device.begin_capture(id);
  runtime.capturing = true;
  fork(caller);
}

// The library's streams join the capture at once: what they are given first may wait for nothing that is in it.
void Capture::fork(device::Stream &caller) {
  try {
    caller.record(*runtime_.order);
    for (device::Stream *library : runtime_.library_streams()) library->wait(*runtime_.order);
  } catch (...) {
    end();
    throw;
  }
}

Capture::~Capture() {
  if (under_way_) end();
}

State Capture::read() const { return read_state(runtime_, model_.gatherer(), model_.reducer()); }
void Capture::write(const State &state) { write_state(state, runtime_, model_.gatherer(), model_.reducer()); }

// The graph's work cannot refer to what was recorded before it. This is no part of a step, so the host may wait.
void Capture::await_library() {
  device::Device &device = runtime_.context.device();
  for (device::Stream *stream : runtime_.library_streams()) {
    stream->record(*runtime_.finished);
    device.synchronize(*runtime_.finished);
  }
  for (const device::Event *event : runtime_.events())
    if (!event->done()) device.synchronize(*event);
}

void Capture::join(fsdp_stream stream) {
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  const uint64_t id = caller.capture_id();
  if (id == 0)
    fail(FSDP_INVALID_STATE, "fsdp_capture_end: the stream is not being captured (any more): its capture has ended or failed");
  for (device::Stream *library : runtime_.library_streams()) {
    if (library->capture_id() != id) continue;
    library->record(*runtime_.order);
    caller.wait(*runtime_.order);
  }
}

void Capture::end() {
  under_way_ = false;
  after_ = read();
  write(before_);
  runtime_.calls = calls_;
  runtime_.step_failure = step_failure_;
  runtime_.capturing = false;
  runtime_.context.device().end_capture();
}

void Capture::add_step(const fsdp_adamw_options &options) {
  if (has_step_)
    fail(FSDP_UNSUPPORTED, "fsdp_step_adamw: this capture has a step already, and a replay has the lr of one");
  if (options.step)
    fail(FSDP_INVALID_ARGUMENT, "fsdp_step_adamw: fsdp_adamw_options.step is {}; in a capture it must be 0, since every replay "
                                "is another step",
         options.step);
  has_step_ = true;
  adamw_ = options;
}

void Capture::check_state() const {
  if (const std::string difference = find_difference(before_, read(), runtime_); !difference.empty())
    fail(FSDP_INVALID_STATE, "fsdp_prepare_replay: the model is not in the state in which capture {} began: {}", number_,
         difference);
}

void Capture::enter(double lr, device::Stream &caller) {
  for (device::Stream *library : runtime_.library_streams()) {
    library->record(*runtime_.order);
    caller.wait(*runtime_.order);
  }
  for (const device::Event *event : runtime_.events())
    if (!event->done()) caller.wait(*event);
  if (has_step_) model_.optimizer().store_steps(lr, adamw_, caller);
}

// Whatever waits for the work of an earlier call waits for the graph: that call's own records were points of the graph.
void Capture::leave(device::Stream &caller) {
  for (device::Event *event : runtime_.events()) caller.record(*event);
  caller.record(*runtime_.order);
  for (device::Stream *library : runtime_.library_streams()) library->wait(*runtime_.order);
  write(advance(read(), before_, after_));
  if (after_.version != before_.version) runtime_.calls.restart();
}

void Model::begin_capture(fsdp_stream stream) {
  constexpr auto call = "fsdp_capture_begin";
  Runtime &state = runtime(call);
  if (context_->on_host()) fail(FSDP_UNSUPPORTED, "{}: the host device has no graphs", call);
  if (capture_) fail(FSDP_INVALID_STATE, "{}: the model is being captured already; call fsdp_capture_end first", call);
  state.require_step(call);
  capture_ = std::make_shared<Capture>(*this, state, capture_count_ + 1, stream);
  ++capture_count_;
}

// The state is put back first: a capture that failed leaves the model as it was.
std::shared_ptr<Capture> Model::end_capture(fsdp_stream stream) {
  constexpr auto call = "fsdp_capture_end";
  runtime(call);
  if (!capture_) fail(FSDP_INVALID_STATE, "{}: the model is not being captured; call fsdp_capture_begin first", call);
  const std::shared_ptr<Capture> capture = std::move(capture_);
  const auto failed = catch_error([&] {
    capture->join(stream);
    meet(Intent::capture, capture->number(), {});
    check_meeting(Intent::capture, capture->number());
  });
  capture->end();
  if (failed) throw *failed;
  return capture;
}

// Ranks that would replay different graphs find out before any of them is launched.
void Model::prepare_replay(Capture &capture, double lr, fsdp_stream stream) {
  constexpr auto call = "fsdp_prepare_replay";
  Runtime &state = runtime(call);
  if (capture_) fail(FSDP_INVALID_STATE, "{}: the model is being captured; call fsdp_capture_end first", call);
  state.require_step(call);
  device::Stream &caller = context_->device().caller_stream(stream);
  capture.check_state();
  state.calls.add(CallSequence::Kind::replay, capture.number());
  const double value = capture.has_step() ? lr : 0;
  meet(Intent::replay, value, {});
  check_meeting(Intent::replay, value);
  capture.enter(lr, caller);
  prepared_ = capture.number();
}

void Model::commit_replay(Capture &capture, fsdp_stream stream) {
  constexpr auto call = "fsdp_commit_replay";
  if (prepared_ != capture.number())
    fail(FSDP_INVALID_STATE, "{}: no replay of this capture was prepared; call fsdp_prepare_replay before the graph is launched",
         call);
  device::Stream &caller = context_->device().caller_stream(stream);
  prepared_ = 0;
  capture.leave(caller);
}

}  // namespace fsdp::engine
