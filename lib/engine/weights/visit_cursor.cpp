// SPDX-License-Identifier: Apache-2.0
#include "engine/weights/visit_cursor.h"

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
  // After its end a pass starts again.
  now = position + 1 == visits(phase).size() ? 0 : position + 1;
  return position;
}

// Returns the next visit, which is at position `from` or later. If the pass has none left, returns its first visit.
// Pieces that are unsharded one by one during a visit of the whole group are in that visit, until one comes again.
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

}  // namespace fsdp::engine
