// SPDX-License-Identifier: Apache-2.0
// Decides which sub-buckets a layout has. Inside the layout room only. Pure and deterministic.
//
// A tensor longer than a rank's shard of its sub-bucket is called heavy: it crosses several rank boundaries, so the
// shard must be a multiple of the tensor's granule. Every other tensor, a filler, crosses at most one boundary and only
// needs a suitable start. So the heavy tensors decide the sub-buckets. They are assigned granule size by granule size,
// the largest first. Each goes to the slack of an existing sub-bucket, to an existing one that is enlarged, or to a new
// one, whichever pads least.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layout/bucket_packer.h"
#include "layout/flat_layout.h"

namespace fsdp::layout {

using Indices = std::vector<uint32_t>;

// A sub-bucket to which tensors are still being assigned.
struct BucketDraft {
  uint64_t granule = 1;   // least common multiple of its heavy tensors' granules
  uint64_t shard = 0;     // elements of each rank's shard of this bucket
  uint64_t cursor = 0;    // end of the heavy tensors, which lie one after the other from 0
  uint64_t reserved = 0;  // elements promised to guests (HeavyAssignment::guests)
  std::vector<Gap> gaps;  // between the heavy tensors
};

class HeavyAssignment {
 public:
  // The shard of the shared bucket has at least `least` elements, so that shorter tensors need not be heavy.
  HeavyAssignment(std::span<const Item> items, uint32_t ranks, uint64_t least);

  ShardRule rule;
  // Bucket 0 is the shared bucket: it takes the small tensors, which have no better place. The length of its shard is
  // still open; the shards of all other buckets are final.
  std::vector<BucketDraft> buckets;
  std::vector<Position> places;  // positions of heavy tensors; offsets count from the start of the bucket
  Indices guests;                // heavy tensors in the slack of buckets with a different granule
  Indices fillers;               // all other tensors, longest first

 private:
  // The layout that would result if a bucket took some more heavy tensors.
  struct Outlook {
    uint64_t shards;          // sum of the shards of all buckets
    uint64_t granule, shard;  // granule and shard of that bucket
  };
  void assign_all();
  Indices take_heavy(uint64_t shard);
  void assign_class(std::span<const uint32_t> members);
  bool fits_existing(uint32_t index);
  void place_together(std::span<const uint32_t> members);
  Outlook outlook(uint32_t bucket, uint64_t granule, uint64_t step, uint64_t span) const;
  void add_heavy(uint32_t bucket, uint32_t index);
  void measure_fillers();
  uint64_t slack(const BucketDraft &bucket) const;
  // The shared bucket's shard if the bucket had this granule and these heavy elements, and the other buckets had this
  // much slack for its fillers.
  uint64_t shard_of_shared(uint64_t granule, uint64_t heavy, uint64_t slack) const;

  std::span<const Item> items_;
  uint64_t least_;    // the shared bucket's shard has at least this many elements
  uint64_t penalty_;  // extra elements per rank that saving one bucket may cost
  uint64_t filler_volume_ = 0, filler_granule_ = 1;
  uint64_t shards_ = 0, slack_ = 0;  // sums over all buckets except the shared bucket
};

inline uint64_t padded_count(const Item &item) { return round_up(item.count, alignment, "elements of a tensor"); }

}  // namespace fsdp::layout
