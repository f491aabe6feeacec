// SPDX-License-Identifier: Apache-2.0
// The outer axis of a mesh: the exchanges of its ranks in addition to the reduces and gathers of the inner axis. The
// outer axes of all meshes share a stream of their own, so that their exchanges overlap with those of inner axes.
//
//   replicate (HSDP)  each group's inner sums are all-reduced on the last contribution of a step
//   optim (HFSDP)     they are reduce-scattered on the last contribution; publishing gathers updated compute weights
//   shard             inner sums of every contribution are reduce-scattered and added; publishing gathers
//
// The inner reduce has scaled the gradients, so the outer sum is a plain sum.
#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "engine/runtime/group.h"
#include "engine/runtime/stream_trace.h"
#include "engine/runtime/teams.h"
#include "memory/model_plan.h"
#include "transport/team.h"

namespace fsdp::engine {

struct OuterStats {
  uint64_t all_reduces = 0, reduce_scatters = 0, all_gathers = 0;
  uint64_t sent_bytes = 0;
};

// The group number of collectives that belong to no group, such as those of numbers of all parameters.
inline constexpr uint32_t no_group = ~uint32_t{0};
// The state that calls change (capture.h).
struct OuterState {
  uint32_t turn = 0;  // which buffer of inner sums is next
  OuterStats stats;
};

class Outer {
 public:
  // Collective over the outer ranks. `stream` and `trace` are the model's for all outer axes.
  Outer(Context &context, const layout::Mesh &mesh, const Teams &teams, device::Stream &stream, StreamTrace &trace,
        uint64_t longest_call);
  Outer(const Outer &) = delete;
  Outer &operator=(const Outer &) = delete;

  // Finds the addresses of the group's spans. The storage must be complete.
  void add_group(Group &group, const Storage &storage);
  // Are inner sums of every contribution sent immediately, part by part? If not, only the sums of the last contribution
  // are sent, group by group.
  bool sums_each() const { return mesh_.outer == layout::OuterAxis::shard; }
  // Chooses the buffer of inner sums for a part. The reduce stream waits until the outer axis has read the buffer.
  uint32_t take_turn(const GradPart &part, device::Stream &reduce_stream);
  // Both functions wait for the `reduced` event of the reduce stream, and record group.grad.summed.
  void reduce_part(GradPart &part, uint32_t turn, bool accumulate, uint64_t version);
  void reduce_group(Group &group, uint32_t turn, const device::Event &reduced, uint64_t version);
  // Completes whole main grads of no_shard groups: if the outer axis divides them, gathers the slots of other outer
  // ranks.
  void gather_grads(Group &group, uint64_t version);
  // Gathers numbers from other outer ranks, after the event `after`. In `whole`, each rank's piece of `bytes` bytes is
  // at the rank's place.
  void gather_values(const Traced &of, std::byte *whole, uint64_t bytes, const device::Event &after, uint64_t version);
  // Gathers the updated compute weights of other outer ranks.
  void gather_weights(Group &group, uint64_t version);
  bool gathers() const { return gathers_; }
  // A note that messages add to the names of sums. The text must outlive this object.
  void set_note(const char *note) { note_ = note; }

  device::Stream &stream() { return stream_; }
  StreamTrace &trace() { return trace_; }
  transport::Collectives &sum_comm() { return *sums_; }
  void next_round() { sums_->next_round(); }
  void abandon() { sums_->abandon(); }
  OuterStats stats() const { return state().stats; }
  OuterState state() const;
  void set_state(const OuterState &state);
  // The event that is done when the outer axis has read the inner sums of this turn.
  device::Event *partial_free(uint32_t turn) const { return partial_free_[turn].get(); }

 private:
  void gather(transport::Collectives &by, const std::vector<transport::Gather> &gathers, Group &group,
              uint64_t version);
  void add_part(Group &group, GradPart &part, const Storage &storage) const;
  void add_weights(Group &group, const Plane &plane, uint32_t slices) const;
  void add_sub_bucket(Group &group, OuterSums &sums, const Bucket &bucket, const layout::SubBucket &sub) const;
  void sum(const OuterSums &sums, uint32_t turn, bool accumulate, const transport::Tag &tag, const Traced &of,
           uint64_t version);

  const layout::Mesh &mesh_;
  uint32_t rank_;   // rank in the outer team
  uint32_t inner_;  // rank in the inner team
  bool gathers_;
  const char *note_ = "";
  std::unique_ptr<transport::Collectives> sums_, weights_;
  device::Stream &stream_;
  StreamTrace &trace_;
  std::unique_ptr<device::Event> partial_free_[2];
  OuterState state_;
  uint64_t uncounted_bytes_ = 0;  // bytes counted by communicators and not yet by OuterState, modulo 2^64
};

}  // namespace fsdp::engine
