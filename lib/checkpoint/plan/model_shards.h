// SPDX-License-Identifier: Apache-2.0
// What a checkpoint keeps of a model, and which rank writes which rows: a pure function of the plan, the same on every
// rank. So the first rank can write the manifest of all without asking another one.
//
// Ranks take their places in the order in which slices lie behind each other: those that have the same slice are
// neighbours, and the first of them share its rows. A file is numbered by its rank's place.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/format/shard_file.h"
#include "memory/model_plan.h"
#include "memory/plane.h"

namespace fsdp::checkpoint {

enum class ShardKind : uint8_t { weights, optimizer, bytes };  // the last: of the caller's own
inline constexpr size_t shard_kinds = 3;

// Fewer bytes are not worth a file of their own.
inline constexpr uint64_t least_share = uint64_t{16} << 20;

// A tensor of the checkpoint: a plane of a parameter, of a frozen quantized one each that it has. Without a plane it is
// the number of steps that the optimizer has made of the parameter, a scalar that every rank keeps.
struct KeptTensor {
  std::string name;  // the parameter's, NAME.PLANE, or state.NAME.STATE
  const ElementType *type = nullptr;
  ShardKind kind = ShardKind::weights;
  const memory::ParamSpec *param = nullptr;
  const memory::BucketPlan *bucket = nullptr;
  uint32_t tensor = 0;  // in the bucket
  const memory::PlanePlan *plane = nullptr;
  memory::StoredShape scales = {};  // of a plane of scales

  // What the model has of it.
  std::span<const uint64_t> shape() const {
    if (!plane) return {};
    return is_scales() ? scales.shape : param->shape;
  }
  // All of it, which the model may have a box of.
  std::span<const uint64_t> global_shape() const {
    if (!plane || !param->is_box()) return shape();
    return is_scales() ? scales.global_shape : param->global_shape;
  }
  Box box() const {
    Box own = whole(shape());
    if (plane && param->is_box()) own.offset = is_scales() ? scales.global_offset : param->global_offset;
    return own;
  }
  // Can it be loaded from what is stored so? A scale that was rounded would be another one: of fewer bits alone.
  bool is_loaded_from(const ElementType &stored) const {
    return is_loaded(stored, *type) && !(is_scales() && stored.bits > type->bits);
  }
  bool is_scales() const { return plane && memory::is_scales(plane->kind); }
  const layout::FlatLayout &layout() const { return bucket->layout_of(*plane); }
  uint64_t element_count() const { return plane ? layout().tensors[tensor].count : 1; }
  memory::Extent owned() const { return plane ? plane->owned : memory::Extent::whole; }
};

// Rows of what the model has of a parameter: all dimensions but the first; a scalar is one.
struct RowRange {
  uint64_t first = 0, count = 0;

  bool operator==(const RowRange &) const = default;
};

class ModelShards {
 public:
  // Both live as long as this. Ranks that have the same bytes share the writing where each has at least `least` of it.
  // counts_steps: the optimizer does, and PyTorch wants to know of each parameter.
  ModelShards(const memory::ModelSpec &spec, const memory::ModelPlan &plan, bool counts_steps = false,
              uint64_t least = least_share);

  uint32_t ranks() const { return spec_.mesh.size(); }

  // Main weights (of frozen parameters compute weights, or their codes and scales) and optimizer states, by parameter
  // in the order of declaration.
  const std::vector<KeptTensor> &tensors() const { return tensors_; }
  // What a rank of the mesh writes of one; count 0: nothing.
  RowRange rows(const KeptTensor &tensor, uint32_t rank) const { return rows_at(tensor, place_of(rank)); }
  // What it keeps of one, also where another rank writes it.
  RowRange kept_rows(const KeptTensor &tensor, uint32_t rank) const;
  // The ranks that keep the same rows of a tensor are numbered in their order: which one `rank` is, and of how many.
  struct Holder {
    uint32_t number = 0, count = 1;
  };
  Holder holder(const KeptTensor &tensor, uint32_t rank) const;
  // Rows of what they keep, [0, rows), that one of them reads where each reads its part.
  static RowRange share_of(uint64_t rows, const Holder &holder) {
    const uint64_t begin = rows * holder.number / holder.count;
    return {begin, rows * (holder.number + 1) / holder.count - begin};
  }
  // The same as a box of the tensor, which other models may have boxes of.
  static Box box_of(const KeptTensor &tensor, const RowRange &rows);
  // Which tensors are in a rank's file of a kind, in the order that plan_shard_file is given them; none: there is no
  // file.
  std::vector<const KeptTensor *> written_by(uint32_t rank, ShardKind kind) const;

  // The ranks of the mesh that write a file of the kind, in the order of places.
  const std::vector<uint32_t> &writers(ShardKind kind) const { return writers_[static_cast<size_t>(kind)]; }
  // Of all tensors of the kind; the file of writers(kind)[i] has number first_file + i.
  std::vector<ManifestTensor> manifest_tensors(ShardKind kind, uint32_t first_file) const;

 private:
  // Those that have the same slice, `count` places from `first` on, of which `writers` write.
  struct Holding {
    uint32_t first, count, writers;
  };
  uint32_t place_of(uint32_t rank) const;
  uint32_t rank_at(uint32_t place) const;
  Holding holding(memory::Extent extent, uint32_t place) const;
  RowRange rows_at(const KeptTensor &tensor, uint32_t place) const;
  // The first place that has rows of it, and the one behind the last.
  std::array<uint32_t, 2> places_of(const KeptTensor &tensor) const;
  void add(const memory::BucketPlan &bucket, uint32_t tensor, const memory::ParamSpec &param, bool counts_steps);
  void add_weights(const memory::BucketPlan &bucket, uint32_t tensor, const memory::ParamSpec &param);
  void count_writers(uint64_t least);
  void find_writers(ShardKind kind);

  const memory::ModelSpec &spec_;
  std::vector<KeptTensor> tensors_;
  std::array<uint32_t, 3> writers_of_;  // by extent
  std::array<std::vector<uint32_t>, shard_kinds> writers_;
};

}  // namespace fsdp::checkpoint
