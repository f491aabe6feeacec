// SPDX-License-Identifier: Apache-2.0
// The outer axis of a mesh: what its ranks exchange beside the reduces and gathers of the inner axis, on a stream of
// its own, so that it overlaps with them.
//
//   replicate (HSDP)  each group's inner sums are all-reduced on the last contribution of a step
//   optim (HFSDP)     ... reduce-scattered; publishing gathers the updated compute weights
//   shard             inner sums of every contribution are reduce-scattered and added; publishing gathers
//
// Gradients were scaled by the inner reduce: this is a plain sum.
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

// The number of the collectives that are about no group: numbers of all parameters.
inline constexpr uint32_t no_group = ~uint32_t{0};

// What calls change of it (state.h).
struct OuterState {
  uint32_t turn = 0;  // of the buffers of inner sums
  OuterStats stats;
};

class Outer {
 public:
  // Collective over the outer ranks.
  Outer(Context &context, const memory::ModelSpec &spec, const Teams &teams, trace::TimelineLane lane,
        trace::FlightSequence flights);
  ~Outer();
  Outer(const Outer &) = delete;
  Outer &operator=(const Outer &) = delete;

  // Where the group's spans are; storage is complete.
  void add_group(Group &group, const Storage &storage);

  // Do inner sums travel as soon as they are there, part by part? Else the last contribution's do, group by group.
  bool sums_each() const { return mesh_.outer == layout::OuterAxis::shard; }
  // Which buffer of inner sums a part gets; the reduce stream waits until the outer axis has read it.
  uint32_t take_turn(const GradPart &part, device::Stream &reduce_stream);
  // Both come after `reduced`, an event of the reduce stream, and record group.grad.summed.
  void reduce_part(GradPart &part, uint32_t turn, bool accumulate, uint64_t version);
  void reduce_group(Group &group, const device::Event &reduced, uint64_t version);
  // Whole main grads of no_shard groups: brings the slots of other outer ranks, where they are divided.
  void gather_grads(Group &group, uint64_t version);
  // What other outer ranks have of such numbers, each a piece of so many bytes at its place, after the event.
  void gather_values(const Traced &of, std::byte *whole, uint64_t bytes, const device::Event &after, uint64_t version);
  // Brings the updated compute weights of other outer ranks.
  void gather_weights(Group &group, uint64_t version);
  bool gathers() const { return gathers_; }
  // What messages say behind the names of what is summed; stays where it is.
  void set_note(const char *note) { note_ = note; }

  device::Stream &stream() { return *stream_; }
  transport::Collectives &sum_comm() { return *sums_; }
  void next_round();
  void trace_next_round() { trace_->next_round(); }
  void abandon();
  OuterStats stats() const { return state().stats; }
  OuterState state() const;
  void set_state(const OuterState &state);
  // Done when the outer axis has read that turn's inner sums.
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
  uint32_t rank_;   // of the outer team
  uint32_t inner_;  // of the inner team
  bool gathers_;
  const char *note_ = "";
  std::unique_ptr<transport::Collectives> sums_, weights_;
  std::unique_ptr<device::Stream> stream_;
  std::unique_ptr<StreamTrace> trace_;
  std::unique_ptr<device::Event> partial_free_[2];
  OuterState state_;
  uint64_t uncounted_bytes_ = 0;  // that the communicators have counted and the state has not, modulo 2^64
};

}  // namespace fsdp::engine
