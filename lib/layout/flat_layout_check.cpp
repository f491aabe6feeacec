// SPDX-License-Identifier: Apache-2.0
// What a flat layout promises, checked without the code that builds it.
#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "layout/flat_layout.h"

namespace fsdp::layout {
namespace {

std::string check_sub_buckets(const FlatLayout &layout) {
  uint64_t shard = 0;
  for (size_t b = 0; b < layout.sub_buckets.size(); ++b) {
    const SubBucket &bucket = layout.sub_buckets[b];
    if (bucket.shard_offset != shard || bucket.full_offset != shard * layout.ranks)
      return format_text("sub-bucket {} does not follow the one before", b);
    if (bucket.shard_count == 0 || bucket.granule == 0 || bucket.shard_count % bucket.granule != 0)
      return format_text("sub-bucket {}: {} elements a rank are not a multiple of the granule {}", b,
                         bucket.shard_count, bucket.granule);
    shard += bucket.shard_count;
  }
  if (layout.shard_count != shard || layout.full_count != shard * layout.ranks)
    return format_text("the sub-buckets have {} elements a rank, the layout says {}", shard, layout.shard_count);
  return {};
}

std::string check_shape(const Placement &placed, const TensorSpec &spec, size_t index) {
  const uint64_t rows = spec.shape.empty() ? 1 : spec.shape[0];
  const uint64_t count = std::accumulate(spec.shape.begin(), spec.shape.end(), uint64_t{1}, std::multiplies<>());
  uint64_t granule = count / rows;
  if (spec.granule == FSDP_GRANULE_BLOCK)
    granule *= spec.scaled() ? spec.granule_rows : std::min(spec.granule_rows, rows);
  if (spec.granule == FSDP_GRANULE_TENSOR) granule = count;
  if (placed.count == count && placed.row == count / rows && placed.granule == granule) return {};
  return format_text("tensor {} is placed as {} elements in granules of {}, it has {} in granules of {}", index,
                     placed.count, placed.granule, count, granule);
}

std::string check_place(const FlatLayout &layout, const Placement &placed, size_t index, bool scaled) {
  if (placed.sub_bucket >= layout.sub_buckets.size()) return format_text("tensor {} has no sub-bucket", index);
  const SubBucket &bucket = layout.sub_buckets[placed.sub_bucket];
  const uint64_t start = placed.full_offset - bucket.full_offset;
  if (placed.full_offset < bucket.full_offset || start + placed.count > bucket.shard_count * layout.ranks)
    return format_text("tensor {} leaves its sub-bucket", index);
  if (placed.full_offset % alignment != 0 || (scaled && start % bucket.granule != 0))
    return format_text("tensor {} starts at {}", index, placed.full_offset);
  for (uint64_t cut = (start / bucket.shard_count + 1) * bucket.shard_count; cut < start + placed.count;
       cut += bucket.shard_count)
    if ((cut - start) % placed.granule != 0)
      return format_text("tensor {}: the rank boundary at {} cuts a granule", index, bucket.full_offset + cut);
  return {};
}

std::string check_overlap(const FlatLayout &layout) {
  std::vector<uint32_t> order(layout.tensors.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, {}, [&](uint32_t i) { return layout.tensors[i].full_offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const Placement &before = layout.tensors[order[i - 1]];
    if (before.full_offset + before.count > layout.tensors[order[i]].full_offset)
      return format_text("tensors {} and {} overlap", order[i - 1], order[i]);
  }
  return {};
}

}  // namespace

std::string validate(const FlatLayout &layout, std::span<const TensorSpec> tensors) {
  if (layout.tensors.size() != tensors.size())
    return format_text("{} tensors are placed, {} were given", layout.tensors.size(), tensors.size());
  if (std::string broken = check_sub_buckets(layout); !broken.empty()) return broken;
  uint64_t used = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (std::string broken = check_shape(layout.tensors[i], tensors[i], i); !broken.empty()) return broken;
    if (std::string broken = check_place(layout, layout.tensors[i], i, tensors[i].scaled()); !broken.empty())
      return broken;
    used += layout.tensors[i].count;
  }
  if (used != layout.used_count)
    return format_text("{} elements are used, the layout says {}", used, layout.used_count);
  return check_overlap(layout);
}

std::string validate_scales(const FlatLayout &layout, const FlatLayout &scales, std::span<const TensorSpec> tensors) {
  if (scales.tensors.size() != tensors.size() || scales.ranks != layout.ranks)
    return format_text("scales of {} tensors on {} ranks, elements of {} on {}", scales.tensors.size(), scales.ranks,
                       tensors.size(), layout.ranks);
  if (std::string broken = check_sub_buckets(scales); !broken.empty()) return format_text("scales: {}", broken);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Placement &of = layout.tensors[i], &placed = scales.tensors[i];
    const uint64_t granule = of.granule,
                   first_granule = (of.full_offset - layout.sub_buckets[of.sub_bucket].full_offset) / granule;
    if (placed.sub_bucket != of.sub_bucket || placed.count != tensors[i].scale_count ||
        placed.full_offset != scales.sub_buckets[of.sub_bucket].full_offset + first_granule * tensors[i].granule_scales)
      return format_text("tensor {}: its {} scales from {} on are not at its granules", i, placed.count,
                         placed.full_offset);
    const auto scales_before = [&](uint64_t element) {
      return element == of.count ? tensors[i].scale_count : element / granule * tensors[i].granule_scales;
    };
    for (uint32_t rank = 0; rank < layout.ranks; ++rank) {
      const Slice elements = layout.slice(i, rank), own = scales.slice(i, rank);
      const uint64_t first = scales_before(elements.tensor_offset);
      const uint64_t count = scales_before(elements.tensor_offset + elements.count) - first;
      if (own.count == (elements.count ? count : 0) && (own.count == 0 || own.tensor_offset == first)) continue;
      return format_text("tensor {}: rank {} has scales [{}, {}) of it, its elements have [{}, {})", i, rank,
                         own.tensor_offset, own.tensor_offset + own.count, first, first + count);
    }
  }
  return check_overlap(scales);
}

std::string validate_tensor_scales(const FlatLayout &layout, const FlatLayout &scales) {
  if (scales.tensors.size() != layout.tensors.size() || scales.ranks != layout.ranks)
    return format_text("scales of {} tensors on {} ranks, elements of {} on {}", scales.tensors.size(), scales.ranks,
                       layout.tensors.size(), layout.ranks);
  if (std::string broken = check_sub_buckets(scales); !broken.empty()) return format_text("scales: {}", broken);
  for (size_t i = 0; i < scales.tensors.size(); ++i)
    if (const Placement &placed = scales.tensors[i]; placed.count != 1 || placed.full_offset >= scales.full_count)
      return format_text("tensor {}: {} scales at {} of {}", i, placed.count, placed.full_offset, scales.full_count);
  return check_overlap(scales);
}

}  // namespace fsdp::layout
