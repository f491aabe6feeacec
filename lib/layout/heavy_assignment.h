// SPDX-License-Identifier: Apache-2.0
// Decides which sub-buckets a layout has. Inside the layout room only. Pure and deterministic.
//
// A tensor longer than a rank's slice is called heavy: it crosses several rank boundaries, so the slice must be a
// multiple of the tensor's granule. Every other tensor, a filler, crosses at most one boundary and only needs a
// suitable start. So the heavy tensors decide the sub-buckets. They are assigned granule size by granule size, the
// largest first. Each goes to the slack of an existing sub-bucket, to an existing one that is enlarged, or to a new
// one, whichever pads least.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/bucket_packer.h"
#include "layout/flat_layout.h"

namespace fsdp::layout {

using Indices = std::vector<uint32_t>;

struct Bin {
  uint64_t granule = 1;   // least common multiple of its heavy tensors' granules
  uint64_t shard = 0;     // elements of each rank's slice
  uint64_t cursor = 0;    // end of the heavy tensors, which lie one after the other from 0
  uint64_t reserved = 0;  // elements promised to guests (see below)
  std::vector<Gap> gaps;  // between the heavy tensors
};

class HeavyAssignment {
 public:
  // The slice of the host bucket has at least `least` elements, so that shorter tensors need not be heavy.
  HeavyAssignment(std::span<const Item> items, uint32_t ranks, uint64_t least);

  ShardRule rule;
  // Bucket 0 is the host bucket: it takes the tensors that have no better place. The length of its slice is still open;
  // the slices of all other buckets are final.
  std::vector<Bin> buckets;
  std::vector<Position> places;  // positions of heavy tensors; offsets count from the start of the bucket
  Indices guests;                // heavy tensors in the slack of buckets with a different granule
  Indices fillers;               // all other tensors, longest first

 private:
  // The layout that would result if a bucket took some more heavy tensors.
  struct Outlook {
    uint64_t shards;          // sum of the slices of all buckets
    uint64_t granule, shard;  // granule and slice of that bucket
  };
  void assign_all();
  Indices take_heavy(uint64_t shard);
  void assign_class(std::span<const uint32_t> members);
  bool fits_existing(uint32_t index);
  void place_together(std::span<const uint32_t> members);
  Outlook outlook(uint32_t bucket, uint64_t granule, uint64_t step, uint64_t span) const;
  void add_heavy(uint32_t bucket, uint32_t index);
  void measure_fillers();
  uint64_t slack(const Bin &bucket) const;
  // The host bucket's slice if the bucket had this granule and these heavy elements, and the other buckets had this
  // much slack for its fillers.
  uint64_t host_shard(uint64_t granule, uint64_t heavy, uint64_t slack) const;

  std::span<const Item> items_;
  uint64_t least_;    // the host bucket's slice has at least this many elements
  uint64_t penalty_;  // extra elements per rank that saving one bucket may cost
  uint64_t filler_volume_ = 0, filler_granule_ = 1;
  uint64_t shards_ = 0, slack_ = 0;  // sums over all buckets except the host bucket
};

inline uint64_t padded_count(const Item &item) { return round_up(item.count, alignment, "elements of a tensor"); }

}  // namespace fsdp::layout
