// SPDX-License-Identifier: Apache-2.0
// The place of every byte of a model on every rank: a pure function of the declaration. The engine allocates exactly
// what the plan says.
//
//   group    parameters that are declared together, in buckets
//   piece    parameters of a group that are gathered together: all, or some (fsdp_param.piece)
//   part     parameters of a group whose full gradients are lent and reduced together: all, or some (grad_parts.h)
//   bucket   parameters of one piece and part with the same dtype, optimizer and quantization, in a flat layout
//   plane    one stored form of a bucket's elements: a row of a table (plane.h)
//   region   memory that planes lie in: also a row of a table
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layout/flat_layout.h"
#include "memory/matrix_plan.h"
#include "memory/model_spec.h"
#include "memory/plane.h"
#include "memory/pool_plan.h"
#include "memory/visit_order.h"

namespace fsdp::memory {

struct BucketPlan {
  uint32_t group = 0, piece = 0;
  uint32_t mesh = 0;                     // index in ModelSpec::meshes
  fsdp_dtype dtype = FSDP_FLOAT32;       // dtype of the parameters
  fsdp_quantization quantization = 0;    // quantization of the compute weights; 0: they are numbers of `dtype`
  fsdp_dtype grad_dtype = FSDP_FLOAT32;  // dtype of full gradients
  fsdp_dtype wire_dtype = FSDP_FLOAT32;  // dtype to which each addend is rounded
  bool frozen = false;
  bool coded_states = false;  // AdamW's states are codes with scales
  fsdp_main_storage main_storage = FSDP_MAIN_FLOAT32;
  // The ranks of the layout are the slots of the mesh. In planes of Extent::group, the `slices` neighbouring slots of
  // an inner rank are together.
  uint32_t slices = 1;
  std::vector<uint32_t> params;  // indices in the group, in the layout's order
  layout::FlatLayout layout;
  std::shared_ptr<const layout::FlatLayout> scale_layout;  // layout of the scales; NULL if nothing is quantized
  std::shared_ptr<const layout::FlatLayout> state_layout;  // layout of the scales of states; NULL: no state has scales
  std::vector<PlanePlan> planes;                           // ordered by kind, then slot, then index

  // Returns NULL if the bucket has no such plane.
  const PlanePlan *find(PlaneKind kind, uint32_t index = 0) const;
  const PlanePlan &plane(PlaneKind kind, uint32_t index = 0) const { return *find(kind, index); }
  // The plane with the elements that this rank owns, into which loads write.
  const PlanePlan &owned_plane() const { return plane(frozen ? PlaneKind::compute : PlaneKind::main); }
  // The number of forms in which the compute weights are stored.
  uint32_t forms() const {
    return static_cast<uint32_t>(std::ranges::count(planes, PlaneKind::compute, &PlanePlan::kind));
  }
  const layout::FlatLayout &layout_of(const PlanePlan &plane) const {
    return is_scales(plane.kind) ? *scale_layout : plane.kind == PlaneKind::state_scales ? *state_layout : layout;
  }
  // The number of elements of a plane.
  uint64_t count(const PlanePlan &plane) const {
    const layout::FlatLayout &numbers = layout_of(plane);
    return plane.extent == Extent::whole ? numbers.full_count
                                         : numbers.shard_count * (plane.extent == Extent::group ? slices : 1);
  }
  uint64_t bytes(const PlanePlan &plane, const char *what) const;
};

// The bytes of a piece or a part in a region; all of its buckets are together.
struct GroupBytes {
  RegionId region = RegionId::local_compute;
  uint32_t mesh = 0;  // index of the group's mesh
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// A rank's place on the inner axis of a mesh.
struct InnerPlace {
  uint32_t rank = 0, ranks = 1;
};

// `buckets` and `full_grad` are empty if no parameter of the group is trainable.
struct PartPlan {
  uint32_t group = 0;
  std::vector<uint32_t> params;   // indices in the group, in the order declared
  std::vector<uint32_t> buckets;  // indices in the model
  GroupBytes full_grad;           // whole pages in debug mode
};

struct PiecePlan {
  std::vector<uint32_t> buckets;  // indices in the model
  GroupBytes compute;             // whole pages if a separate view shows the weights (ModelSpec::shows_apart)
  uint64_t gathered_bytes = 0;    // size of a copy of the full weights
  uint64_t element_count = 0, padding_count = 0;
};

struct GroupPlan {
  bool gathers = false;       // unshard must gather: weights are sharded, and the mesh communicates
  bool copies = false;        // unshard gathers by copying into a pool buffer
  bool parts_phases = false;  // BACKWARD reads other planes than the other phases do
  bool by_phase = false;      // parts_phases, and the planes are gathered
  uint32_t slots = 1;         // number of buffers, or of separate holds, of the group
  bool trainable = false;
  bool persistent_grad = false;  // the group keeps its full gradient buffer as long as the model exists
  std::vector<uint32_t> buckets;
  uint32_t first_part = 0, part_count = 0;                       // its parts in ModelPlan::parts, at least one
  std::vector<PiecePlan> pieces;                                 // at least one
  bool by_piece = false;                                         // each piece is gathered into a buffer of its own
  std::vector<std::vector<std::vector<uint64_t>>> scale_shapes;  // by parameter and form; empty: no scales

  uint32_t slot_of(fsdp_phase phase) const { return gather_slot(slots, by_phase, phase); }
  RegionId compute_region() const { return pieces.front().compute.region; }
  uint64_t gathered_bytes() const {
    uint64_t bytes = 0;
    for (const PiecePlan &piece : pieces) bytes += piece.gathered_bytes;
    return bytes;
  }
};

// Bytes by fsdp_role; [0] is the sum.
using RoleBytes = std::array<uint64_t, FSDP_ROLE_HOME + 1>;

struct ModelPlan {
  std::vector<BucketPlan> buckets;
  std::vector<GroupPlan> groups;
  std::vector<PartPlan> parts;  // ordered by group
  uint32_t pending_grads = 0;   // maximum of full gradients alive at once, among those that take turns
  // region_count regions for each mesh. A region that exists only once is stored with the first mesh.
  std::vector<RegionPlan> regions = std::vector<RegionPlan>(region_count);
  VisitOrder visits;
  PoolPlan gather_pool;
  PoolPlan grad_pool;
  MatrixPlan matrices;
  uint64_t acted_message_bytes = 0;  // bytes of RegionId::messages that simulated hosts do not use
  uint64_t param_count = 0;          // parameters of the model
  uint64_t quantized_count = 0;      // trainable parameters that are quantized
  uint64_t amax_count = 0;           // trainable parameters with one scale, which the ranks find together
  uint64_t element_count = 0;
  uint64_t padding_count = 0;
  uint64_t layout_hash = 0;

  std::span<PartPlan> parts_of(const GroupPlan &group) {
    return std::span(parts).subspan(group.first_part, group.part_count);
  }
  std::span<const PartPlan> parts_of(const GroupPlan &group) const {
    return std::span(parts).subspan(group.first_part, group.part_count);
  }
  // The number of a region in `regions`.
  static size_t number_of(RegionId id, uint32_t mesh) {
    return (is_by_mesh(id) ? mesh : 0) * region_count + static_cast<size_t>(id);
  }
  RegionPlan &region(RegionId id, uint32_t mesh = 0) { return regions[number_of(id, mesh)]; }
  const RegionPlan &region(RegionId id, uint32_t mesh = 0) const { return regions[number_of(id, mesh)]; }
  const RegionPlan &region(const PlanePlan &plane) const { return region(plane.region, plane.mesh); }
  // The bytes by role of a rank with these places, one in each mesh.
  RoleBytes role_bytes(std::span<const InnerPlace> places) const;
};

// RegionId::norms ends with a count for each quantized parameter and then this rank's amaxes: see
// engine/weights/quantizer.h. RegionId::device_norms also ends with counts.
uint64_t nonfinite_count_bytes(const ModelPlan &plan);
uint64_t nonfinite_bytes(const ModelPlan &plan);

// The number of parameters whose norms are exchanged at once. It is limited, because scratch must not grow as
// parameters times ranks.
inline constexpr uint64_t norm_chunk = 64;
inline constexpr uint64_t norm_head_bytes = 128;  // for a rank's share of the total norm, and the norm (SharedNorm)
inline constexpr uint64_t amax_chunk = 512;       // the number of parameters whose amaxes are exchanged at once
inline constexpr uint64_t page_bytes = 4096;
inline constexpr uint64_t adamw_step_bytes = 64;  // upper bound for the numbers of one step
inline constexpr uint64_t buffer_alignment = 512;
inline constexpr uint32_t partial_turns = 2;  // number of buffers of inner sums, which take turns

// Lists the violations in a declaration that has groups, one text for each; empty if there are none.
std::vector<std::string> find_violations(const ModelSpec &spec);

ModelPlan plan_model(const ModelSpec &spec);
// Removes the planes that only a transport that receives slices needs. Called if the seal chooses another transport.
void drop_received(ModelPlan &plan);

// Checks the layouts of buckets, the places of planes, and the pools. Returns an empty text, or says which promise is
// broken. For tests and debug mode.
std::string validate(const ModelPlan &plan, const ModelSpec &spec);

}  // namespace fsdp::memory
