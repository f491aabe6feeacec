// SPDX-License-Identifier: Apache-2.0
// AdamW, casts and norms of gradients for parameters with planes in the home file. The update goes through the file
// segment by segment, with the kernels and the bits of an update in memory. Main grads in the file are scaled when they
// are read.
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
  // Are the shard's main grads in the file?
  static bool has_grads_in_file(const Shard &shard);
  // Does a step on the shards that need the file. `kept` has a 1 for each shard that the step must leave unchanged.
  // Weights of such a shard are only cast.
  void step(std::span<const AdamWBatch> batches, const std::vector<uint8_t> &kept, device::Stream &caller);
  // Scales all main grads in the file.
  void scale_grads(float factor);
  // Writes the sums of squares of main grads in the file to the values of their parameters (Shard::ordinal), for shards
  // of which this rank counts the slot.
  void sum_squares(double *values, device::Stream &caller);
  // Calls `read(shard, first, numbers)` with the main grads in the file of all trained shards, in ascending order, once
  // for each segment of a shard. `numbers` begin at element `first` of the shard. An error of the file fails the
  // context, because other ranks may wait for this rank.
  template <class Read>
  void read_grads(device::Stream &caller, Read read);
  // Writes scaled main grads to the file, for calls that read or write them there.
  void settle_grads();
  // Called when the gradients of the step are no longer needed.
  void drop_grads() noexcept { factors_.clear(); }
  // Casts main weights to compute weights, for all shards with a plane in the file.
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
  const std::vector<PlannedSegment> &planned() const { return planned_; }
  HomeTurns &turns() { return turns_; }
  // Scales the main grads of a part that came from the file.
  void scale_part(const HomeView &view, const ShardPart &part, device::Stream &caller) const;

 private:
  struct BatchSpans {
    std::vector<device::AdamWSpan> spans;
    std::vector<device::CompactSpan> compact;
  };
  void plan_bucket(const Bucket &bucket, const std::vector<uint32_t> &shards);
  void cast_part(const HomeView &view, const ShardPart &part, device::Stream &caller) const;
  void add_part(const HomeView &view, const ShardPart &part, BatchSpans &to) const;
  // The numbers times all factors, in place.
  std::span<const float> scaled(std::span<float> numbers) const noexcept;
  float *grads_of(const HomeView &view, const ShardPart &part) const;
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
  std::vector<float> factors_;                    // of the main grads in the file, in the order of the calls
};

template <class Read>
void HomeUpdate::read_grads(device::Stream &caller, Read read) {
  visiting_.clear();
  for (PlannedSegment &planned : planned_) {
    planned.segment.writes = false;
    if (has_grads_in_file(shards_[planned.parts.front().shard])) visiting_.push_back(&planned);
  }
  const auto takes = [](const memory::PlanePlan &plane) { return plane.kind == PlaneKind::grad; };
  runtime_.storage->attempt_on_file([&] {
    visit(takes, caller, [&](const HomeView &view, const std::vector<ShardPart> &parts) {
      for (const ShardPart &part : parts)
        if (shards_[part.shard].param(runtime_).has_gradient())
          read(shards_[part.shard], part.first, scaled({grads_of(view, part), part.count}));
    });
  });
}

// Calls `body` with each listed segment in memory, and with its parts.
template <class Body>
void HomeUpdate::visit(HomeTurns::Takes takes, device::Stream &caller, Body body) {
  visited_.clear();
  for (const PlannedSegment *planned : visiting_) visited_.push_back(planned->segment);
  turns_.begin(visited_, takes);
  size_t number = 0;
  while (const HomeView *const view = turns_.next(caller)) body(*view, visiting_[number++]->parts);
}

}  // namespace fsdp::engine
