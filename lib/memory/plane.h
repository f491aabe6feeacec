// SPDX-License-Identifier: Apache-2.0
// The stored forms of a bucket's elements and the memory for them, as the rows of two tables. Code that allocates,
// accounts, clears, registers, describes, updates, loads or compares walks these rows. Only the planner that adds a
// row, and the calls for its kind, know the meaning of the row.
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
  compute,          // compute weights, in the memory that this rank writes and readers may read; index: form
  compute_scales,   // scales of quantized compute weights, in the layout of the codes (layout/flat_layout.h)
  gathered,         // a copy of the whole compute weights in the pool; index: form
  gathered_scales,  // a copy of all scales in the pool; index: form
  main,             // weights on which the optimizer works; with a `rest`, only their upper halves
  rest,             // the lower halves of fp32 main weights, 16 bits each (FSDP_MAIN_SPLIT16)
  state,            // optimizer state; index: position in the order declared
  state_scales,     // scales of a state in codes, one for each block; index: the state's index
  grad,             // main grads
  grad_turn,        // main grads in memory, on their way to the file or from it; index: the turn
  full_grad,        // a full gradient, for the caller to write
  partial,          // sums over the inner axis that the outer axis has not added yet; index: the turn
  rounded,          // full gradients in their reduce dtype
  received          // the slices of all ranks that this rank sums
};
inline constexpr auto plane_kinds = static_cast<size_t>(PlaneKind::received) + 1;

// Kinds that are published, and kinds into which published planes are gathered.
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

// Kinds of buffers that all parts of a mesh use in turns.
constexpr bool takes_turns(PlaneKind kind) { return kind == PlaneKind::partial || kind == PlaneKind::grad_turn; }

// Which elements a plane has: the elements of this rank's slot, of all slots of its inner rank, or of the full buffer.
enum class Extent : uint8_t { shard, group, whole };

enum class RegionId : uint8_t {
  mapped_compute,   // whole buckets of which each rank owns its slices: a mapped unshard shows them, a gather copies
                    // them
  whole_compute,    // whole buckets on every rank, refreshed in place when weights are published
  sharded_compute,  // only this rank's slices, in memory that peers cannot read
  local_compute,    // whole buckets that no peer reads
  main,
  optimizer,
  host_home,   // planes in memory of the host, which kernels of the device read and write in place (FSDP_HOME_HOST)
  home,        // planes in a file; their addresses cannot be read or written (engine/runtime/home_file.h)
  turns,       // buffers for segments of the file (home_plan.h)
  grad_turns,  // buffers for main grads on their way to the file or from it
  grad,
  kept_grads,  // main grads and full gradients that peers read; they stay as long as the model exists
  lent_grads,  // the pool of full gradients, after kept_grads in the same arena
  gathered,    // the pool of gathered weights
  partial,
  rounded,
  received,
  norms,           // values that ranks measure on their gradients
  device_norms,    // the same values on a device, for which the host does not wait
  amaxes,          // largest magnitudes of parameters with one scale, on this rank and on all ranks, and the scales
  steps,           // on a device: the numbers of a step that graphs read
  matrices,        // matrices of this rank, and rows on their way to other ranks (matrix_plan.h)
  file_rows,       // rows of matrices on their way to the file or from it, at the same places
  staging,         // parameters during loads and reads
  save_staging,    // checkpoints while they are written to the disk
  messages,        // messages between ranks on the outer axis
  device_messages  // messages between ranks whose memory peers cannot read
};
inline constexpr auto region_count = static_cast<size_t>(RegionId::device_messages) + 1;

// True if each mesh has a region of its own, because the region is read by the mesh's ranks or used in turns by its
// outer axis. The other regions exist once.
constexpr bool is_by_mesh(RegionId id) {
  return id == RegionId::mapped_compute || id == RegionId::whole_compute || id == RegionId::sharded_compute ||
         id == RegionId::kept_grads || id == RegionId::lent_grads || id == RegionId::partial ||
         id == RegionId::grad_turns || id == RegionId::matrices || id == RegionId::file_rows || id == RegionId::staging;
}

// Which ranks read a region, and which one owns it.
enum class Reach : uint8_t {
  own,    // private
  parts,  // every rank's part is in one arena that the ranks of the inner axis read
  common  // one arena in which each rank writes its ranges
};

struct RegionPlan {
  RegionId id = RegionId::mapped_compute;
  uint32_t mesh = 0;  // index in ModelSpec::meshes
  fsdp_role role = FSDP_ROLE_ALL;
  const char *what = "";  // name for messages
  Reach reach = Reach::own;
  bool on_host = false;     // in memory of the host even if the device has its own memory
  bool by_comm = false;     // the transport of a communicator allocates it
  bool registered = false;  // is registered with the device's collectives
  uint64_t bytes = 0;       // bytes of one rank; for a common region: bytes of all ranks
  uint64_t own_bytes = 0;   // for a common region: bytes that one rank writes

  // The bytes of a common region that no rank writes are counted once, on rank 0.
  uint64_t bytes_of(uint32_t rank, uint32_t ranks) const {
    if (reach != Reach::common) return bytes;
    return own_bytes + (rank == 0 ? bytes - own_bytes * ranks : 0);
  }
};

// Kept small, because a model may have ten thousand buckets, and each has a few of these rows.
struct PlanePlan {
  PlaneKind kind = PlaneKind::compute;
  uint16_t index = 0;
  uint8_t slot = 0;                 // for gathered kinds: the number of the group's buffer that has the plane
  uint16_t mesh = 0;                // index of the group's mesh
  fsdp_dtype dtype = FSDP_FLOAT32;  // for rests only the size of the dtype is used
  Extent extent = Extent::whole;    // which elements the plane has in memory
  Extent owned = Extent::whole;     // which of these elements this rank writes
  RegionId region = RegionId::local_compute;
  bool again = false;   // another row describes the same bytes
  uint64_t offset = 0;  // offset in bytes of the first element, in this rank's part of the region

  bool in_file() const { return region == RegionId::home && !again; }
};

// The name of a published plane of a quantized parameter, for messages and in checkpoints.
constexpr const char *plane_name(const PlanePlan &plane) {
  constexpr const char *names[] = {"row", "row_scale", "column", "column_scale"};
  return names[2 * plane.index + is_scales(plane.kind)];
}

// The part of a tensor that the extent covers on rank `rank` of the mesh.
layout::Slice slice_of(const layout::FlatLayout &layout, uint64_t tensor, Extent extent, const layout::Mesh &mesh,
                       uint32_t rank);

// What each quantization stores of a parameter, and what it requires of the parameter. No other code knows the kinds of
// quantization. Pure.
//
//   MXFP8       codes in E4M3 and an E8M0 scale for 32 codes, in two forms: blocks in rows, and blocks in columns.
//               A product reads one form and its gradient the other; neither form can be made from the other
//   FP8_BLOCK   codes in E4M3 and an fp32 scale for 128 x 128 codes, one form for all phases
//   FP8         codes in E4M3 and one fp32 scale for all codes; the ranks that have parts of them find it together
//
// The last two dimensions of a parameter are a matrix, and the dimensions before them count matrices. A block lies in
// one matrix.

// The published planes of a bucket: kinds, forms and dtypes, without a place.
std::vector<PlanePlan> published_planes(fsdp_dtype dtype, fsdp_quantization quantization);

// Does the group have a parameter that is stored in two forms?
bool has_forms(const GroupSpec &group);

// Do all elements of a parameter share one scale? If so, its codes have the layout of numbers that are not quantized.
bool scales_whole_tensors(fsdp_quantization quantization);

// The number of rows that stay together if a block has more rows than the declared granule, or the granule would cut
// it; 0: the granule is as declared.
uint64_t raised_granule(const ParamSpec &param);

// Says where a parameter may be cut, and how many scales each whole granule has.
layout::TensorSpec tensor_of(const ParamSpec &param);

// Main weights and states in fewer bits than fp32. All functions below are pure.

// The number of elements that share a scale of a state in codes.
inline constexpr uint64_t coded_block = 256;
// Parameters with fewer elements than this keep fp32 states.
inline constexpr uint64_t least_coded_elements = 4096;
// Can AdamW's states of the parameter be codes of 8 bits? Blocks are counted from the parameter's first element. The
// blocks of a box must be blocks of the whole tensor, so that checkpoints can store them.
bool can_code_states(const ParamSpec &param);
// Like can_code_states(), for a group with several meshes. The answer must not depend on which box a rank has. So it
// also requires that the first two boxes of an evenly divided tensor can be in codes.
bool can_code_states_of_all(const ParamSpec &param);
// Are the states of a box fp32 only because its blocks would not be blocks of the whole tensor?
bool cuts_coded_blocks(const ParamSpec &param);
// The same tensor as tensor_of(), but with the numbers of scales of a state in codes.
layout::TensorSpec coded_tensor_of(const ParamSpec &param);
// A run of `count` of a parameter's elements, beginning at number `begin` of the elements passed to list_runs().
// Element i of the run is element first + i / length * pitch + i % length of the parameter, or of the whole tensor if
// the parameter is a box.
struct ElementRun {
  uint64_t begin, count;
  uint64_t first, length, pitch;
};
// Divides the `count` elements from element `first` on into runs, in ascending order.
std::vector<ElementRun> list_runs(const ParamSpec &param, uint64_t first, uint64_t count);
// Says why the main weights of a parameter cannot be stored as the group asks; returns nothing if they can.
std::optional<std::string> find_storage_misfit(const ParamSpec &param, const GroupSpec &group);
// The storage of main weights in the buckets of the group whose parameters have this dtype.
constexpr fsdp_main_storage main_storage_of(const GroupSpec &group, fsdp_dtype dtype) {
  return dtype == FSDP_BFLOAT16 ? group.main_storage : FSDP_MAIN_FLOAT32 + 0;
}
// Are the sums of the group's gradients made in the full gradients, which have this dtype? If full gradients are
// reduced once a step in fp32, this rank's slice of them becomes the main grads. This is impossible if debug mode takes
// away the view of the full gradients, because the sums must be written into them.
bool sums_in_full_grads(const ModelSpec &spec, const GroupSpec &group, fsdp_dtype grad_dtype);
// Are any main weights rounded stochastically?
bool rounds_randomly(const ModelSpec &spec);

// The shape of the scales of each form, in C order; empty for a parameter without scales.
std::vector<std::vector<uint64_t>> scale_shapes(const ParamSpec &param);

// The block of a matrix that shares a scale; 0 x 0: the whole parameter shares one.
struct BlockSize {
  uint64_t rows, columns;
};
BlockSize block_size(fsdp_quantization quantization, uint32_t form);

// The smallest number of rows that can be quantized and loaded separately; 0: only all rows together.
uint64_t block_rows(const ParamSpec &param);
// The number of scales in each form for `rows` rows, which must be whole blocks.
uint64_t count_scales(const ParamSpec &param, uint64_t rows);

// A stored form of a parameter, or of one of its states, as a tensor: its shape and, for a box, the shape of the whole
// tensor and the box's offset.
struct StoredShape {
  std::vector<uint64_t> shape, global_shape, global_offset;
};
StoredShape stored_shape(const ParamSpec &param, const PlanePlan &plane);

// Says why a parameter cannot be quantized as it was declared, with names and numbers; returns nothing if it can.
std::optional<std::string> find_misfit(const ParamSpec &param, const std::string &group);

// The names of a parameter's tensors in checkpoints. A checkpoint has each name once.

// The name of a published plane of a frozen quantized parameter. The other published planes have the parameter's name.
std::string stored_name(const ParamSpec &param, const PlanePlan &plane);
std::string stored_name(const ParamSpec &param, const StateSpec &state);
// The name under which a checkpoint has the codes, or the scales, of a state in codes.
std::string coded_name(const ParamSpec &param, const StateSpec &state, bool scales);

}  // namespace fsdp::memory
