// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/gather.h"

#include <algorithm>
#include <optional>

namespace fsdp::engine {

const char *phase_name(fsdp_phase phase) {
  switch (phase) {
    case FSDP_FORWARD: return "FORWARD";
    case FSDP_BACKWARD: return "BACKWARD";
    case FSDP_RECOMPUTE: return "RECOMPUTE";
    case FSDP_EVAL: return "EVAL";
    default: return "unknown";
  }
}

namespace {

constexpr uint64_t short_copy = uint64_t{4} << 20;
// Up to so many bytes a caller copies sooner than a worker does it for the caller. A worker with a core of its own
// needs 10 to 20 us to wake up and be waited for. One that shares the caller's core only takes turns with the caller.
constexpr uint64_t unprefetched = uint64_t{2} << 20, unprefetched_with_spare_cores = uint64_t{1} << 20;

// The index of a group's training visits of one phase.
size_t visits_of(uint32_t group, fsdp_phase phase) {
  return 3 * size_t{group} + (phase == FSDP_BACKWARD ? 1 : phase == FSDP_RECOMPUTE ? 2 : 0);
}

std::string describe_holds(std::span<const GatherSlot> slots) {
  std::string text;
  for (fsdp_phase phase = FSDP_FORWARD; phase <= FSDP_EVAL; ++phase) {
    uint32_t count = 0;
    for (const GatherSlot &slot : slots) count += slot.holds[static_cast<size_t>(phase)];
    if (count) text += format_text("{}{} x {}", text.empty() ? "" : ", ", phase_name(phase), count);
  }
  return text.empty() ? "none" : text;
}

// The number of groups that can be held. It is at most the number of slots, because held_groups may be any number.
size_t count_held(const Runtime &runtime) {
  size_t slots = 0;
  for (const Group &group : runtime.groups) slots += group.slots.size();
  return std::min<size_t>(runtime.plan.visits.held_groups, slots);
}

std::string describe_holds(const GatherSlot &slot) { return describe_holds(std::span(&slot, 1)); }

}  // namespace

Gatherer::Gatherer(Runtime &runtime)
    : runtime_(runtime),
      held_(runtime.spec.schedule == FSDP_SCHEDULE_ANY ? count_held(runtime) : 0),
      longest_unprefetched_(runtime.context.world().has_spare_cores() ? unprefetched_with_spare_cores : unprefetched) {
  const auto &train = runtime.plan.visits.train;
  positions_.resize(3 * runtime.groups.size());
  for (uint32_t i = 0; i < train.size(); ++i) positions_[visits_of(train[i].group_index, train[i].phase)].push_back(i);
  eval_positions_.resize(runtime.groups.size());
  for (uint32_t i = 0; i < runtime.plan.visits.eval.size(); ++i)
    eval_positions_[runtime.plan.visits.eval[i].group_index].push_back(i);
  for (const Group &group : runtime.groups) set_readable(group, false);  // a sealed model starts in the update window
}

const std::vector<fsdp_visit> &Gatherer::visits(fsdp_phase phase) const {
  return training(phase) ? runtime_.plan.visits.train : runtime_.plan.visits.eval;
}

// The position of this visit in the schedule. If the group is visited more than once, it is the next visit after the
// current position.
uint32_t Gatherer::find_position(const Group &group, fsdp_phase phase) {
  const auto &found = training(phase) ? positions_[visits_of(group.index, phase)] : eval_positions_[group.index];
  uint32_t &cursor = training(phase) ? cursors_.train : cursors_.eval;
  if (found.empty()) return UINT32_MAX;
  uint32_t position = found.front();
  if (found.size() > 1)
    for (const uint32_t candidate : found)
      if (candidate >= cursor) {
        position = candidate;
        break;
      }
  // After its end a pass starts again.
  cursor = position + 1 == visits(phase).size() ? 0 : position + 1;
  return position;
}

void Gatherer::prefetch(Group &group, fsdp_phase phase, const device::Stream &caller) {
  // In debug mode nothing is gathered ahead, because a released view would show the weights again.
  if (!group.plan->gathers || runtime_.context.debug()) return;
  GatherSlot &slot = group.slot(phase);
  if (slot.gathered || blocked(slot)) return;
  if (any_order() && group.plan->copies && !choose_buffer(true)) return;
  const CallSpan span(runtime_, "prefetch", &group);
  gather(group, slot, phase, true, is_sooner_here(group, caller));
  slot.prefetched = true;
  ++runtime_.stats.prefetches;
}

// Delays of debug mode shake out races of the worker, so there it makes all copies that are ahead.
bool Gatherer::is_sooner_here(const Group &group, const device::Stream &caller) const {
  return group.plan->copies && group.pulled_bytes <= longest_unprefetched_ && !runtime_.context.delays_work() &&
         is_short_copy(group, caller);
}

void Gatherer::prefetch_after(fsdp_phase phase, uint32_t position, const device::Stream &caller) {
  // A recompute without visits of its own is inside another visit, which has already gathered what comes next.
  if (!runtime_.spec.prefetches || position == UINT32_MAX) return;
  const auto &lists = training(phase) ? runtime_.plan.visits.train_prefetch : runtime_.plan.visits.eval_prefetch;
  for (const uint32_t next : lists[position]) {
    const fsdp_visit &visit = visits(phase)[next];
    Group &group = runtime_.groups[visit.group_index];
    // The unshard copies such a group as soon, into a buffer that is taken for a shorter time.
    if (!is_sooner_here(group, caller)) prefetch(group, visit.phase, caller);
  }
}

void Gatherer::unshard(Group &group, fsdp_phase phase, fsdp_stream stream) {
  const CallSpan span(runtime_, "unshard", &group);
  device::Stream &caller = runtime_.caller_stream(stream, "fsdp_unshard");
  GatherSlot &slot = group.slot(phase);
  require_form(group, phase);
  if (group.plan->gathers) {
    if (!slot.gathered) gather(group, slot, phase, false, is_short_copy(group, caller));
    const uint32_t position = find_position(group, phase);
    if (phase != FSDP_RECOMPUTE || position != UINT32_MAX) slot.position = position;
    prefetch_after(phase, position, caller);
    if (group.plan->copies) runtime_.wait(*slot.ready, WaitKind::gather, caller, &group);
    slot.prefetched = false;
  }
  if (!group.plan->copies) runtime_.join_window(caller);
  runtime_.await_version();
  ++slot.holds[static_cast<size_t>(phase)];
}

void Gatherer::read(Group &group, fsdp_phase phase, fsdp_stream stream, const char *call,
                    const std::function<void(device::Stream &)> &reads) {
  device::Stream &caller = runtime_.caller_stream(stream, call);
  GatherSlot &slot = group.slot(phase);
  if (group.plan->copies)
    runtime_.wait(*slot.ready, WaitKind::gather, caller, &group);
  else
    runtime_.join_window(caller);
  reads(caller);
  if (caller.is_calling_thread()) return;
  device::Event &left = slot.left.of(stream);
  caller.record(left);
  if (group.plan->copies) runtime_.gathers.stream->wait(left);
}

// The planes of FORWARD and of BACKWARD may be held at the same time only if the model was planned for that.
void Gatherer::require_form(Group &group, fsdp_phase phase) const {
  if (!group.plan->parts_phases || any_order() || runtime_.spec.plane_policy == FSDP_PLANES_BY_PHASE_AND_RECOMPUTE)
    return;
  const fsdp_phase other = phase == FSDP_RECOMPUTE ? FSDP_BACKWARD : FSDP_RECOMPUTE;
  if ((phase != FSDP_RECOMPUTE && phase != FSDP_BACKWARD) || !group.slot(other).holds[static_cast<size_t>(other)])
    return;
  fail(FSDP_INVALID_STATE,
       "fsdp_unshard: group '{}': {} needs its {} planes while {} holds the {} ones; create the model with "
       "FSDP_PLANES_BY_PHASE_AND_RECOMPUTE, or {}",
       group.name(), phase_name(phase), phase == FSDP_BACKWARD ? "COLUMN" : "ROW", phase_name(other),
       other == FSDP_BACKWARD ? "COLUMN" : "ROW",
       phase == FSDP_BACKWARD ? "return the RECOMPUTE hold first" : "recompute before unsharding for BACKWARD");
}

void Gatherer::reshard(Group &group, fsdp_phase phase, fsdp_stream stream) {
  const CallSpan span(runtime_, "reshard", &group);
  device::Stream &caller = runtime_.caller_stream(stream, "fsdp_reshard");
  GatherSlot &slot = group.slot(phase);
  if (slot.holds[static_cast<size_t>(phase)] == 0)
    fail(FSDP_INVALID_STATE, "fsdp_reshard: group '{}' has no {} hold to return; its holds are: {}", group.name(),
         phase_name(phase), describe_holds(group.slots));
  --slot.holds[static_cast<size_t>(phase)];
  device::Event &left = slot.left.of(stream);
  if (group.plan->copies || !caller.is_calling_thread()) caller.record(left);
  if (!group.plan->gathers) return;
  // The next gather into the buffer runs on the gather stream, after every stream that returned a hold.
  if (group.plan->copies && !left.done()) runtime_.gathers.stream->wait(left);
  if (slot.hold_count()) return;
  held_.set_idle(slot.key);
  if (!keeps(group, slot, phase)) release(group, slot);
}

// Do the weights stay in the buffer? They do if the next visits would gather them again.
bool Gatherer::keeps(const Group &group, const GatherSlot &slot, fsdp_phase phase) const {
  if (runtime_.context.debug()) return false;
  if (any_order()) return group.plan->copies;  // until others need the buffer
  const bool visited = phase != FSDP_RECOMPUTE || !positions_[visits_of(group.index, phase)].empty();
  if (!visited) return !group.plan->by_phase;  // it is inside a BACKWARD visit, or before one, which reads these planes
  if ((phase == FSDP_FORWARD || phase == FSDP_RECOMPUTE) && group.spec->resident) return true;
  if (slot.position == UINT32_MAX) return false;
  const auto &list = visits(phase);
  const uint32_t depth = std::max(runtime_.spec.prefetch_depth, phase == FSDP_RECOMPUTE ? 1U : 0U);
  for (uint32_t ahead = 1; ahead <= depth && slot.position + ahead < list.size(); ++ahead) {
    const fsdp_visit &next = list[slot.position + ahead];
    const Group &other = runtime_.groups[next.group_index];
    if (&other == &group && other.plan->slot_of(next.phase) == group.plan->slot_of(phase)) return true;
  }
  return false;
}

bool Gatherer::blocked(const GatherSlot &slot) const {
  return std::any_of(slot.overlaps.begin(), slot.overlaps.end(), [&](uint32_t key) { return slot_of(key).gathered; });
}

// Advice for a held group. Resident weights keep their buffer from a forward visit to the end of the backward visit.
std::string Gatherer::advise_residence(const Group &held, const GatherSlot &slot) const {
  if (held.spec->resident || runtime_.spec.schedule == FSDP_SCHEDULE_INTERLEAVED || !slot.holds[FSDP_FORWARD])
    return {};
  return format_text(
      ", or create group '{}' with FSDP_GROUP_RESIDENT, which leaves it its buffer until its backward visit ends",
      held.name());
}

// Advice to use FSDP_PLANES_BOTH, with which a buffer for BACKWARD also serves a RECOMPUTE.
std::string Gatherer::advise_planes(const Group &group, fsdp_phase phase) const {
  if (phase != FSDP_RECOMPUTE || !group.plan->by_phase || runtime_.spec.schedule != FSDP_SCHEDULE_INTERLEAVED)
    return {};
  return ", or create the model with FSDP_PLANES_BOTH: by phase a RECOMPUTE has the buffer of forward passes";
}

void Gatherer::evict(Group &group, GatherSlot &slot, fsdp_phase phase) {
  for (const uint32_t key : slot.overlaps) {
    GatherSlot &other = slot_of(key);
    if (!other.gathered || other.hold_count() == 0) continue;
    fail(
        FSDP_INVALID_STATE,
        "fsdp_unshard: group '{}' ({}) needs the buffer that group '{}' holds ({}); return that hold with fsdp_reshard "
        "first, or give fsdp_set_schedule the order of visits in which both are held at once{}{}",
        group.name(), phase_name(phase), group_of(key).name(), describe_holds(other),
        advise_residence(group_of(key), other), advise_planes(group, phase));
  }
  for (const uint32_t key : slot.overlaps)
    if (slot_of(key).gathered) release(group_of(key), slot_of(key));
}

// `ahead` is true for a gather ahead. It takes no buffer whose weights were gathered ahead before and are not used yet.
std::optional<uint32_t> Gatherer::choose_buffer(bool ahead) const {
  return held_.choose([&](uint32_t key) {
    const GatherSlot &other = slot_of(key);
    return other.hold_count() == 0 && !(ahead && other.prefetched);
  });
}

// In debug mode each slot has its own bytes, and only the number of buffers in use is limited.
void Gatherer::take_buffer(Group &group, GatherSlot &slot, fsdp_phase phase, bool ahead) {
  const auto chosen = choose_buffer(ahead);
  if (!chosen) refuse_buffer(group, phase);
  if (const auto key = held_.buffers()[*chosen].key) release(group_of(*key), slot_of(*key));
  held_.take(*chosen, slot.key);
  if (!runtime_.plan.visits.shared) return;
  const uint64_t shift = runtime_.plan.gather_pool.offsets[*chosen];
  for (transport::Gather &gather : slot.gathers) gather.to = gather.to - slot.shift + shift;
  slot.shift = shift;
}

void Gatherer::refuse_buffer(const Group &group, fsdp_phase phase) const {
  std::string holders;
  for (const HeldBuffers::Buffer &buffer : held_.buffers())
    holders += format_text("{}'{}' ({})", holders.empty() ? "" : ", ", group_of(*buffer.key).name(),
                           describe_holds(slot_of(*buffer.key)));
  fail(FSDP_INVALID_STATE,
       "fsdp_unshard: group '{}' ({}) finds all {} buffers of FSDP_SCHEDULE_ANY held, by {}; return a hold with "
       "fsdp_reshard first, or raise held_groups in fsdp_schedule_options",
       group.name(), phase_name(phase), held_.count(), holders);
}

void Gatherer::gather(Group &group, GatherSlot &slot, fsdp_phase phase, bool ahead, bool here) {
  if (group.plan->copies) {
    if (any_order())
      take_buffer(group, slot, phase, ahead);
    else
      evict(group, slot, phase);
    if (here)
      copy_here(group, slot);
    else
      enqueue_copies(group, slot);
  }
  set_readable(group, true);
  slot.gathered = true;
  Stats &stats = runtime_.stats;
  ++stats.gathers;
  stats.peak_gathered_groups = std::max(stats.peak_gathered_groups, ++stats.gathered_groups);
}

// Is this a copy that waits for no peer and takes less time than two wake-ups of a thread? Copies that wait for peers
// run on the stream, whose waits are counted separately from the caller's.
bool Gatherer::is_short_copy(const Group &group, const device::Stream &waiting) const {
  return waiting.is_calling_thread() && group.pulled_bytes <= short_copy && runtime_.marks.published->done() &&
         runtime_.version_ready();
}

// Copies on the caller's thread and counts the time as wait time, because the caller would wait for this copy anyway.
void Gatherer::copy_here(Group &group, GatherSlot &slot) {
  const device::BorrowedStream borrowed(*runtime_.gathers.stream);
  std::optional<WaitSpan> exposed;
  if (borrowed) exposed.emplace(runtime_, WaitKind::gather, &group);
  enqueue_copies(group, slot);
}

void Gatherer::enqueue_copies(Group &group, GatherSlot &slot) {
  device::Stream &stream = *runtime_.gathers.stream;
  StreamTrace &trace = *runtime_.gathers.trace;
  runtime_.await_parts(group.name(), group.trace_name);
  const Traced traced(group, slot.planes.traced());
  trace.begin("all_gather", traced, group.pulled_bytes);
  runtime_.gather(slot.gathers, group);
  trace.end("all_gather", traced, group.pulled_bytes, runtime_.step.version());
  stream.record(*slot.ready);
  if (runtime_.collectives().records_calls) runtime_.calls.add(CallKind::gather, slot.key);
  runtime_.stats.add_all_gather(group.pulled_bytes, slot.planes);
}

void Gatherer::release(Group &group, GatherSlot &slot) {
  slot.gathered = false;
  held_.give_back(slot.key);
  if (slot.prefetched) ++runtime_.stats.dropped_prefetches;
  slot.prefetched = false;
  --runtime_.stats.gathered_groups;
  const bool other_gathered =
      std::any_of(group.slots.begin(), group.slots.end(), [](const auto &s) { return s.gathered; });
  if (!other_gathered) set_readable(group, false);
  if (runtime_.context.debug() && group.plan->copies) poison(slot);
}

// The poison comes after the copies on their stream. If the caller's stream is the calling thread, it is done when the
// call returns.
void Gatherer::poison(const GatherSlot &slot) {
  // 0xFF bytes are a NaN in every dtype of numbers.
  for (const transport::Gather &gather : slot.gathers)
    runtime_.gathers.stream->fill(gather.to, 0xFF, gather.bytes * runtime_.inner().size());
  device::Stream &caller = runtime_.context.device().caller_stream(nullptr);
  if (caller.is_calling_thread()) runtime_.wait_idle(*runtime_.gathers.stream, WaitKind::gather, caller);
}

// Shows or hides weights that are read in place. Copied weights are poisoned instead.
void Gatherer::set_readable(const Group &group, bool readable) {
  if (!runtime_.context.debug() || group.plan->copies || group.plan->compute.bytes == 0) return;
  runtime_.storage->show_compute(*group.plan, readable);
}

void Gatherer::show_whole(bool readable) {
  for (const Group &group : runtime_.groups)
    if (!group.plan->gathers) set_readable(group, readable);
}

bool Gatherer::readable(Group &group, fsdp_phase phase) const {
  if (!group.plan->gathers) return !runtime_.step.window_open();
  return group.slot(phase).hold_count() > 0;
}

const std::byte *Gatherer::view(Group &group, fsdp_phase phase, uint32_t index, PlaneKind published,
                                uint32_t form) const {
  const Bucket &bucket = runtime_.storage->buckets()[index];
  if (!group.plan->copies) return bucket.plane(published, form).shown;
  return bucket.gathered(published, form, group.plan->slot_of(phase)).shown + group.slot(phase).shift;
}

// Drops the gathered weights of a group that is not held, so that they are gathered again.
void Gatherer::drop(Group &group) {
  const bool held = std::ranges::any_of(group.slots, [](const GatherSlot &slot) { return slot.hold_count() > 0; });
  if (held)
    fail(FSDP_INVALID_STATE,
         "fsdp_restore_view: group '{}' has copied weights, which are gathered again when no hold is left, and it is "
         "still held ({}); return the holds with fsdp_reshard first",
         group.name(), describe_holds(group.slots));
  for (GatherSlot &slot : group.slots)
    if (slot.gathered) release(group, slot);
}

std::string Gatherer::list_holds() const {
  std::string text;
  for (const Group &group : runtime_.groups)
    for (const GatherSlot &slot : group.slots)
      if (slot.hold_count())
        text += format_text("{}group '{}' is still held ({}): call fsdp_reshard", text.empty() ? "" : "; ",
                            group.name(), describe_holds(slot));
  return text;
}

void Gatherer::drop_all(bool force) {
  for (Group &group : runtime_.groups)
    for (GatherSlot &slot : group.slots) {
      if (force) slot.holds = {};
      if (slot.gathered && slot.hold_count() == 0) release(group, slot);
    }
}

// What a program wrote into views of weights, although it must not, is taken back (see docs/contracts/memory.md).

const std::byte *Gatherer::source(Group &group, fsdp_phase phase, uint32_t index, PlaneKind published,
                                  uint32_t form) const {
  if (group.plan->copies) return view(group, phase, index, published, form);
  return runtime_.storage->buckets()[index].plane(published, form).view;
}

void Gatherer::restore(Group &group) {
  if (group.plan->copies) return drop(group);
  if (runtime_.storage->restores(*group.plan)) return runtime_.storage->restore(*group.plan);
  const bool shared = group.plan->compute.region != memory::RegionId::local_compute;
  fail(FSDP_INVALID_STATE,
       "fsdp_restore_view: group '{}': the model was created with view_kind FSDP_VIEWS_READ_ONLY, and its weights are "
       "not "
       "copied: {}; FSDP_VIEWS_PRIVATE, on the host device, has views that can be restored",
       group.name(),
       shared ? "a write into its views is a fault, so there is nothing to take back"
              : "its views are the weights themselves, so what was written there cannot be taken back");
}

}  // namespace fsdp::engine
