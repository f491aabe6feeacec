// SPDX-License-Identifier: Apache-2.0
// Where a model is in its schedule: which visit an unshard begins.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/visit_order.h"

namespace fsdp::engine {

class VisitCursor {
 public:
  static constexpr uint32_t no_position = UINT32_MAX;
  static constexpr uint32_t whole_group = UINT32_MAX;

  VisitCursor(const memory::VisitOrder &order, uint32_t group_count);

  // Where the search for the next visit of a group with several visits begins.
  struct Positions {
    uint32_t train = 0, eval = 0;
  };
  Positions positions() const { return now_; }
  void set_positions(Positions positions) { now_ = positions; }
  void restart() { now_ = {}; }

  // The list of visits to which the phase belongs, and what each visit gathers ahead.
  const std::vector<fsdp_visit> &visits(fsdp_phase phase) const {
    return phase == FSDP_EVAL ? order_.eval : order_.train;
  }
  const std::vector<uint32_t> &ahead(fsdp_phase phase, uint32_t position) const {
    return phase == FSDP_EVAL ? order_.eval_prefetch[position] : order_.train_prefetch[position];
  }
  bool has_visits(uint32_t group, fsdp_phase phase) const { return !positions_of(group, phase).empty(); }
  // Moves to the visit that begins when the piece (or whole_group) is unsharded, and returns its position. Returns
  // no_position if the schedule has no visit of the group in this phase. `last` is the position at which this piece was
  // unsharded last time.
  uint32_t advance(uint32_t group, uint32_t piece, fsdp_phase phase, uint32_t last);

 private:
  const std::vector<uint32_t> &positions_of(uint32_t group, fsdp_phase phase) const {
    return positions_[4 * size_t{group} + static_cast<size_t>(phase) - 1];
  }
  uint32_t find(uint32_t group, uint32_t piece, fsdp_phase phase, uint32_t last, uint32_t from) const;

  const memory::VisitOrder &order_;
  std::vector<std::vector<uint32_t>> positions_;  // by group and phase
  Positions now_;
};

}  // namespace fsdp::engine
