// SPDX-License-Identifier: Apache-2.0

#include "engine/model/capture.h"

#include <algorithm>
#include <numeric>

namespace fsdp::engine {
namespace {

const char *grad_name(GradStage state) {
  switch (state) {
    case GradStage::lent: return "lent";
    case GradStage::reducing: return "being reduced";
    default: return "free";
  }
}

uint32_t count(const SlotState::Counts &holds) { return std::accumulate(holds.begin(), holds.end(), 0u); }

std::string compare_slot(const SlotState &expected, const SlotState &found, const Group &group) {
  if (expected.gathered != found.gathered)
    return format_text("group '{}' {} gathered, and {} then", group.name(), found.gathered ? "is" : "is not",
                       expected.gathered ? "was" : "was not");
  if (expected.piece_holds != found.piece_holds)
    return format_text("group '{}' has {} holds and {} of a piece, and had {} and {} then", group.name(),
                       count(found.holds), count(found.piece_holds), count(expected.holds),
                       count(expected.piece_holds));
  if (expected.holds != found.holds)
    return format_text("group '{}' has {} holds, and {} then", group.name(), found.hold_count(), expected.hold_count());
  return {};
}

std::string compare_part(const PartState &expected, const PartState &found, const GradPart &part) {
  if (expected.stage != found.stage)
    return format_text("the gradient buffer of group '{}' is {}, and was {} then", part.name, grad_name(found.stage),
                       grad_name(expected.stage));
  if (expected.given != found.given)
    return format_text("the gradients of group '{}' were {} in this contribution, and {} then", part.name,
                       found.given ? "reduced" : "not reduced", expected.given ? "were" : "were not");
  return {};
}

std::string compare_grad(const ContributionState &expected, const ContributionState &found, const Group &group) {
  if (expected.given_count != found.given_count && (expected.given_count == 0 || found.given_count == 0))
    return format_text(
        "group '{}' has {} contributions in this step, and had {} then: the first overwrites and later ones "
        "add, which are two captures",
        group.name(), found.given_count, expected.given_count);
  if (expected.last != found.last || expected.touched != found.touched || expected.acquired != found.acquired ||
      expected.completed != found.completed || expected.open != found.open)
    return format_text("the gradients of group '{}' have not been written as they had been then", group.name());
  return {};
}

OuterState advance(const OuterState &now, const OuterState &before, const OuterState &after) {
  OuterState state = after;
  const auto add = [&](uint64_t OuterStats::*counter) {
    state.stats.*counter = now.stats.*counter + (after.stats.*counter - before.stats.*counter);
  };
  for (auto counter :
       {&OuterStats::all_reduces, &OuterStats::reduce_scatters, &OuterStats::all_gathers, &OuterStats::sent_bytes})
    add(counter);
  return state;
}

// Adds to the counters what the capture counted. Numbers that are not counters become those after the capture.
Stats advance(const Stats &now, const Stats &before, const Stats &after) {
  Stats stats = now;
  const auto add = [&](uint64_t Stats::*counter) { stats.*counter += after.*counter - before.*counter; };
  for (auto counter : {&Stats::gathers, &Stats::reduces, &Stats::all_gathers, &Stats::reduce_scatters,
                       &Stats::all_reduces, &Stats::gathered_bytes, &Stats::reduced_bytes, &Stats::prefetches,
                       &Stats::dropped_prefetches, &Stats::reduce_scatter_bytes, &Stats::all_reduce_bytes,
                       &Stats::gathered_row_bytes, &Stats::gathered_column_bytes})
    add(counter);
  stats.gathered_groups = after.gathered_groups;
  stats.pending_grads = after.pending_grads;
  stats.peak_gathered_groups = std::max(now.peak_gathered_groups, after.peak_gathered_groups);
  stats.peak_pending_grads = std::max(now.peak_pending_grads, after.peak_pending_grads);
  return stats;
}

}  // namespace

Moment read_state(const Runtime &runtime, const Gatherer &gatherer, const Reducer &reducer) {
  Moment state;
  state.step = runtime.step.state();
  state.cursors = gatherer.cursors();
  state.pool = reducer.pool();
  state.stats = runtime.stats;
  for (const MeshComms &mesh_comms : runtime.comms)
    state.outer.push_back(mesh_comms.outer ? mesh_comms.outer->state() : OuterState());
  for (const Group &group : runtime.groups) {
    state.slots.insert(state.slots.end(), group.slots.begin(), group.slots.end());
    state.grads.push_back(group.grad);
  }
  state.parts.assign(runtime.parts.begin(), runtime.parts.end());
  return state;
}

void write_state(const Moment &state, Runtime &runtime, Gatherer &gatherer, Reducer &reducer) {
  runtime.step.set_state(state.step);
  gatherer.set_cursors(state.cursors);
  reducer.set_pool(state.pool);
  runtime.stats = state.stats;
  for (size_t mesh = 0; mesh < runtime.comms.size(); ++mesh)
    if (runtime.comms[mesh].outer) runtime.comms[mesh].outer->set_state(state.outer[mesh]);
  size_t slot = 0;
  for (Group &group : runtime.groups) {
    for (GatheredPiece &own : group.slots) static_cast<SlotState &>(own) = state.slots[slot++];
    static_cast<ContributionState &>(group.grad) = state.grads[group.index];
  }
  for (GradPart &part : runtime.parts) static_cast<PartState &>(part) = state.parts[part.number];
}

std::string find_difference(const Moment &expected, const Moment &found, const Runtime &runtime) {
  if (expected.step.window_open != found.step.window_open)
    return format_text("the update window is {}, and was {} then", found.step.window_open ? "open" : "closed",
                       expected.step.window_open ? "open" : "closed");
  if (expected.step.window_has_grads != found.step.window_has_grads)
    return format_text("the update window {} gradients, and {} then", found.step.window_has_grads ? "has" : "has no",
                       expected.step.window_has_grads ? "had" : "had none");
  size_t slot = 0;
  for (const Group &group : runtime.groups) {
    for (size_t s = 0; s < group.slots.size(); ++s, ++slot)
      if (std::string text = compare_slot(expected.slots[slot], found.slots[slot], group); !text.empty()) return text;
    for (const GradPart &part : group.parts)
      if (std::string text = compare_part(expected.parts[part.number], found.parts[part.number], part); !text.empty())
        return text;
    if (std::string text = compare_grad(expected.grads[group.index], found.grads[group.index], group); !text.empty())
      return text;
  }
  return {};
}

Moment advance(const Moment &now, const Moment &before, const Moment &after) {
  Moment state = after;
  state.step.version = now.step.version + (after.step.version - before.step.version);
  state.step.adamw_step = now.step.adamw_step + (after.step.adamw_step - before.step.adamw_step);
  state.stats = advance(now.stats, before.stats, after.stats);
  for (size_t mesh = 0; mesh < state.outer.size(); ++mesh)
    state.outer[mesh] = advance(now.outer[mesh], before.outer[mesh], after.outer[mesh]);
  for (size_t g = 0; g < state.grads.size(); ++g) {
    ContributionState &grad = state.grads[g];
    // If the step goes on after the graph, its contributions from before the graph count, too. If the step ended in the
    // graph, the count starts at 0.
    if (after.step.version != before.step.version) continue;
    grad.reduced_count = now.grads[g].reduced_count + (grad.reduced_count - before.grads[g].reduced_count);
    grad.given_count = now.grads[g].given_count + (grad.given_count - before.grads[g].given_count);
  }
  return state;
}

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

// Waits for the library's streams, because work in the graph cannot wait for events that were recorded before the
// capture. A capture is not part of a step, so the host may wait.
void Capture::await_library() {
  device::Device &device = runtime_.context.device();
  for (device::Stream *stream : runtime_.library_streams()) {
    stream->record(*runtime_.marks.finished);
    device.synchronize(*runtime_.marks.finished);
  }
  for (const device::Event *event : runtime_.events())
    if (!event->done()) device.synchronize(*event);
  if (!runtime_.marks.order->done()) device.synchronize(*runtime_.marks.order);  // for the caller's own streams
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

// All later work comes after the graph: on the library's streams from here on, and on a stream of the caller from the
// next call with that stream (Runtime::caller_stream). So the events that the captured calls recorded no longer matter,
// nor do the streams that wrote lent gradients. One record, and another for a norm, is enough. Few records are good,
// because CUDA makes the host wait once about 1000 commands are pending.
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
