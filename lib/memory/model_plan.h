// SPDX-License-Identifier: Apache-2.0
// Where every byte of a model lies on every rank: a pure function of the declaration. What it says is what the engine
// allocates, no more and no less.
//
// The parameters of a group are split into buckets of one dtype and trainability, each with a flat layout. Homes:
//   shared   one arena for all ranks, buckets whole and one after the other, each rank owning its slices of them.
//            Mapped: the arena is what unshard shows. Copied: the shards that gathers pull.
//   whole    one part per rank in an arena, each holding whole buckets; gathers refresh it in place at publish
//   shard    only this rank's slices, one after the other, in its part of an arena (memory that peers cannot read)
//   local    whole buckets in private memory (no_shard)
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "layout/flat_layout.h"
#include "memory/model_spec.h"
#include "memory/pool_plan.h"
#include "memory/visit_order.h"

namespace fsdp::memory {

enum class ComputeHome { shared, whole, shard, local };

struct BucketPlan {
  uint32_t group = 0;
  fsdp_dtype dtype = FSDP_FLOAT32;       // of the compute weights
  fsdp_dtype grad_dtype = FSDP_FLOAT32;  // of full gradients
  fsdp_dtype wire_dtype = FSDP_FLOAT32;  // what each addend is rounded to
  bool frozen = false;
  bool main_is_compute = false;  // fp32 weights: the optimizer works on the compute weights themselves
  bool main_is_whole = false;    // main weights, main grads and states are kept for the full buffer (no_shard)
  bool grad_is_full = false;     // the main grads are the full gradient buffer (its own slice)
  // The layout's ranks are the mesh's slots. An inner rank's `slices` neighbouring slots are kept together where all of
  // them are summed: in compute weights, in full gradients, and here in main grads.
  uint32_t slices = 1;
  bool grad_is_grouped = false;
  bool uses_partial = false;     // inner sums go to the partial buffer, from where the outer axis adds its slot
  std::vector<uint32_t> params;  // indices in the group, in the layout's order
  layout::FlatLayout layout;
  // Byte offsets, each in the memory that its role names.
  uint64_t compute_offset = 0;    // in the home's arena part or memory
  uint64_t gathered_offset = 0;   // in the group's gathered buffer (copied ZeRO-3)
  uint64_t main_offset = 0;       // unless main_is_compute
  uint64_t grad_offset = 0;       // main grads, unless grad_is_full: private, or with no_shard in the grads arena part
  uint64_t full_grad_offset = 0;  // in the group's full gradient buffer
  uint64_t partial_offset = 0;    // in each of the two partial buffers
  uint64_t wire_offset = 0;       // in the buffer of rounded gradients
  std::vector<uint64_t> state_offsets;

  uint64_t main_count() const { return main_is_whole ? layout.full_count : layout.shard_count; }
  uint64_t inner_count() const { return layout.shard_count * slices; }
  uint64_t grad_count() const { return grad_is_grouped ? inner_count() : main_count(); }
};

struct GroupPlan {
  ComputeHome home = ComputeHome::shared;
  bool gathers = false;         // unshard must gather (ZeRO-3 that communicates)
  bool copies = false;          // ... by copying into a pool buffer
  bool trainable = false;
  bool persistent_grad = false;  // the full gradient buffer is its own for ever
  std::vector<uint32_t> buckets;
  uint64_t compute_bytes = 0;    // of the whole group in its home, a multiple of a page where shared
  uint64_t compute_offset = 0;
  uint64_t gathered_bytes = 0;   // of a copy of the full weights
  uint64_t full_grad_bytes = 0;
  uint64_t full_grad_offset = 0;  // in the rank's part of the grads arena
};

struct ModelPlan {
  std::vector<BucketPlan> buckets;
  std::vector<GroupPlan> groups;
  VisitOrder visits;
  PoolPlan gather_pool;
  PoolPlan grad_pool;
  // Sizes in bytes.
  uint64_t shared_compute_bytes = 0;      // the arena of home shared, all ranks
  uint64_t shared_compute_own_bytes = 0;  // this is what one rank writes of it
  uint64_t whole_compute_bytes = 0;       // one rank's part
  uint64_t shard_compute_bytes = 0;       // one rank's part
  uint64_t local_compute_bytes = 0;
  uint64_t main_bytes = 0;
  uint64_t grad_bytes = 0;             // private main grads
  uint64_t partial_bytes = 0;          // two buffers of inner sums, which take turns
  uint64_t wire_bytes = 0;             // rounded gradients of one group: reduces come one after the other
  uint64_t grads_part_bytes = 0;       // one rank's part of the grads arena, a multiple of a page:
  uint64_t persistent_grad_bytes = 0;  //   persistent full gradients and no_shard main grads first,
  uint64_t grad_pool_offset = 0;       //   then the pool of transient ones
  uint64_t optimizer_bytes = 0;
  uint64_t gather_bytes = 0;
  uint64_t staging_bytes = 0;        // private scratch
  uint64_t staging_part_bytes = 0;   // one rank's part of the staging arena
  uint64_t step_bytes = 0;           // on a device: the numbers of a step that graphs read
  uint64_t message_bytes = 0;        // for messages over the outer axis
  uint64_t device_team_bytes = 0;    // for exchanges of memory that peers cannot read
  uint64_t param_count = 0;          // parameters of the model
  uint64_t element_count = 0;
  uint64_t padding_count = 0;
  uint64_t layout_hash = 0;

  // Bytes that inner rank `rank` of `ranks` accounts for, by fsdp_role; [0] is the sum.
  std::array<uint64_t, 8> role_bytes(uint32_t rank, uint32_t ranks) const;
};

// Parameters whose norms travel at once: scratch must not grow as parameters times ranks.
inline constexpr uint64_t norm_chunk = 64;
inline constexpr uint64_t page_bytes = 4096;
inline constexpr uint64_t buffer_alignment = 512;

ModelPlan plan_model(const ModelSpec &spec);

// Empty, or which promise of a bucket's layout or of a pool is broken. For tests and debug mode.
std::string validate(const ModelPlan &plan, const ModelSpec &spec);

}  // namespace fsdp::memory
