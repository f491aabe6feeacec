// SPDX-License-Identifier: Apache-2.0
// What a caller waits for, measured and told.
#include <exception>

#include "engine/runtime.h"

namespace fsdp::engine {

namespace {

const char *wait_name(WaitKind what) {
  switch (what) {
    case WaitKind::gather: return "wait for gather";
    case WaitKind::reduce: return "wait for reduce";
    case WaitKind::publish: return "wait for publish";
    case WaitKind::checkpoint: return "wait for a checkpoint";
    default: return "wait for peers";
  }
}

uint64_t &wait_counter(Stats &stats, WaitKind what) {
  switch (what) {
    case WaitKind::gather: return stats.gather_wait_ns;
    case WaitKind::reduce: return stats.reduce_wait_ns;
    case WaitKind::checkpoint: return stats.checkpoint_stall_ns;
    default: return stats.peer_wait_ns;
  }
}

}  // namespace

WaitSpan::WaitSpan(Runtime &runtime, WaitKind what, const Group *group)
    : runtime_(runtime),
      counter_(wait_counter(runtime.stats, what)),
      event_{wait_name(what),
             group ? group->trace_name : nullptr,
             0,
             0,
             0,
             static_cast<uint32_t>(runtime.step.version()),
             trace::caller_lane,
             trace::EventKind::wait} {
  if (runtime.timeline) trace::push_range(event_.name, event_.object);
  event_.begin_ns = trace::now_ns();
  runtime.context.flight().begin_wait(event_.name, group ? group->flight_name : nullptr, event_.begin_ns);
  exceptions_ = std::uncaught_exceptions();
}

WaitSpan::~WaitSpan() {
  event_.end_ns = trace::now_ns();
  counter_ += event_.end_ns - event_.begin_ns;
  // Of a wait that failed the flight recorder keeps what it was for.
  if (std::uncaught_exceptions() == exceptions_) runtime_.context.flight().end_wait(event_.end_ns);
  if (!runtime_.timeline) return;
  runtime_.timeline->record(event_);
  trace::pop_range();
}

void Runtime::await_version() {
  if (step.version_ready()) return;
  if (!version_ready()) {
    const WaitSpan span(*this, WaitKind::publish);
    // Its own part first: over hosts a stream writes it, which may wait for callers that wait for this one.
    device::Stream &caller = context.device().caller_stream(nullptr);
    caller.wait(*marks.published);
    versions->await(step.version(), caller, "fsdp_publish_weights (or a step that publishes)");
  }
  step.see_version();
}

void Runtime::await_parts(const char *what, const char *object) {
  gathers.stream->wait(*marks.published);
  if (versions) gathers.trace->await(*versions, step.version(), what, object);
}

void Runtime::wait(const device::Event &event, WaitKind what, device::Stream &caller, const Group *group) {
  if (!caller.is_calling_thread()) {
    caller.wait(event);
  } else if (!event.done()) {
    const WaitSpan span(*this, what, group);
    caller.wait(event);
  }
  context.failure().check();
}

void Runtime::join_window(device::Stream &caller) const {
  if (!caller.is_calling_thread()) caller.wait(*marks.window_work);
}

void Runtime::leave_window(device::Stream &caller) const {
  if (!caller.is_calling_thread()) caller.record(*marks.window_work);
}

void Runtime::synchronize(device::Stream &stream) {
  if (stream.is_calling_thread()) return;
  stream.record(*marks.order);
  const WaitSpan span(*this, WaitKind::reduce);
  context.device().synchronize(*marks.order);
}

void Runtime::wait_idle(device::Stream &stream, WaitKind what, device::Stream &caller) {
  stream.record(*marks.finished);
  wait(*marks.finished, what, caller);
}

// The calling thread itself, whatever the device: it meets its peers next, who then write what this rank has pulled.
void Runtime::await_pulls() {
  gathers.stream->record(*marks.finished);
  if (!marks.finished->done()) {
    const WaitSpan span(*this, WaitKind::gather);
    context.device().synchronize(*marks.finished);
  }
  context.failure().check();
}

// The outer stream comes after the reduce stream, whose sums it takes.
void Runtime::wait_idle(device::Stream &caller) {
  wait_idle(*reduces.stream, WaitKind::reduce, caller);
  if (outer) wait_idle(outer->stream(), WaitKind::reduce, caller);
  if (versions)
    await_pulls();
  else
    wait_idle(*gathers.stream, WaitKind::gather, caller);
}

}  // namespace fsdp::engine
