// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime.h"

#include <algorithm>
#include <exception>

#include "base/dtype.h"

namespace fsdp::engine {
namespace {

// Requests of a pool whose bytes overlap, as lists. Sorted by offset, each is compared with those that start inside it.
std::vector<std::vector<uint32_t>> find_overlaps(const memory::PoolPlan &pool,
                                                 std::span<const memory::PoolRequest> requests) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < requests.size(); ++i)
    if (requests[i].bytes) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return std::pair(pool.offsets[a], a) < std::pair(pool.offsets[b], b);
  });
  std::vector<std::vector<uint32_t>> overlaps(requests.size());
  for (size_t a = 0; a < order.size(); ++a) {
    const uint64_t end = pool.offsets[order[a]] + requests[order[a]].bytes;
    for (size_t b = a + 1; b < order.size() && pool.offsets[order[b]] < end; ++b) {
      overlaps[order[a]].push_back(order[b]);
      overlaps[order[b]].push_back(order[a]);
    }
  }
  return overlaps;
}

const char *wait_name(Awaited what) {
  switch (what) {
    case Awaited::gather: return "wait for gather";
    case Awaited::reduce: return "wait for reduce";
    case Awaited::publish: return "wait for publish";
    default: return "wait for peers";
  }
}

uint64_t &wait_counter(Stats &stats, Awaited what) {
  switch (what) {
    case Awaited::gather: return stats.gather_wait_ns;
    case Awaited::reduce: return stats.reduce_wait_ns;
    default: return stats.peer_wait_ns;
  }
}

float grad_factor(const memory::ModelSpec &spec) {
  switch (spec.grad_op) {
    case FSDP_GRAD_SUM: return 1.0f;
    case FSDP_GRAD_FACTOR: return static_cast<float>(spec.grad_factor);
    default: return static_cast<float>(1.0 / (double(spec.shard_size) * spec.replicate_size));
  }
}

}  // namespace

WaitSpan::WaitSpan(Runtime &runtime, Awaited what, const Group *group)
    : runtime_(runtime),
      counter_(wait_counter(runtime.stats, what)),
      event_{wait_name(what), group ? group->trace_name : nullptr, 0, 0, 0, static_cast<uint32_t>(runtime.version),
             trace::caller_lane, trace::Kind::wait} {
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

const char *phase_name(fsdp_phase phase) {
  switch (phase) {
    case FSDP_FORWARD: return "FORWARD";
    case FSDP_BACKWARD: return "BACKWARD";
    case FSDP_RECOMPUTE: return "RECOMPUTE";
    case FSDP_EVAL: return "EVAL";
    default: return "unknown";
  }
}

Runtime::Runtime(Context &context, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                 const std::map<fsdp_role, CallerArena> &arenas, std::shared_ptr<comm::Team> team_in)
    : context(context), spec(spec), plan(plan), team(std::move(team_in)), timeline(context.timeline()) {
  device::Device &device = context.device();
  const auto early = catch_error([&] {
    gather_stream = device.create_stream("gather");
    reduce_stream = device.create_stream("reduce");
    published = device.create_event();
    finished = device.create_event();
    order = device.create_event();
  });
  storage = std::make_unique<Storage>(spec, plan, arenas, *team, device, early);
  version_gate = team->create_gate("publish");
  round_gate = team->create_gate("round of reduces");
  gather_comm = team->create_communicator("gather");
  reduce_comm = team->create_communicator("reduce");
  control_comm = team->create_communicator("control");
  make_traces();
  make_groups();
}

void Runtime::make_traces() {
  if (timeline) model_number_ = timeline->open_model();
  trace::FlightRecorder &flight = context.flight();
  const uint16_t number = flight.open_model();
  using trace::Sequence;
  gather_trace = std::make_unique<StreamTrace>(*gather_stream, timeline, trace::gather_lane(model_number_),
                                               trace::FlightSequence(flight, Sequence::gathers, number));
  reduce_trace = std::make_unique<StreamTrace>(*reduce_stream, timeline, trace::reduce_lane(model_number_),
                                               trace::FlightSequence(flight, Sequence::reduces, number));
  meeting_flights = std::make_unique<trace::FlightSequence>(flight, Sequence::meetings, number);
  param_flights = std::make_unique<trace::FlightSequence>(flight, Sequence::params, number);
}

// Streams first: their work refers to everything else. A model that ends in the middle of a step leaves work that waits
// for peers: reduces are abandoned, here and on the peers, and a gather that cannot end fails the context.
Runtime::~Runtime() {
  if (reduce_comm) reduce_comm->abandon();
  if (gather_stream && finished && version_gate) {
    gather_stream->record(*finished);
    if (!finished->done() && !version_gate->reached(version))
      context.fail_for_good(Error(FSDP_INVALID_STATE, format_text("a model of rank {} was destroyed with work in flight",
                                                                  context.rank())));
  }
  reduce_stream.reset();
  gather_stream.reset();
  if (timeline) timeline->close_model(model_number_);
}

void Runtime::make_groups() {
  groups.resize(plan.groups.size());
  for (uint32_t g = 0; g < groups.size(); ++g) {
    Group &group = groups[g];
    group.index = g;
    group.spec = &spec.groups[g];
    group.plan = &plan.groups[g];
    group.flight_name = context.flight().keep(group.spec->name);
    if (timeline) group.trace_name = timeline->keep(group.spec->name);
    group.places.resize(group.spec->params.size());
    for (const uint32_t b : group.plan->buckets)
      for (uint32_t t = 0; t < plan.buckets[b].params.size(); ++t) group.places[plan.buckets[b].params[t]] = {b, t};
    make_slots(group);
    make_grads(group);
    make_refresh(group);
  }
  const auto gathered = find_overlaps(plan.gather_pool, plan.visits.gathered);
  const auto grads = find_overlaps(plan.grad_pool, plan.visits.grads);
  for (Group &group : groups) {
    for (GatherSlot &slot : group.slots) slot.overlaps = gathered[slot.key];
    group.grad_overlaps = grads[group.index];
  }
}

void Runtime::make_slots(Group &group) {
  const bool two = spec.schedule == FSDP_SCHEDULE_INTERLEAVED;
  group.slots.resize(two ? 2 : 1);
  for (uint32_t s = 0; s < group.slots.size(); ++s) {
    GatherSlot &slot = group.slots[s];
    slot.key = memory::gathered_key(spec.schedule, group.index, s ? FSDP_BACKWARD : FSDP_FORWARD);
    slot.ready = context.device().create_event();
    slot.left = context.device().create_event();
    if (!group.plan->copies) continue;
    for (const uint32_t b : group.plan->buckets) {
      const Bucket &bucket = storage->buckets()[b];
      const uint64_t element = dtype_size(bucket.plan->dtype);
      std::byte *to = storage->gather_pool() + plan.gather_pool.offsets[slot.key] + bucket.plan->gathered_offset;
      for (const layout::SubBucket &sub : bucket.plan->layout.sub_buckets) {
        const uint64_t bytes = sub.shard_count * element;
        if (bytes == 0) continue;
        comm::Source from = bucket.compute_source;
        from.offset += sub.full_offset * element;
        from.stride += bytes;
        slot.spans.push_back({from, to + sub.full_offset * element, bytes});
        if (s == 0) group.pulled_bytes += bytes * team->size();
      }
    }
  }
}

void Runtime::make_grads(Group &group) {
  Contribution &grad = group.grad;
  const size_t params = group.places.size();
  grad.acquired.assign(params, 0);
  grad.touched.assign(params, 0);
  grad.writers.assign(params, nullptr);
  grad.streams.reserve(16);
  grad.written = context.device().create_event();
  grad.reduced = context.device().create_event();
  const float factor = grad_factor(spec);
  for (const uint32_t b : group.plan->buckets) {
    const Bucket &bucket = storage->buckets()[b];
    if (bucket.plan->frozen || bucket.plan->layout.full_count == 0) continue;
    const uint64_t element = dtype_size(bucket.plan->grad_dtype);
    for (const layout::SubBucket &sub : bucket.plan->layout.sub_buckets) {
      if (sub.shard_count == 0) continue;
      comm::Source from = bucket.full_grad_source;
      from.offset += sub.full_offset * element;
      group.reduced_bytes += sub.shard_count * element * team->size();
      if (bucket.plan->main_is_whole) {
        group.all_reduced_bytes += sub.shard_count * (element * team->size() + sizeof(float) * (team->size() - 1));
        comm::Source whole = bucket.whole_grad_source;
        whole.offset += sub.full_offset * sizeof(float);
        group.all_reduce_spans.push_back({from, bucket.plan->grad_dtype, bucket.plan->wire_dtype, sub.shard_count, whole,
                                          bucket.grad.data + sub.full_offset * sizeof(float), factor, false});
        continue;
      }
      const uint64_t own = bucket.grad.whole ? sub.full_offset + team->rank() * sub.shard_count : sub.shard_offset;
      group.reduce_spans.push_back({from, bucket.plan->grad_dtype, bucket.plan->wire_dtype, sub.shard_count,
                                    reinterpret_cast<float *>(bucket.grad.data) + own, factor, false});
    }
  }
}

void Runtime::make_refresh(Group &group) {
  if (group.plan->home != memory::ComputeHome::whole) return;
  for (const uint32_t b : group.plan->buckets) {
    const Bucket &bucket = storage->buckets()[b];
    const uint64_t element = dtype_size(bucket.plan->dtype);
    for (const layout::SubBucket &sub : bucket.plan->layout.sub_buckets) {
      const uint64_t bytes = sub.shard_count * element;
      if (bytes == 0) continue;
      comm::Source from = bucket.compute_source;
      from.offset += sub.full_offset * element;
      from.stride += bytes;
      group.refresh_spans.push_back({from, bucket.compute.data + sub.full_offset * element, bytes});
      group.pulled_bytes += bytes * (team->size() - 1);
    }
  }
}

ParamPlace &Runtime::place(Group &group, uint64_t param_index, const char *call) {
  if (param_index >= group.places.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: param_index {} is outside [0, {}) of group '{}'", call, param_index,
         group.places.size(), group.name());
  return group.places[param_index];
}

void Runtime::await_version() {
  if (version_ready) return;
  if (!version_gate->reached(version)) {
    const WaitSpan span(*this, Awaited::publish);
    version_gate->await(version, "fsdp_publish_weights (or a step that publishes)");
  }
  version_ready = true;
}

void Runtime::wait(const device::Event &event, Awaited what, device::Stream &caller, const Group *group) {
  if (event.done()) {
    context.failure().check();
    return;
  }
  const WaitSpan span(*this, what, group);
  caller.wait(event);
  context.failure().check();
}

void Runtime::wait_idle(Awaited what, device::Stream &caller) {
  device::Stream &stream = what == Awaited::gather ? *gather_stream : *reduce_stream;
  stream.record(*finished);
  wait(*finished, what, caller);
}

void Runtime::require_step(const char *call) const {
  if (!step_failure.empty())
    fail(FSDP_INVALID_STATE, "{}: this step has failed and must be discarded with fsdp_discard_step: {}", call, step_failure);
}

void Runtime::require_weights(const char *call) const {
  require_step(call);
  if (window_open)
    fail(FSDP_INVALID_STATE, "{}: the update window is open{}; close it with fsdp_publish_weights or a step that publishes{}",
         call, version == 0 ? " (the model was sealed and nothing was published yet)" : "",
         version == 0 ? "" : ", or with fsdp_discard_step");
}

void Runtime::require_window(const char *call) const {
  require_step(call);
  if (!window_open)
    fail(FSDP_INVALID_STATE, "{}: the update window is closed; fsdp_finish_grads or fsdp_begin_update opens it", call);
}

}  // namespace fsdp::engine
