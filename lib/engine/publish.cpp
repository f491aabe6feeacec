// SPDX-License-Identifier: Apache-2.0
// The end of the update window: the compute weights are written, the version rises, and readers are let in.
#include <string_view>

#include "engine/update.h"

namespace fsdp::engine {
namespace {

// The caller may have written main weights here and not there: no version can be trusted any more, and there is no way
// on.
Error make_fatal(Error error) {
  constexpr std::string_view advice = "; call fsdp_discard_step on every rank to go on";
  error.status = FSDP_MISMATCH;
  if (error.message.ends_with(advice)) error.message.resize(error.message.size() - advice.size());
  error.message += "; main weights may have been written here, so the context has failed";
  return error;
}

}  // namespace

void UpdateWindow::publish(fsdp_stream stream) {
  constexpr auto call = "fsdp_publish_weights";
  const CallSpan span(runtime_, "publish_weights");
  runtime_.step.require_window(call);
  device::Stream &caller = runtime_.caller_stream(stream, call);
  runtime_.storage->restore_all();  // before anything has happened that a failure would leave half done
  meetings_.meet({.intent = Intent::publish, .capture = graphs_.number()});
  try {
    meetings_.check(Intent::publish);
  } catch (const Error &error) {
    if (!runtime_.step.version() || graphs_.capture()) throw;
    const Error fatal = make_fatal(error);
    runtime_.context.fail_for_good(fatal, false);  // peers that go on by discarding would wait for this rank
    throw fatal;
  }
  runtime_.join_window(caller);
  optimizer_.cast_weights(caller);
  close_window(caller);
}

// The parts of other outer ranks are written by their communicator: it raises the version when they have come.
device::Stream &UpdateWindow::gather_outer_weights(device::Stream &caller) {
  caller.record(*runtime_.marks.order);
  device::Stream &stream = runtime_.outer->stream();
  if (!runtime_.marks.order->done()) stream.wait(*runtime_.marks.order);
  for (Group &group : runtime_.groups) runtime_.outer->gather_weights(group, runtime_.step.version());
  return stream;
}

// The compute weights are written: raise the version and let readers in.
void UpdateWindow::close_window(device::Stream &caller) {
  gatherer_.show_whole(true);
  const uint64_t version = runtime_.step.raise_version();
  device::Stream &writer = runtime_.outer && runtime_.outer->gathers() ? gather_outer_weights(caller) : caller;
  if (runtime_.versions) runtime_.versions->publish(version, writer);
  writer.record(*runtime_.marks.published);
  if (runtime_.timeline) {
    const uint64_t now = trace::now_ns();
    runtime_.timeline->record({"published", nullptr, now, now, 0, static_cast<uint32_t>(version), trace::caller_lane,
                               trace::EventKind::instant});
  }
  runtime_.step.close_window(runtime_.version_ready());
  if (!caller.is_calling_thread()) caller.wait(*runtime_.marks.published);  // else await_version does, who must know
  refresh_whole_weights(caller);
  runtime_.leave_window(caller);
  reducer_.start_step();
  gatherer_.start_step();
}

// Whole weights that peers have parts of: copied ones are pulled now, mapped ones are there when all have published.
void UpdateWindow::refresh_whole_weights(device::Stream &caller) {
  // Nobody near has parts of them, but other outer ranks may.
  if (!runtime_.communicates()) {
    if (runtime_.outer && runtime_.outer->gathers()) runtime_.await_version();
    return;
  }
  bool copies = false, any = false;
  for (Group &group : runtime_.groups) {
    const bool own =
        group.spec->strategy == FSDP_STRATEGY_NO_SHARD || group.plan->compute.region == memory::RegionId::local_compute;
    if (group.plan->gathers || own) continue;
    any = true;
    ++runtime_.stats.gathers;
    if (group.refresh.empty()) continue;
    if (!copies) runtime_.await_parts("the refresh of whole weights", nullptr);
    copies = true;
    const Traced traced(group, group.refreshed_planes.traced());
    runtime_.gathers.trace->begin("all_gather", traced, group.pulled_bytes);
    runtime_.gather(group.refresh, group);
    runtime_.gathers.trace->end("all_gather", traced, group.pulled_bytes, runtime_.step.version());
    runtime_.stats.add_all_gather(group.pulled_bytes, group.refreshed_planes);
  }
  if (copies) runtime_.wait_idle(*runtime_.gathers.stream, WaitKind::gather, caller);
  if (any) runtime_.await_version();
}

}  // namespace fsdp::engine
