// SPDX-License-Identifier: Apache-2.0
// Assigns a sub-bucket to every tensor, and a place in the sub-bucket. Only files of lib/layout include this. Pure and
// deterministic.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <vector>

namespace fsdp::layout {

// Free space inside sub-buckets, and the rule for where a tensor may start in a gap. Inside the layout room only.

struct Item {
  uint64_t count;
  uint64_t granule;
  uint64_t step;  // least common multiple of the granule and the alignment
};

struct Position {
  uint32_t bucket;
  uint64_t offset;
};

struct Gap {
  uint64_t size;
  uint32_t bucket;
  uint64_t start;
  auto operator<=>(const Gap &) const = default;
};

// The smallest aligned start in [from, end) with two properties: the item ends by `end`, and no boundary k * shard cuts
// a granule of the item. The search gives up after a few boundaries, so it may return nothing although such a start
// exists.
std::optional<uint64_t> find_start(const Item &item, uint64_t shard, uint64_t from, uint64_t end);

class GapList {
 public:
  // Gaps that are too small for an aligned item of `smallest` elements are dropped.
  explicit GapList(uint64_t smallest) : smallest_(smallest) {}
  void add(Gap gap);
  // Places the item in the smallest gap into which it fits, and removes its space from the free gaps; shards[bucket] is
  // the length of the bucket's shards.
  std::optional<Position> place(const Item &item, std::span<const uint64_t> shards);

 private:
  using Iterator = std::set<Gap>::iterator;
  std::optional<Position> place_in(Iterator gap, const Item &item, uint64_t shard);

  uint64_t smallest_;
  std::set<Gap> gaps_;  // ordered by size
};

struct PackedBucket {
  uint64_t granule;
  uint64_t shard;  // elements of each rank's shard of this bucket, never 0
};

struct Packing {
  std::vector<PackedBucket> buckets;
  std::vector<Position> places;  // one position per item; its offset counts from the start of its bucket
};

Packing pack_buckets(std::span<const Item> items, uint32_t ranks);

}  // namespace fsdp::layout
