// SPDX-License-Identifier: Apache-2.0
#include "layout/scale_layout.h"

#include <algorithm>
#include <utility>

#include "base/checked.h"

namespace fsdp::layout {
namespace {

struct GranuleKind {
  uint64_t granule, scales;
  uint64_t granules = 0;  // so far
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
                                                              "elements of a rank's slice")});
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
    const uint64_t shard = checked_multiply(of.shard_count / of.granule, scales, "scales of a rank's slice");
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
