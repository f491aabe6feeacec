// SPDX-License-Identifier: Apache-2.0
// Prepares every group at the seal (buffers, spans of collectives, events), so that a step only walks lists.
#pragma once

#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class GroupMaker {
 public:
  explicit GroupMaker(Runtime &runtime) : runtime_(runtime) {}
  void make_groups();

 private:
  void make_slots(Group &group);
  void add_gathers(const Group &group, uint32_t number, GatheredPiece &slot) const;
  void make_grads(Group &group);
  void make_part(Group &group, uint32_t number);
  void find_part_overlaps();
  void add_reduce(GradPart &part, const Bucket &bucket, const layout::SubBucket &sub, float factor);
  void add_all_reduce(GradPart &part, const Bucket &bucket, const layout::SubBucket &sub, float factor);
  void add_whole_grads(Group &group, const Bucket &bucket, const layout::SubBucket &sub);
  void make_refresh(Group &group);
  uint64_t add_gather(std::vector<transport::Gather> &gathers, const Bucket &bucket, const Plane &published,
                      const Plane &to) const;
  const transport::Team &inner_of(const Bucket &bucket) const { return runtime_.comms[bucket.plan->mesh].inner(); }

  Runtime &runtime_;
  uint32_t slot_count_ = 0;
};

}  // namespace fsdp::engine
