// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime/runtime.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <thread>

#include "engine/runtime/group_maker.h"

namespace fsdp::engine {
namespace {

// The ranks of an axis of a mesh; an empty text if the axis has all ranks of the model.
std::string name_axis(const transport::Team *axis, const transport::Team &model) {
  return axis && axis->size() < model.size() ? list_ranks(*axis) : "";
}

}  // namespace

Runtime::Runtime(Context &context, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                 const std::map<fsdp_role, CallerArena> &arenas, std::vector<Teams> teams_in)
    : context(context),
      spec(spec),
      plan(plan),
      teams(std::move(teams_in)),
      team_news(context, teams),
      timeline(context.timeline()),
      has_graphs(context.device_traits().graphs),
      replays(context) {
  device::Device &device = context.device();
  // With one core a rank, the threads of streams share it with the program's thread. All ranks of this host have joined
  // by now, so the number of cores a rank is known.
  if (context.world().has_own_cores() && !context.world().has_spare_cores()) device.give_way();
  const auto early = capture_error([&] {
    gathers.stream = device.create_stream("gather");
    make_streams();
    marks.published = device.create_event();
    marks.finished = device.create_event();
    marks.order = device.create_event();
    marks.window_work = device.create_event();
    marks.norm = device.create_event();
    marks.amaxes = device.create_event();
    if (has_graphs) replays.make_room();
  });
  storage = std::make_unique<Storage>(spec, plan, arenas, teams, device, early);
  if (storage->home_file() && storage->home_file()->in_memory())
    context.log(FSDP_LOG_WARNING,
                format_text("{} is in memory (tmpfs), and takes {} bytes of it: name the directory of a disk",
                            storage->home_file()->shown(), plan.region(memory::RegionId::home).bytes));
  comms.reserve(teams.size());
  for (size_t mesh = 0; mesh < teams.size(); ++mesh)
    comms.push_back({.mesh = spec.meshes[mesh],
                     .teams = teams[mesh],
                     .reducing = reduces[std::min(mesh, reduces.size() - 1)],
                     .communicates = spec.communicates(spec.meshes[mesh])});
  for (MeshComms &mesh_comms : comms)
    for (uint32_t r = 0; r < team().size(); ++r)
      if (mesh_comms.teams.all == teams.front().all ||
          std::ranges::find(mesh_comms.mesh.ranks, team().world_rank(r)) != mesh_comms.mesh.ranks.end())
        mesh_comms.members.push_back(r);
  // A failure of the ranks of one team must fail the ranks of the other teams, too. Outer axes wait for all inner axes,
  // so they come after the inner axes.
  const bool several = teams.size() > 1 || teams.front().outer;
  const auto make = [&](const std::function<void()> &step) {
    several ? transport::attempt_together(team(), "fsdp_seal_model", step) : step();
  };
  for (MeshComms &mesh_comms : comms) make([&] { make_inner(mesh_comms); });
  make([this] { make_parts(); });
  log_calls_of_models();
  team_news.tell();
}

void Runtime::make_streams() {
  device::Device &device = context.device();
  const auto name = [&](const char *what) {
    return outers.empty() ? std::string(what) : format_text("{} of mesh {}", what, outers.size());
  };
  do {
    reduces.push_back({device.create_stream(name("reduce")), nullptr});
    const bool shares = !reduces.front().stream->runs_tasks();
    const bool has_outer = shares ? std::ranges::any_of(teams, &Teams::has_outer) : teams[outers.size()].has_outer();
    outers.push_back({has_outer ? device.create_stream(name("outer")) : nullptr, nullptr});
  } while (reduces.front().stream->runs_tasks() && reduces.size() < teams.size());
}

void Runtime::make_inner(MeshComms &mesh_comms) {
  // If nothing is ever sent, collectives over the device's memory are not needed.
  transport::Team &data = mesh_comms.communicates ? *mesh_comms.teams.inner_data : mesh_comms.inner();
  if (mesh_comms.communicates) storage->register_with(data);
  mesh_comms.versions = mesh_comms.teams.inner_data->create_versions("publish");
  mesh_comms.gathers = data.create_collectives("gather", {.longest_call = spec.longest_call()});
  mesh_comms.reduces = data.create_collectives(
      "reduce", {.block = mesh_comms.mesh.reduction_block, .longest_call = spec.longest_call()});
  mesh_comms.control = mesh_comms.inner().create_collectives("control");
}

void Runtime::make_parts() {
  make_traces();
  for (size_t mesh = 0; mesh < comms.size(); ++mesh) {
    const CollectiveStream &outer = outers[std::min(mesh, outers.size() - 1)];
    MeshComms &mesh_comms = comms[mesh];
    if (mesh_comms.teams.outer)
      mesh_comms.outer = std::make_unique<Outer>(context, mesh_comms.mesh, mesh_comms.teams, *outer.stream,
                                                 *outer.trace, spec.longest_call());
  }
  GroupMaker(*this).make_groups();
  for (uint32_t mesh = 0; mesh < comms.size(); ++mesh)
    if (plan.region(memory::RegionId::grad_turns, mesh).bytes)
      comms[mesh].grad_home = std::make_unique<GradHome>(context, *storage, parts, mesh);
  for (uint32_t mesh = 0; mesh < comms.size(); ++mesh)
    if (const Region &rows = storage->region(memory::RegionId::file_rows, mesh); rows.memory)
      for (uint32_t axis = 0; axis < (comms[mesh].mesh.slices() > 1 ? 2 : 1); ++axis)
        comms[mesh].row_files[axis] =
            std::make_unique<FileLane>(context, *storage, rows.memory, format_text("rows {}.{}", mesh, axis));
}

// The key is made from values that are equal on all ranks of the model: its number is unique among models of the same
// ranks.
void Runtime::log_calls_of_models() {
  if (!collectives().records_calls) return;
  uint64_t key = mix_calls(number());
  for (const uint32_t rank : spec.mesh().ranks) key = mix_calls(key ^ rank);
  std::set<uint32_t> ranks;
  for (const MeshComms &mesh_comms : comms)
    for (const uint32_t rank : mesh_comms.mesh.inner_ranks(mesh_comms.rank())) ranks.insert(rank);
  model_calls = std::make_unique<ModelCalls>(context.call_log(), *this, key, std::vector(ranks.begin(), ranks.end()));
}

// A stream for one mesh reports the sequences of that mesh; a stream for all meshes reports the model's.
void Runtime::make_traces() {
  trace::FlightRecorder &flight = context.flight();
  using trace::Sequence;
  const auto trace_of = [&](const CollectiveStream &collective_stream, trace::TimelineLane lane, Sequence sequence,
                            uint16_t number) {
    return std::make_unique<StreamTrace>(context, *collective_stream.stream, lane,
                                         trace::FlightSequence(flight, sequence, number));
  };
  uint16_t model = 0;
  for (uint32_t mesh = 0; mesh < reduces.size(); ++mesh) {
    const std::string inner = name_axis(teams[mesh].inner.get(), team()),
                      outer = name_axis(teams[mesh].outer.get(), team());
    const uint16_t number = mesh ? flight.open_mesh(model, mesh, inner, outer)
                                 : flight.open_model(name_ranks(team(), context.world_size()), inner, outer);
    if (mesh == 0) model = number;
    const uint32_t lane = timeline ? timeline->open_model() : 0;
    if (timeline) lanes_.push_back(lane);
    reduces[mesh].trace = trace_of(reduces[mesh], trace::reduce_lane(lane), Sequence::reduces, number);
    if (outers[mesh].stream)
      outers[mesh].trace = trace_of(outers[mesh], trace::outer_lane(lane), Sequence::outer, number);
    if (mesh > 0) continue;
    gathers.trace = trace_of(gathers, trace::gather_lane(lane), Sequence::gathers, number);
    flights.meetings = std::make_unique<trace::FlightSequence>(flight, Sequence::meetings, number);
    flights.params = std::make_unique<trace::FlightSequence>(flight, Sequence::params, number);
    replays.set_flights(trace::FlightSequence(flight, Sequence::replays, number));
  }
}

// Streams end first, because their work refers to everything else. If the model ends in the middle of a step, work may
// still wait for peers. In that case reduces are abandoned, here and on the peers, and a gather that cannot end fails
// the context.
Runtime::~Runtime() {
  if (!gathers.stream->runs_tasks()) end_streams();
  abandon();
  if (std::ranges::any_of(comms, [](const MeshComms &mesh_comms) { return mesh_comms.versions != nullptr; })) {
    gathers.stream->record(*marks.finished);
    if (!marks.finished->done() && !version_ready())
      context.fail_for_good(Error(FSDP_INVALID_STATE,
                                  format_text("a model of rank {} was destroyed with work in flight", context.rank())));
  }
  for (CollectiveStream &collective_stream : outers) collective_stream.stream.reset();
  for (CollectiveStream &collective_stream : reduces) collective_stream.stream.reset();
  gathers.stream.reset();
  for (const uint32_t lane : lanes_) timeline->close_model(lane);
}

bool Runtime::answers_for(const Group &group, uint64_t param_index) const {
  if (spec.meshes.size() == 1) return true;
  const MeshComms &mesh_comms = comms_of(group);
  const memory::GroupInstance *const counting = group.spec->counting(param_index);
  return (mesh_comms.mesh.slices() > 1 || mesh_comms.mesh.outer_index(mesh_comms.rank()) == 0) &&
         (!counting || counting->ranks == mesh_comms.mesh.ranks);
}

void Runtime::gather(std::span<const transport::Gather> given, const Group &group) {
  const transport::Tag tag{group.index, group.name()};
  transport::Collectives &comm = *comms_of(group).gathers;
  if (auto error = comm.broken()) throw *std::move(error);
  if (collectives().gathers_are_collective)
    comm.gather(given, tag, *gathers.stream);
  else
    comm.gather_stable(given, tag, *gathers.stream);
}

void Runtime::abandon() {
  for (MeshComms &mesh_comms : comms) {
    if (mesh_comms.reduces) mesh_comms.reduces->abandon();
    if (mesh_comms.outer) mesh_comms.outer->abandon();
    if (mesh_comms.gathers && collectives().gathers_are_collective) mesh_comms.gathers->abandon();
  }
}

// Streams must end before this object's memory, because the device reads and writes it. Work that all ranks have called
// ends by itself, so only work that has not ended after a grace time is given up. The grace time is short if a step is
// unfinished. Giving up fails the context, which ends all waits for peers.
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
    for (const Teams &mesh_teams : teams) mesh_teams.for_each_data([](transport::Team &team) { team.cut(); });
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

// Is this rank in the middle of a step? If it is, its peers may be anywhere in the step and may not have enqueued the
// same work.
bool Runtime::in_a_step() const {
  const auto open = [this](const Group &group) {
    const auto held = [](const GatheredPiece &slot) { return slot.gathered || slot.hold_count() > 0; };
    const bool given = group.grad.open || group.grad.given_count > 0;
    return (given && !step.window_open()) || std::any_of(group.slots.begin(), group.slots.end(), held);
  };
  return step.failed() || step.collected() || std::any_of(groups.begin(), groups.end(), open);
}

bool Runtime::streams_end(std::chrono::milliseconds within) {
  const auto end = std::chrono::steady_clock::now() + within;
  for (device::Stream *stream : library_streams()) {
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
  for (MeshComms &mesh_comms : comms)
    if (mesh_comms.outer) mesh_comms.outer->set_note(reduce_note);
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
  } catch (Error &error) {  // CUDA cannot tell whether the stream is captured
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
  std::vector<device::Stream *> streams{gathers.stream.get()};
  for (const CollectiveStream &collective_stream : outers)
    if (collective_stream.stream) streams.push_back(collective_stream.stream.get());
  for (const CollectiveStream &collective_stream : reduces) streams.push_back(collective_stream.stream.get());
  return streams;
}

std::vector<device::Event *> Runtime::events() const {
  std::vector<device::Event *> events{marks.published.get(), marks.window_work.get(), marks.norm.get(),
                                      marks.amaxes.get()};
  for (const MeshComms &mesh_comms : comms)
    if (mesh_comms.outer)
      events.insert(events.end(), {mesh_comms.outer->partial_free(0), mesh_comms.outer->partial_free(1)});
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
    case WaitKind::home: return "wait for the home file";
    default: return "wait for peers";
  }
}

uint64_t &wait_counter(Stats &stats, WaitKind what) {
  switch (what) {
    case WaitKind::gather: return stats.gather_wait_ns;
    case WaitKind::reduce: return stats.reduce_wait_ns;
    case WaitKind::checkpoint: return stats.checkpoint_stall_ns;
    case WaitKind::home: return stats.home_wait_ns;
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
    // This rank waits for its own part first. Between hosts a stream writes that part, and the stream may wait for
    // callers that wait for this rank.
    device::Stream &caller = context.device().caller_stream(nullptr);
    caller.wait(*marks.published);
    for (MeshComms &mesh_comms : comms)
      if (mesh_comms.versions)
        mesh_comms.versions->await(step.version(), caller, "fsdp_publish_weights (or a step that publishes)");
  }
  step.see_version();
}

void Runtime::await_parts(MeshComms &mesh_comms, const char *what, const char *object) {
  gathers.stream->wait(*marks.published);
  if (mesh_comms.versions) gathers.trace->await(*mesh_comms.versions, step.version(), what, object);
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

// The calling thread itself waits, even if work runs on a device: its next step is to meet its peers, and they then
// overwrite the memory from which this rank pulls.
void Runtime::await_pulls() {
  gathers.stream->record(*marks.finished);
  if (!marks.finished->done()) {
    const WaitSpan span(*this, WaitKind::gather);
    context.device().synchronize(*marks.finished);
  }
  context.failure().check();
}

void Runtime::await_file() {
  const auto has_lanes = [](const MeshComms &mesh_comms) { return mesh_comms.grad_home || mesh_comms.row_files[0]; };
  if (std::ranges::none_of(comms, has_lanes)) return;
  const HomeFile &file = *storage->home_file();
  WaitSpan span(*this, WaitKind::home);
  const uint64_t before = file.moved_bytes();
  for (const MeshComms &mesh_comms : comms) {
    if (mesh_comms.grad_home) mesh_comms.grad_home->await();
    for (const auto &lane : mesh_comms.row_files)
      if (lane) lane->await();
  }
  span.set_bytes(file.moved_bytes() - before);
  context.failure().check();
}

// Outer streams come after reduce streams, because they use the sums of reduce streams.
void Runtime::wait_idle(device::Stream &caller) {
  for (const CollectiveStream &collective_stream : reduces)
    wait_idle(*collective_stream.stream, WaitKind::reduce, caller);
  for (const CollectiveStream &collective_stream : outers)
    if (collective_stream.stream) wait_idle(*collective_stream.stream, WaitKind::reduce, caller);
  if (model_comms().versions)
    await_pulls();
  else
    wait_idle(*gathers.stream, WaitKind::gather, caller);
}

}  // namespace fsdp::engine
