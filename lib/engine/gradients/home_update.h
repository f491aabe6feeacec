// SPDX-License-Identifier: Apache-2.0
// AdamW and casts for parameters of which planes are at home in a file. The update goes through the file segment
// by segment, with the kernels and the bits of an update in memory.
#pragma once

#include <span>
#include <vector>

#include "engine/gradients/adamw_spans.h"
#include "engine/runtime/home_turns.h"

namespace fsdp::engine {

class HomeUpdate {
 public:
  // `shards` must stay as it is.
  HomeUpdate(Runtime &runtime, const std::vector<Shard> &shards);

  // Does an update of the shard, or a cast of its main weights, need the file?
  static bool updates_in_file(const Shard &shard);
  static bool casts_in_file(const Shard &shard);
  // Does a step on the shards that need the file. `kept` has a 1 for each shard that the step must leave unchanged; its
  // weights are cast.
  void step(std::span<const AdamWBatch> batches, const std::vector<uint8_t> &kept, device::Stream &caller);
  // Casts the main weights of all shards of which a plane is in the file to compute weights.
  void cast(device::Stream &caller);

  // `count` elements of a shard from element `first` on.
  struct ShardPart {
    uint32_t shard;
    uint64_t first, count;
  };
  struct PlannedSegment {
    HomeSegment segment;
    std::vector<ShardPart> parts;
  };
  // For passes that are not an update by AdamW. A pass must end before the next begins.
  std::vector<PlannedSegment> &planned() { return planned_; }
  HomeTurns &turns() { return turns_; }

 private:
  struct BatchSpans {
    std::vector<device::AdamWSpan> spans;
    std::vector<device::CompactSpan> compact;
  };
  void plan_bucket(const Bucket &bucket, const std::vector<uint32_t> &shards);
  void cast_part(const HomeView &view, const ShardPart &part, device::Stream &caller) const;
  void add_part(const HomeView &view, const ShardPart &part, BatchSpans &to) const;
  template <class Body>
  void visit(HomeTurns::Takes takes, device::Stream &caller, Body body);
  template <class Span>
  void bring(const HomeView &view, Span &span) const;

  Runtime &runtime_;
  const std::vector<Shard> &shards_;
  std::vector<PlannedSegment> planned_;
  HomeTurns turns_;
  std::vector<HomeSegment> visited_;              // the segments of a pass
  std::vector<const PlannedSegment *> visiting_;  // the same, with their parts
  std::vector<uint32_t> batch_of_;                // by shard
  std::vector<BatchSpans> batches_;               // arguments of the kernels of one segment
};

}  // namespace fsdp::engine
