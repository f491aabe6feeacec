// SPDX-License-Identifier: Apache-2.0
// The stored forms of a bucket's elements, and the memory they lie in: rows of two tables. Code that allocates,
// accounts, clears, registers, describes, updates, loads or compares walks these rows; what a row means is known to the
// planner that adds it and to the calls that are about that kind.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "fsdp.h"
#include "layout/flat_layout.h"
#include "layout/mesh.h"
#include "memory/model_spec.h"

namespace fsdp::memory {

enum class PlaneKind : uint8_t {
  compute,  // what the caller computes with, where this rank writes it; readers may see it there too; index: form
  compute_scales,  // ... where that is codes: their scales, which lie as they do (layout/flat_layout.h)
  gathered,        // a copy of the whole compute weights, in the pool, of the same index
  gathered_scales,
  main,       // fp32 weights that the optimizer works on
  state,      // of the optimizer; index: in the order declared
  grad,       // main grads
  full_grad,  // a full gradient, for the caller to write
  partial,    // inner sums that the outer axis has yet to add; index: the turn
  rounded,    // full gradients in their reduce dtype
  received    // the slices of all ranks that this one sums
};
inline constexpr auto plane_kinds = static_cast<size_t>(PlaneKind::received) + 1;

// What is published, and gathered into the kind behind.
constexpr bool is_published(PlaneKind kind) { return kind == PlaneKind::compute || kind == PlaneKind::compute_scales; }
constexpr bool is_gathered(PlaneKind kind) { return kind == PlaneKind::gathered || kind == PlaneKind::gathered_scales; }
constexpr bool is_scales(PlaneKind kind) {
  return kind == PlaneKind::compute_scales || kind == PlaneKind::gathered_scales;
}
constexpr PlaneKind published_into(PlaneKind gathered) {
  return gathered == PlaneKind::gathered ? PlaneKind::compute : PlaneKind::compute_scales;
}
constexpr PlaneKind gathered_from(PlaneKind published) {
  return published == PlaneKind::compute ? PlaneKind::gathered : PlaneKind::gathered_scales;
}

// Which elements: those of this rank's slot, of all slots of its inner rank, or of the full buffer.
enum class Extent : uint8_t { shard, group, whole };

enum class RegionId : uint8_t {
  mapped_compute,   // whole buckets, each rank owning its slices of them: what a mapped unshard shows, or gathers pull
  whole_compute,    // whole buckets on every rank, refreshed in place when weights are published
  sharded_compute,  // slices alone, where peers cannot read them
  local_compute,    // whole buckets that no peer reads
  main,
  optimizer,
  grad,
  kept_grads,  // main grads and full gradients that peers read and that stay for ever
  lent_grads,  // the pool of full gradients, behind them in one arena
  gathered,    // the pool of gathered weights
  partial,
  rounded,
  received,
  norms,           // where ranks put what they measure of their gradients
  device_norms,    // ... of a device, which the host does not wait for
  amaxes,          // the largest magnitudes of parameters with one scale, of this rank and of all, and the scales
  steps,           // of a device: the numbers of a step that graphs read
  staging,         // of parameters on their way in and out
  save_staging,    // of checkpoints on their way to the disk
  messages,        // of ranks on the outer axis
  device_messages  // ... and of those whose memory peers cannot read
};
inline constexpr auto region_count = static_cast<size_t>(RegionId::device_messages) + 1;

// Which ranks read a region, and which one owns it.
enum class Reach : uint8_t {
  own,    // private
  parts,  // every rank's part is in one arena that the ranks of the inner axis read
  common  // one arena, of which each rank writes its ranges
};

struct RegionPlan {
  fsdp_role role = FSDP_ROLE_ALL;
  const char *what = "";  // for messages
  Reach reach = Reach::own;
  bool on_host = false;     // in memory of the host also where the device's is another
  bool by_comm = false;     // its transport allocates it
  bool registered = false;  // collectives over memory of a device name it
  uint64_t bytes = 0;       // of one rank; of a common region: of all
  uint64_t own_bytes = 0;   // of a common one: what one rank writes

  // The part of a common region that no rank writes is counted once, on rank 0.
  uint64_t bytes_of(uint32_t rank, uint32_t ranks) const {
    if (reach != Reach::common) return bytes;
    return own_bytes + (rank == 0 ? bytes - own_bytes * ranks : 0);
  }
};

// Small: a model has a few for each of its buckets, which may be ten thousand.
struct PlanePlan {
  PlaneKind kind = PlaneKind::compute;
  uint16_t index = 0;
  uint8_t slot = 0;  // of gathered: which of the group's buffers it is in
  fsdp_dtype dtype = FSDP_FLOAT32;
  Extent extent = Extent::whole;  // how it lies in memory
  Extent owned = Extent::whole;   // what of it this rank writes
  RegionId region = RegionId::local_compute;
  bool again = false;   // another row has the same bytes
  uint64_t offset = 0;  // of the first element, in this rank's part of the region, in bytes
};

// What is published of a quantized parameter, as people and checkpoints know it.
constexpr const char *plane_name(const PlanePlan &plane) {
  constexpr const char *names[] = {"row", "row_scale", "column", "column_scale"};
  return names[2 * plane.index + is_scales(plane.kind)];
}

// What of a tensor the extent covers on rank `rank` of the mesh.
layout::Slice slice_of(const layout::FlatLayout &layout, uint64_t tensor, Extent extent, const layout::Mesh &mesh,
                       uint32_t rank);

// What a quantization stores of a parameter, and what it asks of it: the one place that knows the kinds. Pure.
//
//   MXFP8       codes in E4M3 and an E8M0 scale for 32 of them, in two forms: blocks in rows, and in columns. What is
//               multiplied from the left reads one of them, its gradient the other, and neither can be made of the
//               other
//   FP8_BLOCK   codes in E4M3 and an fp32 scale for 128 x 128 of them, one form for all phases
//   FP8         codes in E4M3 and one fp32 scale for all of them, which the ranks that have parts find together
//
// The matrix is that of the last two dimensions, all before them count matrices: a block lies in one matrix.

// What is published of a bucket: kinds, forms and dtypes, without a place.
std::vector<PlanePlan> published_planes(fsdp_dtype dtype, fsdp_quantization quantization);

// Is a parameter of the group stored in two forms?
bool has_forms(const GroupSpec &group);

// Has a parameter one scale for all of its elements? Then these lie as if they were not quantized.
bool scales_whole_tensors(fsdp_quantization quantization);

// How many rows stay together where a ROW granule was asked for, of whose rows a block needs more; 0: as asked.
uint64_t raised_granule(const ParamSpec &param);

// Where a parameter may be cut, and how many scales it has of each whole granule.
layout::TensorSpec tensor_of(const ParamSpec &param);

// By form, in C order; empty for a parameter that has none.
std::vector<std::vector<uint64_t>> scale_shapes(const ParamSpec &param);

// What of a matrix shares a scale of a form; 0 x 0: all of the parameter.
struct BlockSize {
  uint64_t rows, columns;
};
BlockSize block_size(fsdp_quantization quantization, uint32_t form);

// Rows of the first dimension that are quantized by themselves, which rows are loaded in; 0: only all of them are.
uint64_t block_rows(const ParamSpec &param);
// How many scales, of any form, so many rows of the first dimension have: whole blocks.
uint64_t count_scales(const ParamSpec &param, uint64_t rows);

// A stored form of a parameter as a tensor: its shape, and those of a tensor that it is a box of, if it is.
struct StoredShape {
  std::vector<uint64_t> shape, global_shape, global_offset;
};
StoredShape stored_shape(const ParamSpec &param, const PlanePlan &plane);

// Why a parameter cannot be quantized as it was declared, by name and number; nothing if it can.
std::optional<std::string> find_misfit(const ParamSpec &param, const std::string &group);

// What checkpoints call the tensors that they have of a parameter. A checkpoint has each name once.

// Of a published plane of a frozen quantized parameter; whatever else is published has the parameter's own name.
std::string stored_name(const ParamSpec &param, const PlanePlan &plane);
std::string stored_name(const ParamSpec &param, const StateSpec &state);

}  // namespace fsdp::memory
