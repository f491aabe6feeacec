// SPDX-License-Identifier: Apache-2.0
#include "layout/flat_layout.h"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/checked.h"
#include "layout/bucket_packer.h"
#include "layout/scale_layout.h"

namespace fsdp::layout {
namespace {

// Rows that stay together.
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
  const uint64_t rows = spec.shape.empty() ? 1 : spec.shape[0];
  uint64_t row = 1;
  for (size_t d = 0; d < spec.shape.size(); ++d) {
    if (spec.shape[d] == 0) fail(FSDP_INVALID_ARGUMENT, "tensor {}: dimension {} is 0", index, d);
    if (d > 0) row = checked_multiply(row, spec.shape[d], "elements of a row");
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

// Sub-buckets one after the other, tensors at their final places.
void assemble(FlatLayout &layout, const Packing &packing) {
  for (const PackedBucket &bucket : packing.buckets) {
    layout.sub_buckets.push_back({bucket.granule, bucket.shard, layout.full_count, layout.shard_count});
    layout.shard_count = checked_add(layout.shard_count, bucket.shard, "elements of a shard");
    layout.full_count = checked_multiply(layout.shard_count, layout.ranks, "elements of the full buffer");
  }
  for (size_t i = 0; i < layout.tensors.size(); ++i) {
    Placement &t = layout.tensors[i];
    t.sub_bucket = packing.places[i].bucket;
    t.full_offset = layout.sub_buckets[t.sub_bucket].full_offset + packing.places[i].offset;
  }
}

// Numbers as little-endian 64-bit words, so that the hash is the same on every machine.
class Digest {
 public:
  void add(uint64_t word) {
    for (int i = 0; i < 8; ++i) bytes_.push_back(static_cast<unsigned char>(word >> (8 * i)));
  }
  uint64_t hash() const { return XXH64(bytes_.data(), bytes_.size(), 0); }

 private:
  std::vector<unsigned char> bytes_;
};

// The shapes are part of it: two lists of tensors with the same offsets are still different layouts.
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
    digest.add(spec.shape.size());
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
