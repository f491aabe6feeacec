// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/gather_buffers.h"

namespace fsdp::engine {

VisitCursor::VisitCursor(const memory::VisitOrder &order, uint32_t group_count)
    : order_(order), positions_(4 * size_t{group_count}) {
  for (const std::vector<fsdp_visit> *list : {&order.train, &order.eval})
    for (uint32_t i = 0; i < list->size(); ++i) {
      const fsdp_visit &visit = (*list)[i];
      positions_[4 * size_t{visit.group_index} + static_cast<size_t>(visit.phase) - 1].push_back(i);
    }
}

uint32_t VisitCursor::advance(uint32_t group, uint32_t piece, fsdp_phase phase, uint32_t last) {
  if (!has_visits(group, phase)) return no_position;
  uint32_t &now = phase == FSDP_EVAL ? now_.eval : now_.train;
  const uint32_t position = find(group, piece, phase, last, now);
  // At the end of a pass the next one begins.
  now = position + 1 == visits(phase).size() ? 0 : position + 1;
  return position;
}

// Returns the next visit at position `from` or later. If the pass has none left, returns its first visit. Pieces that
// are unsharded one by one during a visit of the whole group belong to that visit, until a piece is unsharded again.
uint32_t VisitCursor::find(uint32_t group, uint32_t piece, fsdp_phase phase, uint32_t last, uint32_t from) const {
  const std::vector<fsdp_visit> &list = visits(phase);
  const auto is_of = [&](uint32_t position) {
    const fsdp_visit &visit = list[position];
    return visit.group_index == group && visit.phase == phase &&
           (piece == whole_group || visit.piece == 0 || visit.piece == piece + 1);
  };
  if (piece != whole_group && from > 0 && is_of(from - 1) && list[from - 1].piece == 0 && last != from - 1)
    return from - 1;
  uint32_t first = no_position, next = no_position;
  for (const uint32_t position : positions_of(group, phase)) {
    if (!is_of(position)) continue;
    if (first == no_position) first = position;
    if (position < from) continue;
    next = position;
    break;
  }
  if (next == no_position) next = first;
  if (next == no_position) return positions_of(group, phase).front();
  // If a whole group is unsharded where the schedule visits its pieces, this is the last of these visits.
  while (piece == whole_group && list[next].piece && next + 1 < list.size() && list[next + 1].piece && is_of(next + 1))
    ++next;
  return next;
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

namespace {

// The number of keys that can be held at a time, at most the number of slots: held_groups itself may be larger.
size_t count_held(const Runtime &runtime) {
  size_t slots = 0;
  for (const Group &group : runtime.groups) slots += group.plan->slots;
  return std::min<size_t>(runtime.plan.visits.held_groups, slots);
}

std::string name_of(const Group &group, uint32_t piece) {
  return piece == VisitCursor::whole_group || group.piece_count() == 1
             ? format_text("group '{}'", group.name())
             : format_text("piece {} of group '{}'", piece, group.name());
}

}  // namespace

const char *calls_of_holds(std::span<const GatheredPiece> slots) {
  const bool whole =
      std::ranges::any_of(slots, [](const GatheredPiece &slot) { return slot.holds != SlotState::Counts{}; });
  const bool pieces =
      std::ranges::any_of(slots, [](const GatheredPiece &slot) { return slot.piece_holds != SlotState::Counts{}; });
  return whole && pieces ? "fsdp_reshard and fsdp_reshard_piece" : pieces ? "fsdp_reshard_piece" : "fsdp_reshard";
}

// Each piece also counts the holds of the whole group, so the first piece tells how many there are.
std::string describe_holds(std::span<const GatheredPiece> slots) {
  std::string text;
  const auto add = [&](std::string_view piece, fsdp_phase phase, uint32_t count) {
    if (count) text += format_text("{}{}{} x {}", text.empty() ? "" : ", ", piece, phase_name(phase), count);
  };
  for (fsdp_phase phase = FSDP_FORWARD; phase <= FSDP_EVAL; ++phase) {
    uint32_t whole = 0;
    for (const GatheredPiece &slot : slots)
      if (slot.piece == slots.front().piece) whole += slot.holds[static_cast<size_t>(phase)];
    add("", phase, whole);
    for (const GatheredPiece &slot : slots)
      add(format_text("piece {} ", slot.piece), phase, slot.piece_holds[static_cast<size_t>(phase)]);
  }
  return text.empty() ? "none" : text;
}

uint64_t GatherRequest::missing_bytes() const {
  uint64_t bytes = 0;
  for (const GatheredPiece &slot : slots)
    if (!slot.gathered) bytes += slot.pulled_bytes;
  return bytes;
}

std::string GatherRequest::name() const { return name_of(group, piece); }

std::string GatherBuffers::Owner::name() const {
  return name_of(*group, slots.size() == 1 ? slots.front().piece : VisitCursor::whole_group);
}

// If several pieces have one key, these are all pieces of the group, in one of its slots.
GatherBuffers::GatherBuffers(Runtime &runtime)
    : runtime_(runtime), held_(runtime.spec.schedule == FSDP_SCHEDULE_ANY ? count_held(runtime) : 0) {
  for (Group &group : runtime.groups)
    for (uint32_t s = 0; s < group.plan->slots; ++s)
      for (GatheredPiece &slot : group.pieces_in(s)) {
        if (owners_.size() <= slot.key) owners_.resize(slot.key + 1);
        Owner &owner = owners_[slot.key];
        owner = {&group, owner.group ? group.pieces_in(s) : std::span(&slot, 1)};
      }
}

bool GatherBuffers::has_room(const GatherRequest &asked) const {
  if (std::ranges::any_of(asked.slots,
                          [&](const GatheredPiece &slot) { return !slot.gathered && blocked(asked, slot); }))
    return false;
  return !any_order() || !needs_buffer(asked) || choose_buffer(true);
}

void GatherBuffers::take(const GatherRequest &asked, bool ahead, const Drop &drop) {
  if (any_order()) return take_buffer(asked, ahead, drop);
  for (const GatheredPiece &slot : asked.slots)
    if (!slot.gathered) require_buffer(asked, slot);
  for (const GatheredPiece &slot : asked.slots)
    if (!slot.gathered)
      for (const uint32_t key : slot.overlaps) drop(owners_[key]);
}

// Is this owner one for which the request asks?
bool GatherBuffers::is_asked(const GatherRequest &asked, const Owner &owner) {
  return owner.slots.data() >= asked.slots.data() && owner.slots.data() < asked.slots.data() + asked.slots.size();
}

bool GatherBuffers::blocked(const GatherRequest &asked, const GatheredPiece &slot) const {
  return std::ranges::any_of(slot.overlaps,
                             [&](uint32_t key) { return owners_[key].gathered() || is_asked(asked, owners_[key]); });
}

// Advises on a held group. Resident weights keep their buffer from a forward visit to the end of the backward visit.
std::string GatherBuffers::advise_residence(const Owner &held) const {
  if (held.group->spec->resident || !held.group->spec->backward_weights ||
      runtime_.spec.schedule == FSDP_SCHEDULE_INTERLEAVED ||
      std::ranges::none_of(held.slots, [](const GatheredPiece &slot) { return slot.hold_count(FSDP_FORWARD) > 0; }))
    return {};
  return format_text(
      ", or create group '{}' with FSDP_GROUP_RESIDENT, which leaves it its buffer until its backward visit ends",
      held.group->name());
}

// Advises to use FSDP_PLANES_BOTH, with which a buffer for BACKWARD also serves RECOMPUTE.
std::string GatherBuffers::advise_planes(const GatherRequest &asked) const {
  if (asked.phase != FSDP_RECOMPUTE || !asked.group.plan->by_phase ||
      runtime_.spec.schedule != FSDP_SCHEDULE_INTERLEAVED)
    return {};
  return ", or create the model with FSDP_PLANES_BOTH: by phase a RECOMPUTE has the buffer of forward passes";
}

// Throws if a held group or piece has bytes of the slot's buffer, or if the request gathers two pieces into the same
// bytes.
void GatherBuffers::require_buffer(const GatherRequest &asked, const GatheredPiece &slot) const {
  for (const uint32_t key : slot.overlaps) {
    const Owner &other = owners_[key];
    if (is_asked(asked, other))
      fail(FSDP_INVALID_STATE,
           "{}: {} ({}) cannot be gathered whole: its pieces {} and {} share a buffer, because no visit given to "
           "fsdp_set_schedule needs both; add a visit of the whole group there, or hold the pieces one by one",
           asked.unshard_call(), asked.name(), phase_name(asked.phase), slot.piece, other.slots.front().piece);
    if (!other.held()) continue;
    fail(FSDP_INVALID_STATE,
         "{}: {} ({}) needs the buffer that {} holds ({}); return that hold with {} first, or give fsdp_set_schedule "
         "the order of visits in which both are held at once{}{}",
         asked.unshard_call(), asked.name(), phase_name(asked.phase), other.name(), describe_holds(other.slots),
         calls_of_holds(other.slots), advise_residence(other), advise_planes(asked));
  }
}

// `ahead`: the buffer is for a gather ahead, which must not take the buffer of weights that were gathered ahead and are
// not used yet.
std::optional<uint32_t> GatherBuffers::choose_buffer(bool ahead) const {
  return held_.choose([&](uint32_t key) {
    const Owner &other = owners_[key];
    return !other.held() && !(ahead && std::ranges::any_of(other.slots, &GatheredPiece::prefetched));
  });
}

// Does the group of the request have bytes to gather, but no buffer?
bool GatherBuffers::needs_buffer(const GatherRequest &asked) const {
  return asked.group.plan->gathered_bytes() && !held_.has(asked.slots.front().key);
}

// All pieces of a group share one buffer. In debug mode each slot has its own bytes, and only the number of buffers in
// use is limited.
void GatherBuffers::take_buffer(const GatherRequest &asked, bool ahead, const Drop &drop) {
  if (!needs_buffer(asked)) return;
  const uint32_t key = asked.slots.front().key;
  const auto chosen = choose_buffer(ahead);
  if (!chosen) refuse_buffer(asked);
  if (const auto other = held_.buffers()[*chosen].key) drop(owners_[*other]);
  held_.take(*chosen, key);
  if (!runtime_.plan.visits.shared) return;
  const uint64_t shift = runtime_.plan.gather_pool.offsets[*chosen];
  for (GatheredPiece &slot : owners_[key].slots) {
    for (transport::Gather &gather : slot.gathers) gather.to = gather.to - slot.shift + shift;
    slot.shift = shift;
  }
}

void GatherBuffers::refuse_buffer(const GatherRequest &asked) const {
  std::string holders;
  for (const HeldBuffers::Buffer &buffer : held_.buffers())
    holders += format_text("{}'{}' ({})", holders.empty() ? "" : ", ", owners_[*buffer.key].group->name(),
                           describe_holds(owners_[*buffer.key].slots));
  fail(FSDP_INVALID_STATE,
       "{}: {} ({}) finds all {} buffers of FSDP_SCHEDULE_ANY held, by {}; return a hold with fsdp_reshard (or "
       "fsdp_reshard_piece) first, or raise held_groups in fsdp_schedule_options",
       asked.unshard_call(), asked.name(), phase_name(asked.phase), held_.count(), holders);
}

}  // namespace fsdp::engine
