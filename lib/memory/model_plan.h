// SPDX-License-Identifier: Apache-2.0
// Where every byte of a model lies on every rank: a pure function of the declaration. What it says is what the engine
// allocates, no more and no less.
//
//   group    parameters that are gathered together, in buckets
//   part     those of them whose full gradients are lent and reduced together: all, or some (grad_parts.h)
//   bucket   those of one dtype, trainability, quantization and part, with a flat layout
//   plane    one stored form of a bucket's elements: a row (plane.h)
//   region   the memory that planes lie in: a row too
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layout/flat_layout.h"
#include "memory/model_spec.h"
#include "memory/plane.h"
#include "memory/pool_plan.h"
#include "memory/visit_order.h"

namespace fsdp::memory {

struct BucketPlan {
  uint32_t group = 0;
  fsdp_dtype dtype = FSDP_FLOAT32;       // of the parameters
  fsdp_quantization quantization = 0;    // what their compute weights are; 0: numbers of that dtype
  fsdp_dtype grad_dtype = FSDP_FLOAT32;  // of full gradients
  fsdp_dtype wire_dtype = FSDP_FLOAT32;  // what each addend is rounded to
  bool frozen = false;
  // The layout's ranks are the mesh's slots. An inner rank's `slices` neighbouring slots are kept together where all of
  // them are summed.
  uint32_t slices = 1;
  std::vector<uint32_t> params;  // indices in the group, in the layout's order
  layout::FlatLayout layout;
  std::shared_ptr<const layout::FlatLayout> scale_layout;  // of quantized parameters, else NULL
  std::vector<PlanePlan> planes;                           // by kind, then slot, then index

  // NULL: it has none.
  const PlanePlan *find(PlaneKind kind, uint32_t index = 0) const;
  const PlanePlan &plane(PlaneKind kind, uint32_t index = 0) const { return *find(kind, index); }
  // Where the elements that this rank answers for are kept: loads write there.
  const PlanePlan &home() const { return plane(frozen ? PlaneKind::compute : PlaneKind::main); }
  // Ways in which its compute weights are stored.
  uint32_t forms() const {
    return static_cast<uint32_t>(std::ranges::count(planes, PlaneKind::compute, &PlanePlan::kind));
  }
  const layout::FlatLayout &layout_of(const PlanePlan &plane) const {
    return is_scales(plane.kind) ? *scale_layout : layout;
  }
  // Numbers that a plane has.
  uint64_t count(const PlanePlan &plane) const {
    const layout::FlatLayout &numbers = layout_of(plane);
    return plane.extent == Extent::whole ? numbers.full_count
                                         : numbers.shard_count * (plane.extent == Extent::group ? slices : 1);
  }
  uint64_t bytes(const PlanePlan &plane, const char *what) const;
};

// A group's bytes in a region, where all of its buckets lie together.
struct GroupBytes {
  RegionId region = RegionId::local_compute;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The last two are empty where nothing is trained.
struct PartPlan {
  uint32_t group = 0;
  std::vector<uint32_t> params;   // indices in the group, in the order declared
  std::vector<uint32_t> buckets;  // of the model
  GroupBytes full_grad;           // whole pages in debug mode
};

struct GroupPlan {
  bool gathers = false;       // unshard must gather (ZeRO-3 that communicates)
  bool copies = false;        // ... by copying into a pool buffer
  bool parts_phases = false;  // BACKWARD reads other planes than the other phases
  bool by_phase = false;      // ... and gathers them
  uint32_t slots = 1;         // buffers, or holds, that it has
  bool trainable = false;
  bool persistent_grad = false;  // the full gradient buffer is its own for ever
  std::vector<uint32_t> buckets;
  uint32_t first_part = 0, part_count = 0;                       // of the model; never none
  GroupBytes compute;                                            // whole pages where they are shown apart
  uint64_t gathered_bytes = 0;                                   // of a copy of the full weights
  std::vector<std::vector<std::vector<uint64_t>>> scale_shapes;  // by parameter and form; empty: no scales

  uint32_t slot_of(fsdp_phase phase) const { return gather_slot(slots, by_phase, phase); }
};

struct ModelPlan {
  std::vector<BucketPlan> buckets;
  std::vector<GroupPlan> groups;
  std::vector<PartPlan> parts;  // group by group
  uint32_t pending_grads = 0;   // full gradients that take turns which may be alive at once
  std::array<RegionPlan, region_count> regions;
  VisitOrder visits;
  PoolPlan gather_pool;
  PoolPlan grad_pool;
  uint64_t acted_message_bytes = 0;  // of RegionId::messages, what only real hosts would use
  uint64_t param_count = 0;          // parameters of the model
  uint64_t quantized_count = 0;      // ... that are quantized
  uint64_t amax_count = 0;           // ... of which the ranks find one scale together
  uint64_t element_count = 0;
  uint64_t padding_count = 0;
  uint64_t layout_hash = 0;

  std::span<PartPlan> parts_of(const GroupPlan &group) {
    return std::span(parts).subspan(group.first_part, group.part_count);
  }
  std::span<const PartPlan> parts_of(const GroupPlan &group) const {
    return std::span(parts).subspan(group.first_part, group.part_count);
  }
  RegionPlan &region(RegionId id) { return regions[static_cast<size_t>(id)]; }
  const RegionPlan &region(RegionId id) const { return regions[static_cast<size_t>(id)]; }
  // Bytes that inner rank `rank` of `ranks` accounts for, by fsdp_role; [0] is the sum.
  std::array<uint64_t, 8> role_bytes(uint32_t rank, uint32_t ranks) const;
};

// At the end of RegionId::norms: a count for each quantized parameter, then this rank's amaxes: nonfinite_weights.h.
// Counts are at the end of RegionId::device_norms as well.
uint64_t nonfinite_count_bytes(const ModelPlan &plan);
uint64_t nonfinite_bytes(const ModelPlan &plan);

// Parameters whose norms travel at once: scratch must not grow as parameters times ranks.
inline constexpr uint64_t norm_chunk = 64;
inline constexpr uint64_t norm_head_bytes = 128;  // a rank's share of the norm of all, and that norm: shared_norm.h
inline constexpr uint64_t amax_chunk = 512;       // ... and parameters whose amaxes do
inline constexpr uint64_t page_bytes = 4096;
inline constexpr uint64_t adamw_step_bytes = 64;  // the numbers of one step, with room
inline constexpr uint64_t buffer_alignment = 512;
inline constexpr uint32_t partial_turns = 2;  // buffers of inner sums, which take turns

// What is wrong with a declaration that has groups, one text each; empty if nothing.
std::vector<std::string> find_violations(const ModelSpec &spec);

ModelPlan plan_model(const ModelSpec &spec);
// Without what a transport that receives slices needs: another one was chosen at the seal.
void drop_received(ModelPlan &plan);

// Empty, or which promise of a bucket's layout, of the planes' places or of a pool is broken. For tests and debug mode.
std::string validate(const ModelPlan &plan, const ModelSpec &spec);

}  // namespace fsdp::memory
