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
  uint64_t gathered_bytes = 0;          // of the buffer that a gather fills; 0: needs none
  uint64_t prefetch_bytes = 0;          // what a gather of this group counts against the byte limit
  std::vector<uint64_t> grad_bytes{0};  // of the transient full gradient, by part; 0: frozen or persistent
  bool resident = false;
  bool root = false;      // with FSDP_SCHEDULE_SEQUENTIAL: visited first and last in each direction
  bool by_phase = false;  // BACKWARD gathers other planes than the other phases, into a buffer of its own
  bool trainable = true;
};

struct ScheduleSpec {
  fsdp_schedule_kind kind = FSDP_SCHEDULE_SEQUENTIAL;
  std::vector<fsdp_visit> visits;  // with FSDP_SCHEDULE_VISITS
  std::vector<ScheduledGroup> groups;
  uint32_t prefetch_depth = 1;  // 0: none
  uint64_t prefetch_bytes = 0;  // 0: no limit
  uint32_t pending_grads = 2;   // transient full gradients alive at once
  uint32_t held_groups = 0;     // with FSDP_SCHEDULE_ANY: gathered buffers in use at once
  bool recompute = false;       // groups by phase hold in a BACKWARD visit also what FORWARD gathers
  bool apart = false;           // every buffer has bytes of its own
};

struct VisitOrder {
  // Training visits; with INTERLEAVED the forward visits come first and the two halves advance independently.
  std::vector<fsdp_visit> train;
  std::vector<fsdp_visit> eval;  // forward visits, phase FSDP_EVAL
  // For position i of each list: positions of the same list whose groups are to be gathered ahead, nearest first.
  std::vector<std::vector<uint32_t>> train_prefetch, eval_prefetch;
  // Pool requests. Gathered buffers: `slots` numbers a group, key = slots * group + slot. With FSDP_SCHEDULE_ANY there
  // are `shared` buffers of one size instead, which any key takes in turn, unless every buffer is apart.
  uint32_t slots = 1;
  uint32_t shared = 0;
  uint32_t held_groups = UINT32_MAX;  // so many keys may be gathered at once
  std::vector<PoolRequest> gathered;
  std::vector<PoolRequest> grads;  // by group and part
  uint32_t open_grads = 0;         // of groups that several BACKWARD visits open, those between them too
};

// Which of a group's buffers a phase uses. INTERLEAVED has one for each direction, groups by phase one for BACKWARD.
constexpr uint32_t gather_slot(uint32_t slots, bool by_phase, fsdp_phase phase) {
  return slots == 2 && (phase == FSDP_BACKWARD || (phase == FSDP_RECOMPUTE && !by_phase)) ? 1 : 0;
}
constexpr uint32_t gather_slots(fsdp_schedule_kind kind, bool by_phase) {
  return kind == FSDP_SCHEDULE_INTERLEAVED || by_phase ? 2 : 1;
}
inline uint32_t gather_slot(const ScheduleSpec &spec, uint32_t group, fsdp_phase phase) {
  const bool by_phase = spec.groups[group].by_phase;
  return gather_slot(gather_slots(spec.kind, by_phase), by_phase, phase);
}

// What is wrong with the visits: a group out of range, or a phase other than FORWARD, BACKWARD and RECOMPUTE. Or a
// trainable group has no BACKWARD visit, or one has a BACKWARD or RECOMPUTE visit before its first FORWARD one.
std::vector<std::string> find_violations(const ScheduleSpec &spec);
// Throws INVALID_ARGUMENT with the first of them.
VisitOrder build_visit_order(const ScheduleSpec &spec);

// What each visit of a pass gathers ahead, and from when to when that keeps each visit's weights gathered. Inside the
// memory room only.

inline constexpr uint32_t never = UINT32_MAX;  // of a position

struct PrefetchWindow {
  std::vector<std::vector<uint32_t>> ahead;  // for each position: positions to gather ahead, nearest first
  std::vector<uint32_t> begins;              // for each position: the position from which on its group is gathered
};

// `visits` is one chain: the passes do not overlap. resident_from[group] is the position of the visit after which a
// resident group stays gathered, UINT32_MAX if it does not.
PrefetchWindow open_windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec,
                            std::span<const uint32_t> resident_from);

}  // namespace fsdp::memory
