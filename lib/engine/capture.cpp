// SPDX-License-Identifier: Apache-2.0
#include "engine/capture.h"

namespace fsdp::engine {

Capture::Capture(Model &model, uint64_t number, fsdp_stream stream)
    : model_(model), runtime_(model.runtime("fsdp_capture_begin")), number_(number) {
  device::Device &device = model.context().device();
  const uint64_t id = device.caller_stream(stream).capture_id();
  if (id == 0)
    fail(FSDP_INVALID_STATE, "fsdp_capture_begin: the stream is not being captured; call cudaStreamBeginCapture on it first");
  await_library();
  before_ = read();
  device.begin_capture(id);
}

State Capture::read() const { return read_state(runtime_, model_.gatherer(), model_.reducer()); }
void Capture::write(const State &state) { write_state(state, runtime_, model_.gatherer(), model_.reducer()); }

// The graph's work cannot refer to what was recorded before it. Nothing of this is in a step, so the host may wait.
void Capture::await_library() {
  device::Device &device = model_.context().device();
  for (device::Stream *stream : runtime_.library_streams()) {
    stream->record(*runtime_.finished);
    device.synchronize(*runtime_.finished);
  }
  for (device::Event *event : runtime_.events())
    if (!event->done()) device.synchronize(*event);
}

// Streams of the library that were forked into the capture come back to the caller's.
void Capture::join(device::Stream &caller) {
  const uint64_t id = caller.capture_id();
  for (device::Stream *stream : runtime_.library_streams()) {
    if (stream->capture_id() != id) continue;
    stream->record(*runtime_.order);
    caller.wait(*runtime_.order);
  }
}

void Capture::end(fsdp_stream stream) {
  const auto failed = catch_error([&] {
    device::Stream &caller = model_.context().device().caller_stream(stream);
    if (caller.capture_id() == 0)
      fail(FSDP_INVALID_STATE, "fsdp_capture_end: the stream is not being captured any more, or its capture has failed");
    join(caller);
  });
  after_ = read();
  abandon();
  if (failed) throw *failed;
}

void Capture::abandon() noexcept {
  write(before_);
  model_.context().device().end_capture();
}

void Capture::add_step(const fsdp_adamw_options &options) {
  if (has_step_)
    fail(FSDP_UNSUPPORTED, "fsdp_step_adamw: this capture has a step already; a graph has the lr of one");
  if (options.step)
    fail(FSDP_INVALID_ARGUMENT, "fsdp_step_adamw: fsdp_adamw_options.step is {}; in a capture it must be 0, since every replay "
                                "is another step",
         options.step);
  has_step_ = true;
  adamw_ = options;
}

void Capture::prepare(double lr, fsdp_stream stream) {
  device::Stream &caller = model_.context().device().caller_stream(stream);
  if (const std::string difference = find_difference(before_, read(), runtime_); !difference.empty())
    fail(FSDP_INVALID_STATE, "fsdp_prepare_replay: the model is not in the state in which it was captured: {}", difference);
  model_.meet_to_replay(number_, lr);
  for (device::Stream *library : runtime_.library_streams()) {
    library->record(*runtime_.order);
    caller.wait(*runtime_.order);
  }
  for (device::Event *event : runtime_.events()) caller.wait(*event);
  if (has_step_) model_.optimizer().store_steps(lr, adamw_, caller);
}

// Whatever waits for the work of an earlier call waits for the graph: its own records were points of the graph.
void Capture::follow(device::Stream &caller) {
  for (device::Event *event : runtime_.events()) caller.record(*event);
  caller.record(*runtime_.order);
  for (device::Stream *library : runtime_.library_streams()) library->wait(*runtime_.order);
}

void Capture::commit(fsdp_stream stream) {
  device::Stream &caller = model_.context().device().caller_stream(stream);
  follow(caller);
  write(advance(read(), before_, after_));
}

}  // namespace fsdp::engine
