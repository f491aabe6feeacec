// SPDX-License-Identifier: Apache-2.0
// Gives every tensor its sub-bucket and its place in it. Inside the layout room only. Pure and deterministic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/gap_list.h"

namespace fsdp::layout {

struct PackedBucket {
  uint64_t granule;
  uint64_t shard;  // elements of each rank's slice, never 0
};

struct Packing {
  std::vector<PackedBucket> buckets;
  std::vector<Position> places;  // one an item; the offset counts from the start of its bucket
};

Packing pack_buckets(std::span<const Item> items, uint32_t ranks);

}  // namespace fsdp::layout
