// SPDX-License-Identifier: Apache-2.0
// The schedule as pure data: the order of visits, what each visit prefetches, and the live intervals of gathered
// weights and of full gradients that follow from it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp.h"
#include "memory/pool_plan.h"

namespace fsdp::memory {

struct ScheduledGroup {
  uint64_t gathered_bytes = 0;  // of the buffer that a gather fills; 0: needs none
  uint64_t prefetch_bytes = 0;  // what a gather of this group counts against the byte limit
  uint64_t grad_bytes = 0;      // of the transient full gradient buffer; 0: frozen or persistent
  bool resident = false;
  bool root = false;  // with FSDP_SCHEDULE_SEQUENTIAL: visited first and last in each direction
  bool trainable = true;
};

struct ScheduleSpec {
  fsdp_schedule_kind kind = FSDP_SCHEDULE_SEQUENTIAL;
  std::vector<fsdp_visit> visits;  // with FSDP_SCHEDULE_VISITS
  std::vector<ScheduledGroup> groups;
  uint32_t prefetch_depth = 1;  // 0: none
  uint64_t prefetch_bytes = 0;  // 0: no limit
  uint32_t max_pending_groups = 2;
  bool apart = false;  // every buffer has bytes of its own
};

struct VisitOrder {
  // Training visits; with INTERLEAVED the forward visits come first and the two halves advance independently.
  std::vector<fsdp_visit> train;
  std::vector<fsdp_visit> eval;  // forward visits, phase FSDP_EVAL
  // For position i of each list: positions of the same list whose groups are to be gathered ahead, nearest first.
  std::vector<std::vector<uint32_t>> train_prefetch, eval_prefetch;
  // Pool requests. Gathered buffers: one a group, or with INTERLEAVED two a group (2 * group + (phase is backward)).
  std::vector<PoolRequest> gathered;
  std::vector<PoolRequest> grads;  // one a group
};

// The number of the gathered buffer that a phase of a group uses.
constexpr uint32_t gathered_key(fsdp_schedule_kind kind, uint32_t group, fsdp_phase phase) {
  if (kind != FSDP_SCHEDULE_INTERLEAVED) return group;
  return 2 * group + (phase == FSDP_BACKWARD || phase == FSDP_RECOMPUTE ? 1 : 0);
}

// What is wrong with the visits: a group out of range, a phase other than FORWARD and BACKWARD, a trainable group
// without BACKWARD visit, a BACKWARD visit before the group's first FORWARD one.
std::vector<std::string> find_violations(const ScheduleSpec &spec);
// Throws INVALID_ARGUMENT with the first of them.
VisitOrder build_visit_order(const ScheduleSpec &spec);

}  // namespace fsdp::memory
