// SPDX-License-Identifier: Apache-2.0
// The places of the elements of a bucket of tensors: a pure function of (shapes, granules, ranks), the same for every
// dtype, rank and transport. All numbers count elements.
//
//   full buffer   the sub-buckets one after the other, each at a multiple of `alignment`; sub-bucket b consists
//                 of `ranks` shards of shard_count_b elements
//   shard         the rank's shards of the sub-buckets, one after the other
//
// Promises: tensors are contiguous, disjoint and in bounds. Every tensor starts at a multiple of `alignment` in the
// full buffer. A rank boundary k * shard_count_b never cuts a granule of a tensor. Quantized tensors start at granules
// of their sub-bucket, and all tensors of that sub-bucket have the same granule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/checked.h"
#include "fsdp.h"
#include "layout/bucket_packer.h"

namespace fsdp::layout {

inline constexpr uint64_t alignment = 128;

struct TensorSpec {
  std::vector<uint64_t> shape;  // C order; empty: a scalar
  fsdp_granule granule = FSDP_GRANULE_ROW;
  uint64_t granule_rows = 0;  // used only with FSDP_GRANULE_BLOCK
  // For a quantized tensor: the number of scales of a whole granule, and of the tensor, which may be smaller than a
  // granule. 0 if the tensor is not quantized. Either all tensors of a layout are quantized or none is.
  uint64_t granule_scales = 0, scale_count = 0;
  uint32_t row_dimensions = 1;  // a row spans all dimensions but these first ones; a scalar has 1

  bool scaled() const { return granule_scales != 0; }
};

struct SubBucket {
  uint64_t granule;       // elements that stay together
  uint64_t shard_count;   // elements of each rank's shard of the sub-bucket
  uint64_t full_offset;   // offset of the sub-bucket in the full buffer
  uint64_t shard_offset;  // offset of that shard in the rank's shard of the bucket
};

struct Placement {
  uint32_t sub_bucket;
  uint64_t full_offset;  // offset of the tensor's first element in the full buffer
  uint64_t count;
  uint64_t row;      // elements in a row
  uint64_t granule;  // elements in a granule of this tensor
};

// A rank's part of a tensor; `count` is 0 if the rank has no part.
struct Slice {
  uint64_t tensor_offset;
  uint64_t full_offset;
  uint64_t shard_offset;
  uint64_t count;
  uint64_t group_offset;  // offset in the memory in which neighbouring ranks' shards are together; see slice() below
};

struct FlatLayout {
  uint32_t ranks = 1;
  std::vector<SubBucket> sub_buckets;
  std::vector<Placement> tensors;  // in the order given
  uint64_t full_count = 0;         // elements of the full buffer, to the end of the last sub-bucket
  uint64_t shard_count = 0;
  uint64_t used_count = 0;  // elements that belong to tensors
  uint64_t hash = 0;        // hash of the places and the declared shapes; the same in all builds and on all machines

  Slice slice(uint64_t tensor, uint32_t rank) const { return slice(tensor, rank, 1, 1); }
  // The part of the tensor that the `count` ranks from `first` on have together. These ranks are within one group of
  // `group` neighbours. The memory of a group has the slices of the neighbours one after the other, sub-bucket by
  // sub-bucket. group_offset is the offset of the part in that memory.
  Slice slice(uint64_t tensor, uint32_t first, uint32_t count, uint32_t group) const;
};

// Throws INVALID_ARGUMENT if sizes overflow, a dimension is 0, or a row or granule makes no sense.
FlatLayout build_flat_layout(std::span<const TensorSpec> tensors, uint32_t ranks);

// validate() checks every promise above; validate_scales() checks that each rank has exactly the scales of its
// elements. Both return an empty string or say what is broken. For tests and debug mode.
std::string validate(const FlatLayout &layout, std::span<const TensorSpec> tensors);
std::string validate_scales(const FlatLayout &layout, const FlatLayout &scales, std::span<const TensorSpec> tensors);
// Like validate_scales(), for a layout with one scale for each tensor.
std::string validate_tensor_scales(const FlatLayout &layout, const FlatLayout &scales);

// Computes the length of a rank's shard of a sub-bucket. Only for the layout room.

// Estimates saturate instead of failing, because the alternative that they describe may never be chosen.
inline constexpr uint64_t too_many = UINT64_MAX;

inline uint64_t saturating_add(uint64_t a, uint64_t b) { return a > too_many - b ? too_many : a + b; }

inline uint64_t saturating_multiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? too_many : product;
}

inline uint64_t saturating_lcm(uint64_t a, uint64_t b) { return saturating_multiply(a / std::gcd(a, b), b); }

inline uint64_t saturating_round_up(uint64_t value, uint64_t multiple) {
  return saturating_multiply(divide_up(value, multiple), multiple);
}

struct ShardRule {
  uint64_t ranks;
  uint64_t allowance;  // extra elements per rank that rounding a shard to a multiple of a power of two may cost

  // The shortest shard of at least `least` elements with which all ranks together hold `volume`. Shards that are
  // multiples of the alignment are best, because a tensor can then start such that a boundary falls between two of its
  // granules.
  uint64_t shard_for(uint64_t volume, uint64_t granule, uint64_t least) const {
    const uint64_t needed = std::max(divide_up(volume, ranks), least);
    const auto rounded = [&](uint64_t multiple) {
      return saturating_round_up(needed, saturating_lcm(granule, multiple));
    };
    const uint64_t shard = rounded(1);
    for (uint64_t wish : {128, 16, 8, 4, 2}) {
      const uint64_t wished = rounded(wish);
      if (wished - shard <= allowance) return wished;
    }
    return shard;
  }
};

// The places of the scales of quantized tensors: in the same order as the elements, granule by granule. Pure.
//
//   elements   | granule | granule | granule | padding |   a sub-bucket: its tensors have one granule and start at one
//   scales     | scales  | scales  | scales  |         |   the same number per granule: a rank has its elements' scales

// One sub-bucket for each kind of granule (number of elements, number of scales), in order of first appearance.
Packing pack_granules(std::span<const Placement> tensors, std::span<const TensorSpec> specs, uint32_t ranks);

// The layout of the tensors' scales. One of its granules holds the scales of one granule of elements, and its rank
// boundaries match those of the elements.
FlatLayout build_scale_layout(const FlatLayout &elements, std::span<const TensorSpec> specs);

// One scale for each tensor, in the order of the tensors, independent of the places of their elements. Every rank knows
// all of these scales; each rank writes its share of them.
FlatLayout build_tensor_scale_layout(const FlatLayout &elements);

}  // namespace fsdp::layout
