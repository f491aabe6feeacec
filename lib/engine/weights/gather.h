// SPDX-License-Identifier: Apache-2.0
// Unshard and reshard: holds by piece and phase, and prefetch along the schedule.
//
//   mapped   the full weights are a view of the shared arena: a gather only changes state and copies 0 bytes
//   copied   a gather waits for the shards' version, then pulls every rank's slice into the slot's pool buffer,
//            which is planned or, with FSDP_SCHEDULE_ANY, chosen by the gather
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/runtime/runtime.h"
#include "engine/weights/gather_buffers.h"

namespace fsdp::engine {

class Gatherer {
 public:
  static constexpr uint32_t whole_group = VisitCursor::whole_group;

  explicit Gatherer(Runtime &runtime);

  // Gathers ahead, on the caller's thread if that is faster than on the worker.
  void prefetch(Group &group, fsdp_phase phase, const device::Stream &caller);
  // Holds all pieces of the group, or one piece. Pieces that are not gathered yet are gathered in one launch.
  void unshard(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream);
  void reshard(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream);
  // Orders work on that stream that reads the phase's weights: after their gather, and before they are overwritten.
  void read(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream, const char *call,
            const std::function<void(device::Stream &)> &reads);
  // Says why the phase's weights of the piece may not be read; empty if they may.
  std::string find_unreadable(Group &group, uint32_t piece, fsdp_phase phase) const;
  // The address at which the whole published plane of the bucket begins.
  const std::byte *view(Group &group, fsdp_phase phase, uint32_t bucket, PlaneKind published, uint32_t form) const;
  // The address at which the library reads the plane; writes of the caller into a private view do not change its
  // numbers.
  const std::byte *source(Group &group, fsdp_phase phase, uint32_t bucket, PlaneKind published, uint32_t form) const;
  // Makes the group's views show its weights again. Gathered copies are restored by the next gather.
  void restore(Group &group);
  // Lists groups that still have holds; empty if there are none.
  std::string list_holds() const;
  // Drops weights that were gathered and are not held; with `force` also held weights.
  void drop_all(bool force);
  void start_step() { cursor_.restart(); }
  // Debug mode: sets whether weights that the strategy keeps whole may be read; in the update window they may not.
  void show_whole(bool readable);
  VisitCursor::Positions cursors() const { return cursor_.positions(); }
  void set_cursors(VisitCursor::Positions positions) { cursor_.set_positions(positions); }

 private:
  void prefetch(const GatherRequest &asked, const device::Stream &caller);
  void require_form(const GatherRequest &asked) const;
  std::string advise_return(const GatherRequest &asked) const;
  static void require_backward_weights(const GatherRequest &asked, const char *call);
  void prefetch_after(fsdp_phase phase, uint32_t position, const device::Stream &caller);
  bool is_sooner_here(const GatherRequest &asked, const device::Stream &caller) const;
  // Gathers the pieces that are not gathered. Throws if a group with holds has the buffer; drops the weights of a group
  // without holds. `ahead`: the gather comes before the unshard. `here`: the caller's thread copies; otherwise the
  // gather is enqueued.
  void gather(const GatherRequest &asked, bool ahead, bool here);
  bool any_order() const { return runtime_.spec.schedule == FSDP_SCHEDULE_ANY; }
  bool is_short_copy(const GatherRequest &asked, const device::Stream &waiting) const;
  void copy_here(const GatherRequest &asked);
  void enqueue_copies(const GatherRequest &asked);
  bool keeps(const Group &group, const GatheredPiece &slot, fsdp_phase phase) const;
  void release(Group &group, GatheredPiece &slot);
  void drop(Group &group);
  void set_readable(const Group &group, uint32_t piece, bool readable);
  void poison(const Group &group, const GatheredPiece &slot);

  Runtime &runtime_;
  VisitCursor cursor_;
  GatherBuffers buffers_;
  std::vector<transport::Gather> launch_;  // scratch: the gathers of several pieces, for one launch
  const uint64_t longest_unprefetched_;    // largest copy, in bytes, for which the caller is faster than a prefetch
};

}  // namespace fsdp::engine
