// SPDX-License-Identifier: Apache-2.0
// Unshard and reshard: holds by phase, prefetch along the schedule, and which group has which pool buffer.
//
//   mapped   the full weights are a view of the shared arena: a gather only changes state and copies 0 bytes
//   copied   a gather waits for the shards' version, then pulls every rank's slice into the slot's pool buffer,
//            which is planned or, with FSDP_SCHEDULE_ANY, chosen by the gather
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

// Which gathered weights have which buffer with FSDP_SCHEDULE_ANY: pure bookkeeping. Weights whose last hold was
// returned keep their buffer until other weights need it. The buffer that has been idle longest is taken first.

class HeldBuffers {
 public:
  struct Buffer {
    std::optional<uint32_t> key;  // key of the slot whose weights are in the buffer
    uint64_t idle_since = 0;      // time, in gathers and returned holds; valid while nothing holds the buffer
  };

  explicit HeldBuffers(size_t count) : buffers_(count) {}

  size_t count() const { return buffers_.size(); }
  const std::vector<Buffer> &buffers() const { return buffers_; }
  // Returns a buffer without weights. If there is none, returns the buffer idle longest of those whose weights may go.
  template <class MayGo>
  std::optional<uint32_t> choose(MayGo may_go) const {
    std::optional<uint32_t> chosen;
    for (uint32_t b = 0; b < buffers_.size(); ++b) {
      if (!buffers_[b].key) return b;
      if (may_go(*buffers_[b].key) && (!chosen || buffers_[b].idle_since < buffers_[*chosen].idle_since)) chosen = b;
    }
    return chosen;
  }
  void take(uint32_t buffer, uint32_t key) { buffers_[buffer] = {key, ++clock_}; }
  void set_idle(uint32_t key) {
    if (Buffer *const own = find(key)) own->idle_since = ++clock_;
  }
  void give_back(uint32_t key) {
    if (Buffer *const own = find(key)) own->key.reset();
  }

 private:
  Buffer *find(uint32_t key) {
    const auto found = std::ranges::find(buffers_, std::optional(key), &Buffer::key);
    return found == buffers_.end() ? nullptr : &*found;
  }

  std::vector<Buffer> buffers_;
  uint64_t clock_ = 0;
};

const char *phase_name(fsdp_phase phase);

class Gatherer {
 public:
  explicit Gatherer(Runtime &runtime);

  // Gathers ahead, on the caller's thread where that is sooner than on another one.
  void prefetch(Group &group, fsdp_phase phase, const device::Stream &caller);
  void unshard(Group &group, fsdp_phase phase, fsdp_stream stream);
  void reshard(Group &group, fsdp_phase phase, fsdp_stream stream);
  // Enqueues work that reads the phase's weights on that stream: after their gather, and before they are overwritten.
  void read(Group &group, fsdp_phase phase, fsdp_stream stream, const char *call,
            const std::function<void(device::Stream &)> &reads);
  // readable(): is the group readable? view(): the address at which the whole published plane of the bucket begins.
  bool readable(Group &group, fsdp_phase phase) const;
  const std::byte *view(Group &group, fsdp_phase phase, uint32_t bucket, PlaneKind published, uint32_t form) const;
  // The address at which the library reads the plane, whatever the caller has written into a private view.
  const std::byte *source(Group &group, fsdp_phase phase, uint32_t bucket, PlaneKind published, uint32_t form) const;
  // Makes the views of a group show its weights again. Gathered copies are restored by the next gather.
  void restore(Group &group);
  // Lists groups that still have holds; empty if there are none.
  std::string list_holds() const;
  // Drops weights that were gathered and are not held; with `force` also held weights.
  void drop_all(bool force);
  void start_step() { cursors_ = {}; }
  // Debug mode: weights that the strategy keeps whole may be read only outside of the update window.
  void show_whole(bool readable);
  // Where the search for the next visit of a group with several visits begins.
  struct Cursors {
    uint32_t train = 0, eval = 0;
  };
  Cursors cursors() const { return cursors_; }
  void set_cursors(Cursors cursors) { cursors_ = cursors; }

 private:
  static bool training(fsdp_phase phase) { return phase != FSDP_EVAL; }
  const std::vector<fsdp_visit> &visits(fsdp_phase phase) const;
  uint32_t find_position(const Group &group, fsdp_phase phase);
  void require_form(Group &group, fsdp_phase phase) const;
  void prefetch_after(fsdp_phase phase, uint32_t position, const device::Stream &caller);
  bool is_sooner_here(const Group &group, const device::Stream &caller) const;
  // Gathers the group. Throws if a group with holds has the buffer; drops the weights of one without holds. ahead:
  // before the unshard. here: on the caller's thread; else the gather is enqueued.
  void gather(Group &group, GatherSlot &slot, fsdp_phase phase, bool ahead, bool here);
  bool blocked(const GatherSlot &slot) const;
  std::string advise_residence(const Group &held, const GatherSlot &slot) const;
  std::string advise_planes(const Group &group, fsdp_phase phase) const;
  void evict(Group &group, GatherSlot &slot, fsdp_phase phase);
  bool any_order() const { return runtime_.spec.schedule == FSDP_SCHEDULE_ANY; }
  std::optional<uint32_t> choose_buffer(bool ahead) const;
  void take_buffer(Group &group, GatherSlot &slot, fsdp_phase phase, bool ahead);
  [[noreturn]] void refuse_buffer(const Group &group, fsdp_phase phase) const;
  bool is_short_copy(const Group &group, const device::Stream &waiting) const;
  void copy_here(Group &group, GatherSlot &slot);
  void enqueue_copies(Group &group, GatherSlot &slot);
  bool keeps(const Group &group, const GatherSlot &slot, fsdp_phase phase) const;
  void release(Group &group, GatherSlot &slot);
  void drop(Group &group);
  void set_readable(const Group &group, bool readable);
  void poison(const GatherSlot &slot);
  Group &group_of(uint32_t key) { return runtime_.groups[key / runtime_.plan.visits.slots]; }
  const Group &group_of(uint32_t key) const { return runtime_.groups[key / runtime_.plan.visits.slots]; }
  GatherSlot &slot_of(uint32_t key) { return group_of(key).slots[key % runtime_.plan.visits.slots]; }
  const GatherSlot &slot_of(uint32_t key) const { return group_of(key).slots[key % runtime_.plan.visits.slots]; }

  Runtime &runtime_;
  std::vector<std::vector<uint32_t>> positions_;       // positions in `train`, by group and phase
  std::vector<std::vector<uint32_t>> eval_positions_;  // positions in `eval`, by group
  Cursors cursors_;
  HeldBuffers held_;
  const uint64_t longest_unprefetched_;  // bytes of a copy that costs a caller less than a prefetch of it
};

}  // namespace fsdp::engine
