// SPDX-License-Identifier: Apache-2.0
// The schedule as pure data: the order of visits, the groups that each visit prefetches, and the live intervals of
// gathered weights and of full gradients.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp.h"
#include "memory/pool_plan.h"

namespace fsdp::memory {

// A buffer of gathered weights: of a group or, if visits name the group's pieces, of one piece.
struct GatherBuffer {
  uint64_t bytes = 0;           // 0: the group is not gathered into a buffer
  uint64_t prefetch_bytes = 0;  // bytes by which a gather counts against the limit of prefetches
};

struct ScheduledGroup {
  std::vector<GatherBuffer> buffers = std::vector<GatherBuffer>(1);  // one for the group, or one for each of its pieces
  uint32_t piece_count = 1;
  uint32_t mesh = 0;                    // full gradients of different meshes are in different memory
  std::vector<uint64_t> grad_bytes{0};  // size of each part's transient full gradient; 0: frozen or persistent
  bool resident = false;
  bool root = false;      // with FSDP_SCHEDULE_SEQUENTIAL: visited first and last in each direction
  bool by_phase = false;  // BACKWARD gathers other planes than the other phases do, into a separate buffer
  bool trainable = true;
  bool backward_weights = true;  // do BACKWARD visits read weights?
};

// Numbers the buffers of all groups, and finds the buffers that a visit reads.
class BufferNumbers {
 public:
  BufferNumbers() = default;
  explicit BufferNumbers(std::span<const ScheduledGroup> groups) {
    for (const ScheduledGroup &group : groups)
      first_.push_back(first_.back() + static_cast<uint32_t>(group.buffers.size()));
  }

  struct Numbers {
    uint32_t begin, end;
  };

  uint32_t count() const { return first_.back(); }
  bool by_piece(uint32_t group) const { return first_[group + 1] - first_[group] > 1; }
  uint32_t number(uint32_t group, uint32_t piece) const { return first_[group] + (by_piece(group) ? piece : 0); }
  Numbers of(const fsdp_visit &visit) const {
    if (visit.piece == 0 || !by_piece(visit.group_index))
      return {first_[visit.group_index], first_[visit.group_index + 1]};
    const uint32_t number = first_[visit.group_index] + visit.piece - 1;
    return {number, number + 1};
  }

 private:
  std::vector<uint32_t> first_{0};
};

struct ScheduleSpec {
  fsdp_schedule_kind kind = FSDP_SCHEDULE_SEQUENTIAL;
  std::vector<fsdp_visit> visits;  // with FSDP_SCHEDULE_VISITS
  std::vector<ScheduledGroup> groups;
  uint32_t prefetch_depth = 1;  // 0: no prefetch
  uint64_t prefetch_bytes = 0;  // 0: no limit
  uint32_t pending_grads = 2;   // transient full gradients alive at once
  uint32_t held_groups = 0;     // with FSDP_SCHEDULE_ANY: maximum of gathered buffers in use at once
  bool recompute = false;       // a BACKWARD visit of a group by phase also holds the planes of FORWARD
  bool apart = false;           // no two buffers share bytes
};

struct VisitOrder {
  // Training visits; with INTERLEAVED the forward visits come first and the two halves advance independently.
  std::vector<fsdp_visit> train;
  std::vector<fsdp_visit> eval;  // forward visits, phase FSDP_EVAL
  // For position i of each list: the positions in the same list that visit i gathers ahead, nearest first.
  std::vector<std::vector<uint32_t>> train_prefetch, eval_prefetch;
  // Pool requests. There are `slots` requests for each buffer of gathered weights; key() returns the index of one. With
  // FSDP_SCHEDULE_ANY there are instead `shared` buffers of one size, and any key may use any of them, unless no two
  // buffers may share bytes (`apart`).
  BufferNumbers buffers;
  uint32_t slots = 1;
  uint32_t shared = 0;
  uint32_t held_groups = UINT32_MAX;  // maximum of keys that may be gathered at once
  std::vector<PoolRequest> gathered;
  std::vector<PoolRequest> grads;  // by group and part
  uint32_t open_grads = 0;         // transient full gradients that stay open between several BACKWARD visits

  uint32_t key(uint32_t group, uint32_t piece, uint32_t slot) const {
    return slots * buffers.number(group, piece) + slot;
  }
};

// The number of the buffer that a group uses in a phase. With INTERLEAVED a group has one buffer for each direction.
// Groups by phase have a second buffer for BACKWARD. A group whose weights BACKWARD does not read always has one
// buffer.
constexpr uint32_t gather_slot(uint32_t slots, bool by_phase, fsdp_phase phase) {
  return slots == 2 && (phase == FSDP_BACKWARD || (phase == FSDP_RECOMPUTE && !by_phase)) ? 1 : 0;
}
constexpr uint32_t gather_slots(fsdp_schedule_kind kind, bool by_phase, bool backward_weights) {
  return backward_weights && (kind == FSDP_SCHEDULE_INTERLEAVED || by_phase) ? 2 : 1;
}
inline uint32_t gather_slot(const ScheduleSpec &spec, uint32_t group, fsdp_phase phase) {
  const ScheduledGroup &of = spec.groups[group];
  return gather_slot(gather_slots(spec.kind, of.by_phase, of.backward_weights), of.by_phase, phase);
}

// Lists what is wrong with the visits: a group or a piece out of range, or a phase other than FORWARD, BACKWARD and
// RECOMPUTE. Also wrong are a trainable group without BACKWARD visit, and a BACKWARD or RECOMPUTE visit before the
// group's first FORWARD visit.
std::vector<std::string> find_violations(const ScheduleSpec &spec);
// Throws INVALID_ARGUMENT with the first violation if there are any.
VisitOrder build_visit_order(const ScheduleSpec &spec);

// Finds what each visit of a pass gathers ahead, and the position from which on the weights of each visit are therefore
// gathered. Only for the memory room.

inline constexpr uint32_t never = UINT32_MAX;  // the position of a visit that does not exist

// A buffer that a visit reads.
struct BufferRead {
  uint32_t position, buffer;
  uint32_t previous;  // position of the previous visit that read the buffer in the same slot, or `never`
  uint32_t begin;     // the position from which the buffer is filled for this visit
};

struct PrefetchWindow {
  std::vector<std::vector<uint32_t>> ahead;  // for each position: positions to gather ahead, nearest first
  std::vector<BufferRead> reads;             // ordered by position
};

// `visits` is one chain, in which passes do not overlap. resident_from[buffer] is the position of the visit after which
// a buffer stays gathered, or `never` if it does not stay gathered.
PrefetchWindow open_windows(std::span<const fsdp_visit> visits, const ScheduleSpec &spec,
                            std::span<const uint32_t> resident_from);

}  // namespace fsdp::memory
