// SPDX-License-Identifier: Apache-2.0
// The end of the update window: the compute weights are written, the version rises, and readers are let in.
#include "engine/model.h"

namespace fsdp::engine {

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

}  // namespace fsdp::engine
