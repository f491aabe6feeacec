// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/runtime.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "engine/runtime/group_maker.h"

namespace fsdp::engine {
namespace {

uint16_t open_flight(trace::FlightRecorder &flight, const Teams &teams, uint32_t world_size) {
  const auto axis = [&](const transport::Team *team) {
    return team && team->size() < teams.all->size() ? list_ranks(*team) : "";
  };
  return flight.open_model(name_ranks(*teams.all, world_size), axis(teams.inner.get()), axis(teams.outer.get()));
}

}  // namespace

Runtime::Runtime(Context &context, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                 const std::map<fsdp_role, CallerArena> &arenas, Teams teams_in)
    : context(context),
      spec(spec),
      plan(plan),
      teams(std::move(teams_in)),
      team_news(context, teams),
      timeline(context.timeline()),
      has_graphs(context.device_traits().graphs),
      replays(context) {
  device::Device &device = context.device();
  const auto early = capture_error([&] {
    gathers.stream = device.create_stream("gather");
    reduces.stream = device.create_stream("reduce");
    marks.published = device.create_event();
    marks.finished = device.create_event();
    marks.order = device.create_event();
    marks.window_work = device.create_event();
    marks.norm = device.create_event();
    marks.amaxes = device.create_event();
    if (has_graphs) replays.make_room();
  });
  storage = std::make_unique<Storage>(spec, plan, arenas, teams, device, early);
  if (timeline) model_number_ = timeline->open_model();
  // A failure of the ranks of one inner axis must fail the ranks of the others, too.
  if (teams.outer)
    transport::attempt_together(*teams.all, "fsdp_seal_model", [this] { make_inner(); });
  else
    make_inner();
  // The outer axis waits for all inner axes, so it comes after them.
  if (teams.outer)
    transport::attempt_together(*teams.all, "fsdp_seal_model", [this] { make_parts(); });
  else
    make_parts();
  team_news.tell();
}

void Runtime::make_inner() {
  // If nothing is ever sent, collectives over the device's memory are not needed.
  transport::Team &data = communicates() ? *teams.inner_data : inner();
  if (communicates()) storage->register_with(data);
  versions = teams.inner_data->create_versions("publish");
  gathers.comm = data.create_collectives("gather", {.longest_call = spec.longest_call()});
  reduces.comm =
      data.create_collectives("reduce", {.block = spec.mesh.reduction_block, .longest_call = spec.longest_call()});
  control_comm = inner().create_collectives("control");
}

void Runtime::make_parts() {
  make_traces();
  GroupMaker(*this).make_groups();
}

void Runtime::make_traces() {
  trace::FlightRecorder &flight = context.flight();
  const uint16_t number = open_flight(flight, teams, context.world_size());
  using trace::Sequence;
  gathers.trace = std::make_unique<StreamTrace>(context, *gathers.stream, trace::gather_lane(model_number_),
                                                trace::FlightSequence(flight, Sequence::gathers, number));
  reduces.trace = std::make_unique<StreamTrace>(context, *reduces.stream, trace::reduce_lane(model_number_),
                                                trace::FlightSequence(flight, Sequence::reduces, number));
  flights.meetings = std::make_unique<trace::FlightSequence>(flight, Sequence::meetings, number);
  flights.params = std::make_unique<trace::FlightSequence>(flight, Sequence::params, number);
  replays.set_flights(trace::FlightSequence(flight, Sequence::replays, number));
  if (teams.outer)
    outer = std::make_unique<Outer>(context, spec, teams, trace::outer_lane(model_number_),
                                    trace::FlightSequence(flight, Sequence::outer, number));
}

// Streams end first, because their work refers to everything else. If the model ends in the middle of a step, work may
// still wait for peers. Then reduces are abandoned, here and on the peers, and a gather that cannot end fails the
// context.
Runtime::~Runtime() {
  if (!gathers.stream->runs_tasks()) end_streams();
  abandon();
  if (versions) {
    gathers.stream->record(*marks.finished);
    if (!marks.finished->done() && !versions->ready(step.version()))
      context.fail_for_good(Error(FSDP_INVALID_STATE,
                                  format_text("a model of rank {} was destroyed with work in flight", context.rank())));
  }
  outer.reset();
  reduces.stream.reset();
  gathers.stream.reset();
  if (timeline) timeline->close_model(model_number_);
}

void Runtime::gather(std::span<const transport::Gather> given, const Group &group) {
  const transport::Tag tag{group.index, group.name()};
  if (auto error = gathers.comm->broken()) throw *std::move(error);
  if (collectives().gathers_are_collective)
    gathers.comm->gather(given, tag, *gathers.stream);
  else
    gathers.comm->gather_stable(given, tag, *gathers.stream);
}

void Runtime::abandon() {
  if (reduces.comm) reduces.comm->abandon();
  if (outer) outer->abandon();
  if (gathers.comm && collectives().gathers_are_collective) gathers.comm->abandon();
}

// The device reads and writes memory that ends with this object. Work that all ranks have called ends by itself, so
// only work that has not ended after a while is given up. If a step is unfinished, this while is short. Then the
// context fails, which ends all waits for peers.
void Runtime::end_streams() noexcept {
  using std::chrono::milliseconds;
  constexpr milliseconds own_end{2000};
  const milliseconds longest{std::min(context.timeout_ms(), 20'000u)};
  try {
    if (gathers.stream && marks.order)
      for (const Group &group : groups)
        for (const GatheredPiece &slot : group.slots)
          slot.left.for_each([this](const device::Event &event) { gathers.stream->wait(event); });
    if (!context.failure().failed()) {
      if (streams_end(in_a_step() ? own_end : longest)) return;
      context.log(FSDP_LOG_WARNING,
                  format_text("rank {} destroys a model whose work has not ended: collectives under way are given up",
                              context.rank()));
    }
    abandon();
    teams.for_each_data([](transport::Team &team) { team.cut(); });
    if (streams_end(longest)) return;
    const std::string replay = replays.describe_oldest();
    context.fail_for_good(
        Error(FSDP_INVALID_STATE, format_text("a model of rank {} was destroyed with work in flight{}{}",
                                              context.rank(), replay.empty() ? "" : ": ", replay)));
    streams_end(longest);
  } catch (const std::exception &error) {
    context.log(FSDP_LOG_WARNING, format_text("a model of rank {} was destroyed: {}", context.rank(), error.what()));
  }
}

// Is this rank in the middle of a step? Then its peers may be anywhere in the step and may not have enqueued the same
// work.
bool Runtime::in_a_step() const {
  const auto open = [this](const Group &group) {
    const auto held = [](const GatheredPiece &slot) { return slot.gathered || slot.hold_count() > 0; };
    const bool given = group.grad.open || group.grad.given_count > 0;
    return (given && !step.window_open()) || std::any_of(group.slots.begin(), group.slots.end(), held);
  };
  return step.failed() || std::any_of(groups.begin(), groups.end(), open);
}

bool Runtime::streams_end(std::chrono::milliseconds within) {
  const auto end = std::chrono::steady_clock::now() + within;
  for (device::Stream *stream : {gathers.stream.get(), outer ? &outer->stream() : nullptr, reduces.stream.get()}) {
    if (!stream || !marks.finished) continue;
    stream->record(*marks.finished);
    while (!marks.finished->done()) {
      if (std::chrono::steady_clock::now() >= end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return true;
}

void Runtime::set_trained(uint64_t hash, bool all) {
  step.set_trained(hash);
  reduce_note = all ? "" : " (not all are trained)";
  if (outer) outer->set_note(reduce_note);
}

ParamPlace &Runtime::place(Group &group, uint64_t param_index, const char *call) {
  if (param_index >= group.places.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: param_index {} is outside [0, {}) of group '{}'", call, param_index,
         group.places.size(), group.name());
  return group.places[param_index];
}

device::Stream &Runtime::caller_stream(fsdp_stream stream, const char *call) const {
  device::Stream &caller = context.device().caller_stream(stream);
  if (!has_graphs) return caller;
  context.require_no_other_capture(this, call);
  uint64_t id = 0;
  try {
    id = caller.capture_id();
  } catch (Error &error) {  // CUDA cannot tell even that
    error.message = format_text("{}: {}", call, error.message);
    throw;
  }
  if (id == capture_id) {
    replays.join_last(caller);
    return caller;
  }
  if (capture_id != 0)
    fail(FSDP_INVALID_STATE,
         "{}: the stream is not in the capture that fsdp_begin_capture was given; give that stream, or one "
         "that was forked from it",
         call);
  fail(FSDP_INVALID_STATE,
       "{}: the stream is being captured into a graph, and the model is not; call fsdp_begin_capture first, or "
       "give another stream",
       call);
}

std::vector<device::Stream *> Runtime::library_streams() const {
  std::vector<device::Stream *> streams{gathers.stream.get(), reduces.stream.get()};
  if (outer) streams.push_back(&outer->stream());
  return streams;
}

std::vector<device::Event *> Runtime::events() const {
  std::vector<device::Event *> events{marks.published.get(), marks.window_work.get(), marks.norm.get(),
                                      marks.amaxes.get()};
  if (outer) events.insert(events.end(), {outer->partial_free(0), outer->partial_free(1)});
  const auto add = [&](device::Event &event) { events.push_back(&event); };
  for (const Group &group : groups) {
    for (const GatheredPiece &slot : group.slots) {
      add(*slot.ready);
      slot.left.for_each(add);
    }
    add(*group.grad.summed);
  }
  for (const GradPart &part : parts) {
    part.written.for_each(add);
    events.insert(events.end(), {part.reduced.get(), part.opened.get()});
  }
  return events;
}

void Runtime::require_eager(const char *call) const {
  context.require_no_other_capture(this, call);
  if (capture_id != 0)
    fail(FSDP_INVALID_STATE,
         "{}: the model is being captured into a graph, and this call needs the calling thread to wait for the GPU or "
         "for peers; "
         "make it outside of fsdp_begin_capture and fsdp_end_capture",
         call);
}

// ---- waits ----

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
  // After a failed wait, the flight recorder keeps the reason of the wait.
  if (std::uncaught_exceptions() == exceptions_) runtime_.context.flight().end_wait(event_.end_ns);
  if (!runtime_.timeline) return;
  runtime_.timeline->record(event_);
  trace::pop_range();
}

void Runtime::await_version() {
  if (step.version_ready()) return;
  if (!version_ready()) {
    const WaitSpan span(*this, WaitKind::publish);
    // This rank's own part comes first. Between hosts a stream writes it, and that stream may wait for callers that
    // wait for this one.
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

// The calling thread itself waits, whatever the device is. It meets its peers next, and they then overwrite what this
// rank has pulled.
void Runtime::await_pulls() {
  gathers.stream->record(*marks.finished);
  if (!marks.finished->done()) {
    const WaitSpan span(*this, WaitKind::gather);
    context.device().synchronize(*marks.finished);
  }
  context.failure().check();
}

// The outer stream is waited for after the reduce stream, because it takes the sums of that one.
void Runtime::wait_idle(device::Stream &caller) {
  wait_idle(*reduces.stream, WaitKind::reduce, caller);
  if (outer) wait_idle(outer->stream(), WaitKind::reduce, caller);
  if (versions)
    await_pulls();
  else
    wait_idle(*gathers.stream, WaitKind::gather, caller);
}

}  // namespace fsdp::engine
