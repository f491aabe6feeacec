// SPDX-License-Identifier: Apache-2.0
#include "engine/model/capture.h"

namespace fsdp::engine {
std::string describe_failure(const char *call, const Error &error) {
  return format_text("{} failed with {}: {}", call, fsdp_get_status_name(error.status), error.message);
}

Capture::Capture(Runtime &runtime, Gatherer &gatherer, Reducer &reducer, Optimizer &optimizer, uint32_t number,
                 fsdp_stream stream)
    : runtime_(runtime),
      gatherer_(gatherer),
      reducer_(reducer),
      optimizer_(optimizer),
      number_(number),
      name_(runtime.context.flight().keep(format_text("capture {}", number))),
      trained_(runtime.step.trained()) {
  device::Device &device = runtime.context.device();
  device::Stream &caller = device.caller_stream(stream);
  const uint64_t id = caller.capture_id();
  if (id == 0)
    fail(FSDP_INVALID_STATE,
         "fsdp_begin_capture: the stream is not being captured; call cudaStreamBeginCapture on it first");
  await_library();
  before_ = read();
  calls_ = runtime.calls;
  step_failure_ = runtime.step.failure();
  norm_ = optimizer.known_norm();
  device.begin_capture(id);
  runtime.capture_id = id;
  runtime.context.set_captured(&runtime);
  fork(caller);
}

// The library's streams join the capture at once, because their first work may wait for nothing in the capture.
void Capture::fork(device::Stream &caller) {
  try {
    caller.record(*runtime_.marks.order);
    for (device::Stream *library : runtime_.library_streams()) library->wait(*runtime_.marks.order);
  } catch (...) {
    end();
    throw;
  }
}

Capture::~Capture() {
  if (under_way_) end();
}

Moment Capture::read() const { return read_state(runtime_, gatherer_, reducer_); }
void Capture::write(const Moment &state) { write_state(state, runtime_, gatherer_, reducer_); }

// Waits for the library's streams, because work of the graph cannot wait for events that were recorded before it. A
// capture is not part of a step, so the host may wait.
void Capture::await_library() {
  device::Device &device = runtime_.context.device();
  for (device::Stream *stream : runtime_.library_streams()) {
    stream->record(*runtime_.marks.finished);
    device.synchronize(*runtime_.marks.finished);
  }
  for (const device::Event *event : runtime_.events())
    if (!event->done()) device.synchronize(*event);
  if (!runtime_.marks.order->done()) device.synchronize(*runtime_.marks.order);  // it orders the caller's own streams
}

void Capture::join(fsdp_stream stream) {
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  const uint64_t id = caller.capture_id();
  if (id == 0) fail(FSDP_INVALID_STATE, "the stream is not being captured (any more): its capture has ended or failed");
  if (id != runtime_.capture_id)
    fail(FSDP_INVALID_STATE, "the stream is not in the capture that fsdp_begin_capture was given");
  for (device::Stream *library : runtime_.library_streams()) {
    if (library->capture_id() != id) continue;
    library->record(*runtime_.marks.order);
    caller.wait(*runtime_.marks.order);
  }
}

void Capture::end() {
  under_way_ = false;
  after_ = read();
  write(before_);
  runtime_.calls = calls_;
  runtime_.step.set_failure(step_failure_);
  optimizer_.set_known_norm(norm_);
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
  lr_scales_ = runtime_.step.lr_scales();
  adamw_ = options;
}

void Capture::add_norm(const char *call) {
  require_sole_model(call);
  has_norm_ = true;
}

// The eager norms of all models of a context share GPU memory, one after the other. A graph would use that memory
// whenever it runs.
void Capture::require_sole_model(const char *call) const {
  if (runtime_.context.has_several_models())
    fail(FSDP_UNSUPPORTED,
         "{}: a graph with a gradient norm is of the only model that its context has ever had, and this one has had "
         "others, whose norms it would not wait for; leave the norm outside of the graph, or use a context of its own",
         call);
}

std::string Capture::find_difference() const {
  if (has_step_ && lr_scales_ != runtime_.step.lr_scales())
    return format_text(
        "an lr_scale was changed after capture {}, whose step has those of before; capture the step again", number_);
  if (trained_ != runtime_.step.trained())
    return format_text("other parameters are trained than in capture {}; capture again", number_);
  const std::string difference = engine::find_difference(before_, read(), runtime_);
  if (difference.empty()) return {};
  return format_text("the model is not in the state in which capture {} began: {}", number_, difference);
}

void Capture::enter(double lr, fsdp_stream stream) {
  if (has_norm_) require_sole_model("fsdp_prepare_replay");
  reducer_.await_writers(stream);
  device::Stream &caller = runtime_.context.device().caller_stream(stream);
  runtime_.replays.join(caller);
  for (device::Stream *library : runtime_.library_streams()) {
    library->record(*runtime_.marks.order);
    caller.wait(*runtime_.marks.order);
  }
  for (const device::Event *event : runtime_.events())
    if (!event->done()) caller.wait(*event);
  if (has_step_) optimizer_.store_steps(lr, adamw_, caller);
  runtime_.replays.prepare(number_, name_, caller);
}

// All later work comes after the graph. For the library's streams this holds from here on, and for a stream of the
// caller from the call that it is given to (Runtime::caller_stream). So events that the captured calls recorded have no
// meaning any more, nor do the streams that wrote lent gradients, and one record (another for a norm) is enough. Few
// records are good: CUDA makes the host wait once about 1000 commands are pending.
void Capture::leave(device::Stream &caller) {
  runtime_.replays.commit(caller);
  for (device::Stream *library : runtime_.library_streams()) runtime_.replays.join_last(*library);
  if (has_norm_) {
    caller.record(*runtime_.marks.norm);
    optimizer_.set_known_norm({true, {}});
  }
  Moment state = advance(read(), before_, after_);
  for (PartState &part : state.parts) part.streams.clear();
  write(state);
  if (after_.step.version != before_.step.version) runtime_.calls.restart();
}

}  // namespace fsdp::engine
