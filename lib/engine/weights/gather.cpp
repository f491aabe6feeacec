// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/gather.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace fsdp::engine {

namespace {

constexpr uint64_t short_copy = uint64_t{4} << 20;
// The largest copies, in bytes, for which the caller's thread is faster than a worker. A worker with a core of its own
// needs 10 to 20 us to wake up and be waited for. A worker on the caller's core only takes turns with the caller.
constexpr uint64_t unprefetched = uint64_t{2} << 20, unprefetched_with_spare_cores = uint64_t{1} << 20;

}  // namespace

Gatherer::Gatherer(Runtime &runtime)
    : runtime_(runtime),
      cursor_(runtime.plan.visits, static_cast<uint32_t>(runtime.groups.size())),
      buffers_(runtime),
      longest_unprefetched_(runtime.context.world().has_spare_cores() ? unprefetched_with_spare_cores : unprefetched) {
  size_t longest = 0;
  for (Group &group : runtime.groups) {
    size_t launch = 0;
    for (const GatheredPiece &slot : group.slots) launch += slot.gathers.size();
    if (group.piece_count() > 1) longest = std::max(longest, launch);
    for (uint32_t p = 0; p < group.piece_count(); ++p)
      set_readable(group, p, false);  // a sealed model starts in the update window
  }
  launch_.reserve(longest);
}

void Gatherer::prefetch(Group &group, fsdp_phase phase, const device::Stream &caller) {
  const GatherRequest asked(group, whole_group, phase);
  require_backward_weights(asked, "fsdp_prefetch");
  prefetch(asked, caller);
}

void Gatherer::prefetch(const GatherRequest &asked, const device::Stream &caller) {
  // In debug mode nothing is gathered ahead, because a released view would then show the weights again.
  if (!asked.group.plan->gathers || runtime_.context.debug() || asked.gathered()) return;
  if (asked.group.plan->copies && !buffers_.has_room(asked)) return;
  const CallSpan span(runtime_, "prefetch", &asked.group);
  gather(asked, true, is_sooner_here(asked, caller));
}

// Debug mode delays the worker to reveal races, so there the worker makes all copies ahead.
bool Gatherer::is_sooner_here(const GatherRequest &asked, const device::Stream &caller) const {
  return asked.group.plan->copies && asked.missing_bytes() <= longest_unprefetched_ &&
         !runtime_.context.delays_work() && is_short_copy(asked, caller);
}

void Gatherer::prefetch_after(fsdp_phase phase, uint32_t position, const device::Stream &caller) {
  // A recompute without visits of its own is inside another visit, which has already gathered the next weights.
  if (!runtime_.spec.prefetches || position == VisitCursor::no_position) return;
  for (const uint32_t next : cursor_.ahead(phase, position)) {
    const fsdp_visit &visit = cursor_.visits(phase)[next];
    const uint32_t piece = visit.piece ? visit.piece - 1 : whole_group;
    const GatherRequest asked(runtime_.groups[visit.group_index], piece, visit.phase);
    // If copying on the caller's thread is faster, the unshard does it: no later than a prefetch, and into a buffer
    // that is in use for a shorter time.
    if (!is_sooner_here(asked, caller)) prefetch(asked, caller);
  }
}

void Gatherer::unshard(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream) {
  const CallSpan span(runtime_, "unshard", &group);
  const char *const call = piece == whole_group ? "fsdp_unshard" : "fsdp_unshard_piece";
  device::Stream &caller = runtime_.caller_stream(stream, call);
  const GatherRequest asked(group, piece, phase);
  require_backward_weights(asked, call);
  require_form(asked);
  if (group.plan->gathers) {
    if (!asked.gathered()) gather(asked, false, is_short_copy(asked, caller));
    const uint32_t position = cursor_.advance(group.index, piece, phase, asked.slots.front().position);
    if (phase != FSDP_RECOMPUTE || position != VisitCursor::no_position)
      for (GatheredPiece &slot : asked.slots) slot.position = position;
    prefetch_after(phase, position, caller);
    for (GatheredPiece &slot : asked.slots) {
      if (group.plan->copies) runtime_.wait(*slot.ready, WaitKind::gather, caller, &group);
      slot.prefetched = false;
    }
  }
  if (!group.plan->copies) runtime_.join_window(caller);
  runtime_.await_version();
  for (GatheredPiece &slot : asked.slots) ++(asked.whole() ? slot.holds : slot.piece_holds)[static_cast<size_t>(phase)];
}

void Gatherer::read(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream, const char *call,
                    const std::function<void(device::Stream &)> &reads) {
  device::Stream &caller = runtime_.caller_stream(stream, call);
  GatheredPiece &slot = group.pieces(phase)[piece];
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

void Gatherer::require_backward_weights(const GatherRequest &asked, const char *call) {
  if (asked.phase != FSDP_BACKWARD || asked.group.spec->backward_weights) return;
  fail(
      FSDP_INVALID_STATE,
      "{}: group '{}' was created with FSDP_BACKWARD_WEIGHTS_NONE, so its weights are not there in BACKWARD; hold them "
      "for RECOMPUTE, or create the group with FSDP_BACKWARD_WEIGHTS_GATHERED",
      call, asked.group.name());
}

// The planes of FORWARD and of BACKWARD may be held at the same time only if the model was planned for that.
void Gatherer::require_form(const GatherRequest &asked) const {
  Group &group = asked.group;
  const fsdp_phase phase = asked.phase;
  if (!group.plan->parts_phases || any_order() || runtime_.spec.plane_policy == FSDP_PLANES_BY_PHASE_AND_RECOMPUTE)
    return;
  const fsdp_phase other = phase == FSDP_RECOMPUTE ? FSDP_BACKWARD : FSDP_RECOMPUTE;
  const auto held = [&](const GatheredPiece &slot) { return slot.hold_count(other) > 0; };
  const GatherRequest others(group, asked.piece, other);
  if ((phase != FSDP_RECOMPUTE && phase != FSDP_BACKWARD) || std::ranges::none_of(others.slots, held)) return;
  fail(FSDP_INVALID_STATE,
       "{}: {}: {} needs its {} planes while {} holds the {} ones; create the model with "
       "FSDP_PLANES_BY_PHASE_AND_RECOMPUTE, or {}",
       asked.unshard_call(), asked.name(), phase_name(phase), phase == FSDP_BACKWARD ? "COLUMN" : "ROW",
       phase_name(other), other == FSDP_BACKWARD ? "COLUMN" : "ROW",
       phase == FSDP_BACKWARD ? "return the RECOMPUTE hold first" : "recompute before unsharding for BACKWARD");
}

void Gatherer::reshard(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream) {
  const CallSpan span(runtime_, "reshard", &group);
  const char *const call = piece == whole_group ? "fsdp_reshard" : "fsdp_reshard_piece";
  device::Stream &caller = runtime_.caller_stream(stream, call);
  const GatherRequest asked(group, piece, phase);
  const auto counts = [&](GatheredPiece &slot) -> uint32_t & {
    return (asked.whole() ? slot.holds : slot.piece_holds)[static_cast<size_t>(phase)];
  };
  if (counts(asked.slots.front()) == 0)
    fail(FSDP_INVALID_STATE, "{}: {} has no {} hold{} to return{}; its holds are: {}", call, asked.name(),
         phase_name(phase), group.piece_count() > 1 ? format_text(" of {}", asked.unshard_call()) : "",
         advise_return(asked), describe_holds(asked.whole() ? std::span(group.slots) : asked.slots));
  for (GatheredPiece &slot : asked.slots) --counts(slot);
  for (GatheredPiece &slot : asked.slots) {
    device::Event &left = slot.left.of(stream);
    if (group.plan->copies || !caller.is_calling_thread()) caller.record(left);
    if (!group.plan->gathers) continue;
    // The next gather into the buffer runs on the gather stream, after every stream that returned a hold.
    if (group.plan->copies && !left.done()) runtime_.gathers.stream->wait(left);
    if (slot.hold_count()) continue;
    buffers_.set_idle(slot);
    if (!keeps(group, slot, phase)) release(group, slot);
  }
}

// Advises the right call if a hold was taken by the call for a piece and is returned by the call for the group, or the
// reverse.
std::string Gatherer::advise_return(const GatherRequest &asked) const {
  const auto held = [&](const GatheredPiece &slot) { return slot.hold_count(asked.phase) > 0; };
  if (std::ranges::none_of(asked.slots, held)) return {};
  return asked.whole() ? ", only holds of fsdp_unshard_piece, which fsdp_reshard_piece returns"
                       : ", only holds of fsdp_unshard, which fsdp_reshard returns";
}

// Do the weights stay in the buffer? They do if the next visits would gather them again.
bool Gatherer::keeps(const Group &group, const GatheredPiece &slot, fsdp_phase phase) const {
  if (runtime_.context.debug()) return false;
  if (any_order()) return group.plan->copies;  // until other weights need the buffer
  const bool visited = phase != FSDP_RECOMPUTE || cursor_.has_visits(group.index, phase);
  // A recompute without visits of its own is inside a BACKWARD visit, or before one that may read these planes.
  if (!visited) return !group.plan->by_phase && group.spec->backward_weights;
  if ((phase == FSDP_FORWARD || phase == FSDP_RECOMPUTE) && group.spec->resident) return true;
  if (slot.position == VisitCursor::no_position) return false;
  const auto &list = cursor_.visits(phase);
  const uint32_t depth = std::max(runtime_.spec.prefetch_depth, phase == FSDP_RECOMPUTE ? 1U : 0U);
  for (uint32_t ahead = 1; ahead <= depth && slot.position + ahead < list.size(); ++ahead) {
    const fsdp_visit &next = list[slot.position + ahead];
    if (next.group_index != group.index || (next.piece && next.piece != slot.piece + 1)) continue;
    if (next.phase == FSDP_BACKWARD && !group.spec->backward_weights) continue;
    if (group.plan->slot_of(next.phase) == group.plan->slot_of(phase)) return true;
  }
  return false;
}

void Gatherer::gather(const GatherRequest &asked, bool ahead, bool here) {
  if (asked.group.plan->copies) {
    buffers_.take(asked, ahead, [this](const GatherBuffers::Owner &owner) {
      for (GatheredPiece &slot : owner.slots)
        if (slot.gathered) release(*owner.group, slot);
    });
    if (here)
      copy_here(asked);
    else
      enqueue_copies(asked);
  }
  Stats &stats = runtime_.stats;
  if (std::ranges::none_of(asked.group.pieces(asked.phase), &GatheredPiece::gathered))
    stats.peak_gathered_groups = std::max(stats.peak_gathered_groups, ++stats.gathered_groups);
  for (GatheredPiece &slot : asked.slots) {
    if (slot.gathered) continue;
    set_readable(asked.group, slot.piece, true);
    slot.gathered = true;
    slot.prefetched = ahead;
    ++stats.gathers;
    stats.prefetches += ahead;
  }
}

// Is this a copy that waits for no peer and is faster than waking a thread twice? Copies that wait for peers run on the
// stream, because its waits are counted separately from the caller's.
bool Gatherer::is_short_copy(const GatherRequest &asked, const device::Stream &waiting) const {
  return waiting.is_calling_thread() && asked.missing_bytes() <= short_copy && runtime_.marks.published->done() &&
         runtime_.version_ready();
}

// Copies on the caller's thread and counts the time as wait time, because the caller would wait for this copy anyway.
void Gatherer::copy_here(const GatherRequest &asked) {
  const device::BorrowedStream borrowed(*runtime_.gathers.stream);
  std::optional<WaitSpan> exposed;
  if (borrowed) exposed.emplace(runtime_, WaitKind::gather, &asked.group);
  enqueue_copies(asked);
}

// All copies share one launch of the communicator.
void Gatherer::enqueue_copies(const GatherRequest &asked) {
  const Group &group = asked.group;
  std::span<const transport::Gather> gathers;
  PlaneBytes planes;
  launch_.clear();
  for (const GatheredPiece &slot : asked.slots) {
    if (slot.gathered) continue;
    planes.row += slot.planes.row, planes.column += slot.planes.column;
    gathers = slot.gathers;
    if (asked.slots.size() == 1) break;
    launch_.insert(launch_.end(), slot.gathers.begin(), slot.gathers.end());
    gathers = launch_;
  }
  const uint64_t bytes = asked.missing_bytes();
  device::Stream &stream = *runtime_.gathers.stream;
  StreamTrace &trace = *runtime_.gathers.trace;
  runtime_.await_parts(runtime_.comms_of(group), group.name(), group.trace_name);
  const Traced traced(group, planes.traced());
  trace.begin("all_gather", traced, bytes);
  runtime_.gather(gathers, group);
  trace.end("all_gather", traced, bytes, runtime_.step.version());
  CallKind kind = CallKind::gather;
  for (const GatheredPiece &slot : asked.slots) {
    if (slot.gathered) continue;
    stream.record(*slot.ready);
    if (runtime_.collectives().records_calls) runtime_.record_call({std::exchange(kind, CallKind::join), slot.number});
  }
  runtime_.stats.add_all_gather(bytes, planes);
}

void Gatherer::release(Group &group, GatheredPiece &slot) {
  slot.gathered = false;
  buffers_.give_back(slot);
  if (slot.prefetched) ++runtime_.stats.dropped_prefetches;
  slot.prefetched = false;
  const size_t of_slot = static_cast<size_t>(&slot - group.slots.data()) / group.piece_count();
  if (std::ranges::none_of(group.pieces_in(static_cast<uint32_t>(of_slot)), &GatheredPiece::gathered))
    --runtime_.stats.gathered_groups;
  const bool gathered = std::ranges::any_of(
      group.slots, [&](const GatheredPiece &other) { return other.piece == slot.piece && other.gathered; });
  if (!gathered) set_readable(group, slot.piece, false);
  if (runtime_.context.debug() && group.plan->copies) poison(group, slot);
}

// The copies come first on this stream, and then the poison. If the caller's stream is the calling thread, the poison
// is complete when the call returns.
void Gatherer::poison(const Group &group, const GatheredPiece &slot) {
  // 0xFF bytes are a NaN in every dtype of numbers.
  for (const transport::Gather &gather : slot.gathers)
    runtime_.gathers.stream->fill(gather.to, 0xFF, gather.bytes * runtime_.comms_of(group).inner().size());
  device::Stream &caller = runtime_.context.device().caller_stream(nullptr);
  if (caller.is_calling_thread()) runtime_.wait_idle(*runtime_.gathers.stream, WaitKind::gather, caller);
}

// Shows or hides weights that are read in place. Copied weights are poisoned instead.
void Gatherer::set_readable(const Group &group, uint32_t piece, bool readable) {
  const memory::PiecePlan &plan = group.plan->pieces[piece];
  if (!runtime_.context.debug() || group.plan->copies || plan.compute.bytes == 0) return;
  runtime_.storage->show_compute(plan, readable);
}

void Gatherer::show_whole(bool readable) {
  for (const Group &group : runtime_.groups)
    for (uint32_t p = 0; p < group.piece_count() && !group.plan->gathers; ++p) set_readable(group, p, readable);
}

std::string Gatherer::find_unreadable(Group &group, uint32_t piece, fsdp_phase phase) const {
  if (phase == FSDP_BACKWARD && !group.spec->backward_weights)
    return "it was created with FSDP_BACKWARD_WEIGHTS_NONE, so its weights are not there in BACKWARD; hold them for "
           "RECOMPUTE, or create the group with FSDP_BACKWARD_WEIGHTS_GATHERED";
  const bool held = group.plan->gathers ? group.pieces(phase)[piece].hold_count() > 0 : !runtime_.step.window_open();
  if (held) return {};
  if (runtime_.step.window_open()) return "the update window is open: publish first";
  if (group.piece_count() == 1) return "call fsdp_unshard first";
  return format_text("call fsdp_unshard, or fsdp_unshard_piece with piece {}, for {} first", piece, phase_name(phase));
}

const std::byte *Gatherer::view(Group &group, fsdp_phase phase, uint32_t index, PlaneKind published,
                                uint32_t form) const {
  const Bucket &bucket = runtime_.storage->buckets()[index];
  if (!group.plan->copies) return bucket.plane(published, form).shown;
  return bucket.gathered(published, form, group.plan->slot_of(phase)).shown +
         group.pieces(phase)[bucket.plan->piece].shift;
}

// Drops the gathered weights of a group without holds, so that the next unshard gathers them again.
void Gatherer::drop(Group &group) {
  const bool held = std::ranges::any_of(group.slots, [](const GatheredPiece &slot) { return slot.hold_count() > 0; });
  if (held)
    fail(FSDP_INVALID_STATE,
         "fsdp_restore_view: group '{}' has copied weights, which are gathered again when no hold is left, and it is "
         "still held ({}); return the holds with fsdp_reshard_piece or fsdp_reshard first",
         group.name(), describe_holds(group.slots));
  for (GatheredPiece &slot : group.slots)
    if (slot.gathered) release(group, slot);
}

std::string Gatherer::list_holds() const {
  std::string text;
  for (const Group &group : runtime_.groups)
    if (std::ranges::any_of(group.slots, [](const GatheredPiece &slot) { return slot.hold_count() > 0; }))
      text += format_text("{}group '{}' is still held ({}): call {}", text.empty() ? "" : "; ", group.name(),
                          describe_holds(group.slots), calls_of_holds(group.slots));
  return text;
}

void Gatherer::drop_all(bool force) {
  for (Group &group : runtime_.groups)
    for (GatheredPiece &slot : group.slots) {
      if (force) slot.holds = slot.piece_holds = {};
      if (slot.gathered && slot.hold_count() == 0) release(group, slot);
    }
}

// Undoes writes of a program into views of weights, which are not allowed (see docs/contracts/memory.md).

const std::byte *Gatherer::source(Group &group, fsdp_phase phase, uint32_t index, PlaneKind published,
                                  uint32_t form) const {
  if (group.plan->copies) return view(group, phase, index, published, form);
  return runtime_.storage->buckets()[index].plane(published, form).view;
}

void Gatherer::restore(Group &group) {
  if (group.plan->copies) return drop(group);
  if (runtime_.storage->restores(group.plan->pieces.front())) {
    for (const memory::PiecePlan &piece : group.plan->pieces) runtime_.storage->restore(piece);
    return;
  }
  const bool shared = group.plan->compute_region() != memory::RegionId::local_compute;
  fail(FSDP_INVALID_STATE,
       "fsdp_restore_view: group '{}': the model was created with view_kind FSDP_VIEWS_READ_ONLY, and its weights are "
       "not "
       "copied: {}; FSDP_VIEWS_PRIVATE, on the host device, has views that can be restored",
       group.name(),
       shared ? "a write into its views is a fault, so there is nothing to take back"
              : "its views are the weights themselves, so what was written there cannot be taken back");
}

}  // namespace fsdp::engine
