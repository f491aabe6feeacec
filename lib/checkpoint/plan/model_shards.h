// SPDX-License-Identifier: Apache-2.0
// Which tensors of a model a checkpoint has, and which rank writes which rows: a pure function of the plan, the same on
// every rank. So the first rank can write the manifest for all ranks without asking them.
//
// The places of ranks are in the order of their slices. Ranks with the same slice are neighbours, and the first of
// these divide the rows of the slice among them. A file is numbered by its rank's place.
//
// A rank's rows of a tensor are one box of it if a row spans all dimensions but the first. Rows of a stack that begin
// and end inside matrices are three boxes (in general 2 * row_dimensions - 1). A file has each name once, so a rank has
// as many files as its tensors have boxes: file n has the n-th box of each tensor.
//
// Groups may have meshes of their own. Then the list has the tensors of all meshes, and a rank has rows only of tensors
// whose mesh it belongs to. Tensors of several meshes may be boxes of one tensor. If boxes are equal, only the first
// one is written.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_file.h"
#include "checkpoint/plan/mesh_covers.h"
#include "memory/model_plan.h"
#include "memory/plane.h"

namespace fsdp::checkpoint {

enum class ShardKind : uint8_t { weights, optimizer, bytes };  // bytes: the caller's own
inline constexpr size_t shard_kinds = 3;
// A rank writes no separate file for fewer bytes than this.
inline constexpr uint64_t least_share = uint64_t{16} << 20;
// A tensor of the checkpoint: a plane of a parameter. Three kinds of parameters differ from this:
//   frozen and quantized      has a tensor for each of its planes
//   with states in codes      has one for the codes of a state and one for their scales
//   with SPLIT16 weights      has one tensor of F32 for both halves
// Without a plane it is the number of steps that the optimizer has made with the parameter, a scalar that every rank
// keeps.
struct KeptTensor {
  std::string name;  // the parameter's, NAME.PLANE, state.NAME.STATE, or the latter with .code or .absmax
  const ElementType *type = nullptr;
  ShardKind kind = ShardKind::weights;
  const memory::ParamSpec *param = nullptr;
  const memory::BucketPlan *bucket = nullptr;
  uint32_t tensor = 0;  // index in the bucket
  const memory::PlanePlan *plane = nullptr;
  memory::StoredShape scales = {};  // shape of a plane of scales
  std::string numbers_name = {};    // for a state in codes: its name in checkpoints that store it as numbers
  uint32_t cover = 0, mesh = 0;     // its mesh, which is one of a cover's: MeshCovers::covers()
  bool counts = true;               // no earlier tensor has the same box, so this one is written
  // The shape of the box, or the tensor, that the model has.
  std::span<const uint64_t> shape() const {
    if (!plane) return {};
    return is_scales() ? scales.shape : param->shape;
  }
  // The shape of the whole tensor, of which the model may have only a box.
  std::span<const uint64_t> global_shape() const {
    if (!plane || !param->is_box()) return shape();
    return is_scales() ? scales.global_shape : param->global_shape;
  }
  Box box() const {
    Box own = whole(shape());
    if (plane && param->is_box()) own.offset = is_scales() ? scales.global_offset : param->global_offset;
    return own;
  }
  // Can it be loaded from this type? A scale must not be rounded, so it is loaded only from types that are not wider.
  bool is_loaded_from(const ElementType &stored) const {
    return is_loaded(stored, *type) && !(is_scales() && stored.bits > type->bits);
  }
  bool is_scales() const {
    return plane && (memory::is_scales(plane->kind) || plane->kind == memory::PlaneKind::state_scales);
  }
  const layout::FlatLayout &layout() const { return bucket->layout_of(*plane); }
  uint64_t element_count() const { return plane ? layout().tensors[tensor].count : 1; }
  // The number of leading dimensions in which the rows are counted.
  uint32_t row_dimensions() const {
    return plane ? std::min(param->row_dimensions, static_cast<uint32_t>(shape().size())) : 0;
  }
  uint64_t row_size() const {
    uint64_t size = 1;
    for (size_t d = row_dimensions(); d < shape().size(); ++d) size *= shape()[d];
    return size;
  }
  memory::Extent owned() const { return plane ? plane->owned : memory::Extent::whole; }
};

// Rows of the model's part of a parameter, counted in its first row_dimensions() dimensions; a scalar is one row.
struct RowRange {
  uint64_t first = 0, count = 0;

  bool operator==(const RowRange &) const = default;
};

// A box of a tensor that a rank writes into one of its files.
struct WrittenBox {
  const KeptTensor *tensor;
  Box box;         // box in the whole tensor, of which other models may have boxes, too
  uint64_t first;  // position of the box's first element in the part that the rank keeps
};

class ModelShards {
 public:
  // `spec` and `plan` must outlive this object. Ranks that have the same bytes share the writing if each writes at
  // least `least` bytes. `counts_steps`: AdamW counts steps, and PyTorch requires a step for each parameter that AdamW
  // updates.
  ModelShards(const memory::ModelSpec &spec, const memory::ModelPlan &plan, bool counts_steps = false,
              uint64_t least = least_share);

  uint32_t ranks() const { return spec_.mesh().size(); }
  bool one_mesh() const { return meshes_.one_mesh(); }

  // Main weights and optimizer states, the same list on every rank: by group, then by mesh of the group, then by
  // parameter in the order of declaration. Frozen parameters have compute weights, or codes and scales, instead of main
  // weights.
  const std::vector<KeptTensor> &tensors() const { return tensors_; }
  // Below, ranks are ranks of the model. The rows of a tensor that a rank writes; a count of 0 means none.
  RowRange rows(const KeptTensor &tensor, uint32_t rank) const {
    return has(tensor, rank) ? rows_at(tensor, place_of(mesh_of(tensor), place(tensor, rank).rank)) : RowRange{};
  }
  // The rows of a tensor that a rank keeps, even if another rank writes them.
  RowRange kept_rows(const KeptTensor &tensor, uint32_t rank) const {
    return has(tensor, rank) ? kept_by(tensor, place(tensor, rank).rank) : RowRange{};
  }
  // The ranks that keep the same rows of a tensor, for a tensor on the model's mesh: the number of `rank` in their
  // order, and how many they are.
  struct Holder {
    uint32_t number = 0, count = 1;
  };
  Holder holder(const KeptTensor &tensor, uint32_t rank) const;
  // Of the holders' common rows, [0, rows), those that one holder reads if each reads a part.
  static RowRange share_of(uint64_t rows, const Holder &holder) {
    const uint64_t begin = rows * holder.number / holder.count;
    return {begin, rows * (holder.number + 1) / holder.count - begin};
  }
  // The rows as boxes of the whole tensor, in order: at most 2 * row_dimensions() - 1.
  static std::vector<Box> boxes_of(const KeptTensor &tensor, const RowRange &rows);
  // The boxes in a rank's file of a kind, in the order for plan_shard_file; if there are none, there is no such file.
  std::vector<WrittenBox> written_by(uint32_t rank, ShardKind kind, uint32_t file = 0) const;

  // The maximum number of files of the kind that a rank has.
  uint32_t files(ShardKind kind) const { return static_cast<uint32_t>(writers_[static_cast<size_t>(kind)].size()); }
  // The ranks that write this file of the kind, in the order of their places in the model's mesh.
  const std::vector<uint32_t> &writers(ShardKind kind, uint32_t file = 0) const {
    static const std::vector<uint32_t> none;
    return file < files(kind) ? writers_[static_cast<size_t>(kind)][file] : none;
  }
  // The manifest's entries of all tensors of the kind. Files are numbered by writers, starting at first_file: first
  // those of writers(kind, 0), then those of writers(kind, 1), and so on.
  std::vector<ManifestTensor> manifest_tensors(ShardKind kind, uint32_t first_file) const;

 private:
  // The places that have the same slice: `count` places, starting at `first`. The first `writers` of them write.
  struct Holding {
    uint32_t first, count, writers;
  };
  // A parameter whose tensors are being added: its plans, and the mesh that has it.
  struct Adding {
    const memory::BucketPlan &bucket;
    uint32_t tensor;  // index in the bucket
    const memory::ParamSpec &param;
    uint32_t cover, mesh;
    bool counts, names;  // see MeshGroup
  };
  static uint32_t place_of(const layout::Mesh &mesh, uint32_t rank);
  static uint32_t rank_at(const layout::Mesh &mesh, uint32_t place);
  const MeshCover &cover_of(const KeptTensor &tensor) const { return meshes_.covers()[tensor.cover]; }
  const layout::Mesh &mesh_of(const KeptTensor &tensor) const { return cover_of(tensor).meshes[tensor.mesh]; }
  const MeshPlace &place(const KeptTensor &tensor, uint32_t rank) const { return cover_of(tensor).places[rank]; }
  bool has(const KeptTensor &tensor, uint32_t rank) const { return place(tensor, rank).mesh == tensor.mesh; }
  // Converts a place in the tensor's mesh to a place in the model's mesh.
  uint32_t place_in_model(const KeptTensor &tensor, uint32_t place) const;
  // In the functions below, ranks and places are those of the tensor's mesh.
  Holding holding(uint32_t cover, memory::Extent extent, uint32_t place) const;
  RowRange kept_by(const KeptTensor &tensor, uint32_t rank) const;
  RowRange rows_at(const KeptTensor &tensor, uint32_t place) const;
  // The first place that has rows of the tensor, and the place after the last one.
  std::array<uint32_t, 2> places_of(const KeptTensor &tensor) const;
  void add_group(const memory::ModelPlan &plan, size_t group, bool counts_steps);
  void add(const Adding &adding, bool counts_steps);
  void add_weights(const Adding &adding);
  void add_state(const Adding &adding, uint32_t index);
  KeptTensor &add_tensor(const Adding &adding, std::string name, ShardKind kind, const ElementType &type,
                         const memory::PlanePlan *plane);
  void count_writers(uint64_t least);
  void find_writers(ShardKind kind);
  void add_parts(std::vector<ManifestPart> &parts, const KeptTensor &tensor,
                 const std::vector<std::vector<uint32_t>> &files) const;
  void add_boxes(std::vector<ManifestPart> &parts, const KeptTensor &tensor, uint32_t place,
                 const std::vector<std::vector<uint32_t>> &files) const;

  const memory::ModelSpec &spec_;
  MeshCovers meshes_;
  std::vector<KeptTensor> tensors_;
  std::vector<std::array<uint32_t, 3>> writer_counts_;                   // by cover and extent
  std::array<std::vector<std::vector<uint32_t>>, shard_kinds> writers_;  // by kind and file
};

}  // namespace fsdp::checkpoint
