// SPDX-License-Identifier: Apache-2.0
#include "engine/capture.h"

namespace fsdp::engine {
namespace {

std::string describe_failure(const char *call, const Error &error) {
  return format_text("{} failed with {}: {}", call, fsdp_get_status_name(error.status), error.message);
}

}  // namespace

Capture::Capture(Model &model, Runtime &runtime, uint32_t number, fsdp_stream stream)
    : model_(model),
      runtime_(runtime),
      number_(number),
      name_(runtime.context.flight().keep(format_text("capture {}", number))) {
  device::Device &device = runtime.context.device();
  device::Stream &caller = device.caller_stream(stream);
  const uint64_t id = caller.capture_id();
  if (id == 0)
    fail(FSDP_INVALID_STATE,
         "fsdp_capture_begin: the stream is not being captured; call cudaStreamBeginCapture on it first");
  await_library();
  before_ = read();
  calls_ = runtime.calls;
  step_failure_ = runtime.step_failure;
  device.begin_capture(id);
  runtime.capture_id = id;
  runtime.context.set_captured(&runtime);
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
  if (!runtime_.order->done()) device.synchronize(*runtime_.order);  // between streams of the caller's
}

void Capture::join(fsdp_stream stream) {
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  const uint64_t id = caller.capture_id();
  if (id == 0) fail(FSDP_INVALID_STATE, "the stream is not being captured (any more): its capture has ended or failed");
  if (id != runtime_.capture_id)
    fail(FSDP_INVALID_STATE, "the stream is not in the capture that fsdp_capture_begin was given");
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
  runtime_.capture_id = 0;
  runtime_.context.set_captured(nullptr);
  runtime_.context.device().end_capture();
}

void Capture::spoil(const char *call, const Error &error) {
  if (failure_.empty()) failure_ = describe_failure(call, error);
}

void Capture::add_step(const fsdp_adamw_options &options) {
  if (has_step_)
    fail(FSDP_UNSUPPORTED, "fsdp_step_adamw: this capture has a step already, and a replay has the lr of one");
  if (options.step)
    fail(FSDP_INVALID_ARGUMENT,
         "fsdp_step_adamw: fsdp_adamw_options.step is {}; in a capture it must be 0, since every replay "
         "is another step",
         options.step);
  has_step_ = true;
  adamw_ = options;
}

std::string Capture::find_difference() const {
  const std::string difference = engine::find_difference(before_, read(), runtime_);
  if (difference.empty()) return {};
  return format_text("the model is not in the state in which capture {} began: {}", number_, difference);
}

void Capture::enter(double lr, fsdp_stream stream) {
  model_.reducer().await_writers(stream);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  runtime_.replays.join(caller);
  for (device::Stream *library : runtime_.library_streams()) {
    library->record(*runtime_.order);
    caller.wait(*runtime_.order);
  }
  for (const device::Event *event : runtime_.events())
    if (!event->done()) caller.wait(*event);
  if (has_step_) model_.optimizer().store_steps(lr, adamw_, caller);
  runtime_.replays.prepare(number_, name_, caller);
}

// Whatever follows comes after the graph: on the library's streams from here on, on the caller's from the call on that
// they are given to (Runtime::caller_stream). So neither what the captured calls recorded nor who wrote what is still
// lent is of any meaning, and one record is enough: CUDA makes the host wait once about 1000 commands are pending.
void Capture::leave(device::Stream &caller) {
  runtime_.replays.commit(caller);
  for (device::Stream *library : runtime_.library_streams()) runtime_.replays.join_last(*library);
  State state = advance(read(), before_, after_);
  for (GradState &grad : state.grads) grad.streams.clear();
  write(state);
  if (after_.version != before_.version) runtime_.calls.restart();
}

void Model::begin_capture(fsdp_stream stream) {
  constexpr auto call = "fsdp_capture_begin";
  Runtime &state = runtime(call);
  if (context_->on_host()) fail(FSDP_UNSUPPORTED, "{}: the host device has no graphs", call);
  if (capture_) fail(FSDP_INVALID_STATE, "{}: the model is being captured already; call fsdp_capture_end first", call);
  const auto failed = catch_error([&] {
    context_->require_no_other_capture(&state, call);
    state.require_step(call);
    capture_ = std::make_shared<Capture>(*this, state, capture_count_ + 1, stream);
  });
  failed_begin_ = failed ? describe_failure(call, *failed) : std::string();
  if (failed) throw *failed;
}

// The others have begun, perhaps, and wait: they are told why their graph is of no use.
void Model::end_failed_begin() {
  const std::string failed = failed_begin_;
  meet(Intent::capture, 0, failed, capture_count_ + 1);
  check_meeting(Intent::capture, 0);
}

// The state is put back whatever happens: a capture that failed leaves the model as it was. The library's streams leave
// it too, so that CUDA's capture can end.
std::shared_ptr<Capture> Model::end_capture(fsdp_stream stream) {
  constexpr auto call = "fsdp_capture_end";
  runtime(call);
  if (!capture_ && !failed_begin_.empty()) end_failed_begin();  // throws
  if (!capture_) fail(FSDP_INVALID_STATE, "{}: the model is not being captured; call fsdp_capture_begin first", call);
  const auto failed = catch_error([&] {
    const auto apart = catch_error([&] { capture_->join(stream); });
    const std::string &spoilt = capture_->failure();
    meet(Intent::capture, 0, spoilt.empty() && apart ? apart->message : spoilt);
    check_meeting(Intent::capture, 0);
  });
  const std::shared_ptr<Capture> capture = std::move(capture_);
  capture->end();
  if (failed) throw *failed;
  return capture;
}

}  // namespace fsdp::engine
