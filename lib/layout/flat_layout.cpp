// SPDX-License-Identifier: Apache-2.0

#include "layout/flat_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/checked.h"
#include "base/error.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "layout/bucket_packer.h"

namespace fsdp::layout {
namespace {

// The number of rows that stay together.
uint64_t granule_rows(const TensorSpec &spec, uint64_t rows, uint64_t index) {
  switch (spec.granule) {
    case FSDP_GRANULE_ROW: return 1;
    case FSDP_GRANULE_TENSOR: return rows;
    case FSDP_GRANULE_BLOCK:
      if (spec.granule_rows == 0) fail(FSDP_INVALID_ARGUMENT, "tensor {}: a granule of 0 rows", index);
      return spec.scaled() ? spec.granule_rows : std::min(spec.granule_rows, rows);
    default: fail(FSDP_INVALID_ARGUMENT, "tensor {}: unknown granule {}", index, spec.granule);
  }
}

Placement measure(const TensorSpec &spec, uint64_t index) {
  if (spec.row_dimensions == 0 || spec.row_dimensions > std::max<size_t>(spec.shape.size(), 1))
    fail(FSDP_INVALID_ARGUMENT, "tensor {}: row_dimensions is {}, but must be from 1 to {}", index, spec.row_dimensions,
         std::max<size_t>(spec.shape.size(), 1));
  uint64_t rows = 1, row = 1;
  for (size_t d = 0; d < spec.shape.size(); ++d) {
    if (spec.shape[d] == 0) fail(FSDP_INVALID_ARGUMENT, "tensor {}: dimension {} is 0", index, d);
    uint64_t &count = d < spec.row_dimensions ? rows : row;
    count = checked_multiply(count, spec.shape[d], d < spec.row_dimensions ? "rows of a tensor" : "elements of a row");
  }
  const uint64_t count = checked_multiply(rows, row, "elements of a tensor");
  return {0, 0, count, row, checked_multiply(granule_rows(spec, rows, index), row, "elements of a granule")};
}

std::vector<Item> items_of(std::span<const Placement> tensors) {
  std::vector<Item> items;
  items.reserve(tensors.size());
  for (const Placement &t : tensors)
    items.push_back({t.count, t.granule, checked_lcm(t.granule, alignment, "aligned granule")});
  return items;
}

// Puts the sub-buckets one after the other, and the tensors at their final places.
void assemble(FlatLayout &layout, const Packing &packing) {
  for (const PackedBucket &bucket : packing.buckets) {
    const uint64_t first = round_up(layout.full_count, alignment, "elements of the full buffer");
    layout.sub_buckets.push_back({bucket.granule, bucket.shard, first, layout.shard_count});
    layout.shard_count = checked_add(layout.shard_count, bucket.shard, "elements of a shard");
    const uint64_t count = checked_multiply(bucket.shard, layout.ranks, "elements of the full buffer");
    layout.full_count = checked_add(first, count, "elements of the full buffer");
  }
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    Placement &t = layout.tensors[i];
    t.sub_bucket = packing.places[i].bucket;
    t.full_offset = layout.sub_buckets[t.sub_bucket].full_offset + packing.places[i].offset;
  }
}

// Hashes numbers as little-endian 64-bit words, so that the hash is the same on every machine.
class Digest {
 public:
  void add(uint64_t word) {
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<unsigned char>(word >> (8 * i)));
  }
  uint64_t hash() const { return XXH64(bytes_.data(), bytes_.size(), 0); }

 private:
  std::vector<unsigned char> bytes_;
};

// The hash includes the shapes: lists of tensors with different shapes are different layouts even if the offsets are
// the same.
uint64_t hash_of(const FlatLayout &layout, std::span<const TensorSpec> tensors) {
  Digest digest;
  for (uint64_t word : {uint64_t{layout.ranks}, layout.sub_buckets.size(), layout.tensors.size(), layout.full_count,
                        layout.shard_count, layout.used_count})
    digest.add(word);
  for (const SubBucket &b : layout.sub_buckets)
    for (uint64_t word : {b.granule, b.shard_count, b.full_offset, b.shard_offset}) digest.add(word);
  for (const Placement &t : layout.tensors)
    for (uint64_t word : {uint64_t{t.sub_bucket}, t.full_offset, t.count, t.row, t.granule}) digest.add(word);
  for (const TensorSpec &spec : tensors) {
    digest.add(static_cast<uint64_t>(spec.granule));
    digest.add(spec.granule == FSDP_GRANULE_BLOCK ? spec.granule_rows : 0);
    const uint64_t beyond_one = spec.row_dimensions - 1;  // 0 for most tensors, so that hashes of old layouts hold
    digest.add(spec.shape.size() | beyond_one << 32);
    for (uint64_t size : spec.shape) digest.add(size);
  }
  return digest.hash();
}

}  // namespace

FlatLayout build_flat_layout(std::span<const TensorSpec> tensors, uint32_t ranks) {
  if (ranks == 0) fail(FSDP_INVALID_ARGUMENT, "a layout for 0 ranks");
  FlatLayout layout;
  layout.ranks = ranks;
  layout.tensors.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    layout.tensors.push_back(measure(tensors[i], i));
    layout.used_count = checked_add(layout.used_count, layout.tensors.back().count, "elements of all tensors");
  }
  const bool scaled = !tensors.empty() && tensors.front().scaled();
  assemble(layout,
           scaled ? pack_granules(layout.tensors, tensors, ranks) : pack_buckets(items_of(layout.tensors), ranks));
  layout.hash = hash_of(layout, tensors);
  return layout;
}

Slice FlatLayout::slice(uint64_t tensor, uint32_t first, uint32_t count, uint32_t group) const {
  const Placement &t = tensors[tensor];
  const SubBucket &bucket = sub_buckets[t.sub_bucket];
  const uint64_t start = t.full_offset - bucket.full_offset;
  const uint64_t rank_start = first * bucket.shard_count;
  const uint64_t group_start = (first - first % group) * bucket.shard_count;
  const uint64_t from = std::max(start, rank_start);
  const uint64_t to = std::min(start + t.count, rank_start + count * bucket.shard_count);
  if (from >= to) return {0, 0, 0, 0, 0};
  return {from - start, bucket.full_offset + from, bucket.shard_offset + from - rank_start, to - from,
          bucket.shard_offset * group + from - group_start};
}

}  // namespace fsdp::layout

namespace fsdp::layout {

// Checks the promises of a flat layout, without the code that builds it.

namespace {

// Each sub-bucket must begin at the first multiple of `multiple` at or after the end of the previous one.
std::string check_sub_buckets(const FlatLayout &layout, uint64_t multiple) {
  uint64_t shard = 0, full = 0;
  for (size_t b = 0; b < layout.sub_buckets.size(); ++b) {
    const SubBucket &bucket = layout.sub_buckets[b];
    if (bucket.shard_offset != shard || bucket.full_offset != divide_up(full, multiple) * multiple)
      return format_text("sub-bucket {} does not follow the one before", b);
    if (bucket.shard_count == 0 || bucket.granule == 0 || bucket.shard_count % bucket.granule != 0)
      return format_text("sub-bucket {}: {} elements a rank are not a multiple of the granule {}", b,
                         bucket.shard_count, bucket.granule);
    shard += bucket.shard_count;
    full = bucket.full_offset + bucket.shard_count * layout.ranks;
  }
  if (layout.shard_count != shard || layout.full_count != full)
    return format_text("the sub-buckets have {} elements a rank and {} in all, the layout says {} and {}", shard, full,
                       layout.shard_count, layout.full_count);
  return {};
}

std::string check_shape(const Placement &placed, const TensorSpec &spec, size_t index) {
  const auto product = [](auto begin, auto end) {
    return std::accumulate(begin, end, uint64_t{1}, std::multiplies<>());
  };
  const auto first = spec.shape.begin(), behind = spec.shape.end();
  const uint64_t rows = spec.shape.empty() ? 1 : product(first, first + spec.row_dimensions);
  const uint64_t count = product(first, behind);
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
  if (std::string broken = check_sub_buckets(layout, alignment); !broken.empty()) return broken;
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
  if (std::string broken = check_sub_buckets(scales, 1); !broken.empty()) return format_text("scales: {}", broken);
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
  if (std::string broken = check_sub_buckets(scales, 1); !broken.empty()) return format_text("scales: {}", broken);
  for (size_t i = 0; i < scales.tensors.size(); ++i)
    if (const Placement &placed = scales.tensors[i]; placed.count != 1 || placed.full_offset >= scales.full_count)
      return format_text("tensor {}: {} scales at {} of {}", i, placed.count, placed.full_offset, scales.full_count);
  return check_overlap(scales);
}

}  // namespace fsdp::layout

namespace fsdp::layout {

namespace {

struct GranuleKind {
  uint64_t granule, scales;
  uint64_t granules = 0;  // number of granules so far
};

}  // namespace

Packing pack_granules(std::span<const Placement> tensors, std::span<const TensorSpec> specs, uint32_t ranks) {
  std::vector<GranuleKind> kinds;
  Packing packing;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t granule = tensors[i].granule, scales = specs[i].granule_scales;
    auto kind =
        std::ranges::find_if(kinds, [&](const GranuleKind &k) { return k.granule == granule && k.scales == scales; });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {granule, scales});
    packing.places.push_back({static_cast<uint32_t>(kind - kinds.begin()),
                              checked_multiply(kind->granules, granule, "elements of a sub-bucket")});
    kind->granules = checked_add(kind->granules, divide_up(tensors[i].count, granule), "granules of a sub-bucket");
  }
  for (const GranuleKind &kind : kinds)
    packing.buckets.push_back({kind.granule, checked_multiply(divide_up(kind.granules, uint64_t{ranks}), kind.granule,
                                                              "elements of a rank's shard")});
  return packing;
}

FlatLayout build_scale_layout(const FlatLayout &elements, std::span<const TensorSpec> specs) {
  FlatLayout layout;
  layout.ranks = elements.ranks;
  layout.hash = elements.hash;
  for (size_t b = 0; b < elements.sub_buckets.size(); ++b) {
    const SubBucket &of = elements.sub_buckets[b];
    const auto tensor = std::ranges::find(elements.tensors, b, &Placement::sub_bucket) - elements.tensors.begin();
    const uint64_t scales = specs[static_cast<size_t>(tensor)].granule_scales;
    const uint64_t shard = checked_multiply(of.shard_count / of.granule, scales, "scales of a rank's shard");
    layout.sub_buckets.push_back({scales, shard, layout.full_count, layout.shard_count});
    layout.shard_count = checked_add(layout.shard_count, shard, "scales of a shard");
    layout.full_count = checked_multiply(layout.shard_count, layout.ranks, "scales of the full buffer");
  }
  for (size_t i = 0; i < specs.size(); ++i) {
    const Placement &of = elements.tensors[i];
    const uint64_t first = (of.full_offset - elements.sub_buckets[of.sub_bucket].full_offset) / of.granule;
    const uint64_t scales = specs[i].granule_scales;
    layout.tensors.push_back({of.sub_bucket, layout.sub_buckets[of.sub_bucket].full_offset + first * scales,
                              specs[i].scale_count, scales, scales});
    layout.used_count = checked_add(layout.used_count, specs[i].scale_count, "scales of all tensors");
  }
  return layout;
}

FlatLayout build_tensor_scale_layout(const FlatLayout &elements) {
  FlatLayout layout;
  layout.ranks = elements.ranks;
  layout.hash = elements.hash;
  layout.used_count = elements.tensors.size();
  layout.shard_count = divide_up(layout.used_count, uint64_t{layout.ranks});
  layout.full_count = checked_multiply(layout.shard_count, layout.ranks, "scales of the full buffer");
  layout.sub_buckets = {{1, layout.shard_count, 0, 0}};
  for (uint64_t i = 0; i < layout.used_count; ++i) layout.tensors.push_back({0, i, 1, 1, 1});
  return layout;
}

}  // namespace fsdp::layout
