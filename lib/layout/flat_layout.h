// SPDX-License-Identifier: Apache-2.0
// Where the elements of a bucket of tensors lie: a pure function of (shapes, granules, ranks), the same for every
// dtype, rank and transport. All numbers count elements.
//
//   full buffer   the sub-buckets one after the other; sub-bucket b is `ranks` shards of shard_count_b
//   shard         the rank's slices of the sub-buckets one after the other
//
// Promises: tensors are contiguous, disjoint and in bounds; every tensor starts at a multiple of `alignment` in the
// full buffer; a rank boundary k * shard_count_b never cuts a granule of a tensor. Quantized tensors start at granules
// of their sub-bucket, which has no others.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp.h"

namespace fsdp::layout {

inline constexpr uint64_t alignment = 128;

struct TensorSpec {
  std::vector<uint64_t> shape;  // C order; empty: a scalar
  fsdp_granule granule = FSDP_GRANULE_ROW;
  uint64_t granule_rows = 0;  // counts only with FSDP_GRANULE_BLOCK
  // Of a quantized tensor, else 0: how many scales a whole granule has, and the tensor. It may be less than a granule.
  // All tensors of a layout are quantized, or none is.
  uint64_t granule_scales = 0, scale_count = 0;

  bool scaled() const { return granule_scales != 0; }
};

struct SubBucket {
  uint64_t granule;       // elements that stay together
  uint64_t shard_count;   // elements of each rank's slice
  uint64_t full_offset;   // of the sub-bucket in the full buffer
  uint64_t shard_offset;  // of the rank's slice in the shard
};

struct Placement {
  uint32_t sub_bucket;
  uint64_t full_offset;  // of the tensor's first element in the full buffer
  uint64_t count;
  uint64_t row;      // elements of a row
  uint64_t granule;  // elements of this tensor's granule
};

// A rank's part of a tensor; count 0 if it has none.
struct Slice {
  uint64_t tensor_offset;
  uint64_t full_offset;
  uint64_t shard_offset;
  uint64_t count;
  uint64_t group_offset;  // in the shards of neighbouring ranks that are kept together, see below
};

struct FlatLayout {
  uint32_t ranks = 1;
  std::vector<SubBucket> sub_buckets;
  std::vector<Placement> tensors;  // in the order given
  uint64_t full_count = 0;         // ranks * shard_count
  uint64_t shard_count = 0;
  uint64_t used_count = 0;  // elements of tensors
  uint64_t hash = 0;        // of all the above, stable between builds and machines

  Slice slice(uint64_t tensor, uint32_t rank) const { return slice(tensor, rank, 1, 1); }
  // What `count` ranks from `first` have of it together. They are within one group of `group` neighbours, whose slices
  // of each sub-bucket are kept one after the other: group_offset is where the part begins in that.
  Slice slice(uint64_t tensor, uint32_t first, uint32_t count, uint32_t group) const;
};

// Throws INVALID_ARGUMENT on sizes that overflow, a dimension of 0 or a granule that makes no sense.
FlatLayout build_flat_layout(std::span<const TensorSpec> tensors, uint32_t ranks);

// Checks every promise above, and of the scales of `layout` that ranks have those of the elements they have; returns an
// empty string or what is broken. For tests and debug mode.
std::string validate(const FlatLayout &layout, std::span<const TensorSpec> tensors);
std::string validate_scales(const FlatLayout &layout, const FlatLayout &scales, std::span<const TensorSpec> tensors);
// ... where each tensor has one.
std::string validate_tensor_scales(const FlatLayout &layout, const FlatLayout &scales);

}  // namespace fsdp::layout
