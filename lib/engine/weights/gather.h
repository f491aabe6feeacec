// SPDX-License-Identifier: Apache-2.0
// Unshard and reshard: holds by piece and phase, prefetch along the schedule, and which piece has which pool buffer.
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
#include "engine/weights/visit_cursor.h"

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
  bool has(uint32_t key) const {
    return std::ranges::find(buffers_, std::optional(key), &Buffer::key) != buffers_.end();
  }
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
  static constexpr uint32_t whole_group = VisitCursor::whole_group;

  explicit Gatherer(Runtime &runtime);

  // Gathers ahead, on the caller's thread where that is sooner than on another one.
  void prefetch(Group &group, fsdp_phase phase, const device::Stream &caller);
  // Holds all pieces of the group, or one. What is not gathered yet is gathered in one launch.
  void unshard(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream);
  void reshard(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream);
  // Enqueues work that reads the phase's weights on that stream: after their gather, and before they are overwritten.
  void read(Group &group, uint32_t piece, fsdp_phase phase, fsdp_stream stream, const char *call,
            const std::function<void(device::Stream &)> &reads);
  // May the phase's weights of the piece be read? If not, says why.
  std::string find_unreadable(Group &group, uint32_t piece, fsdp_phase phase) const;
  // The address at which the whole published plane of the bucket begins.
  const std::byte *view(Group &group, fsdp_phase phase, uint32_t bucket, PlaneKind published, uint32_t form) const;
  // The address at which the library reads the plane, whatever the caller has written into a private view.
  const std::byte *source(Group &group, fsdp_phase phase, uint32_t bucket, PlaneKind published, uint32_t form) const;
  // Makes the views of a group show its weights again. Gathered copies are restored by the next gather.
  void restore(Group &group);
  // Lists groups that still have holds; empty if there are none.
  std::string list_holds() const;
  // Drops weights that were gathered and are not held; with `force` also held weights.
  void drop_all(bool force);
  void start_step() { cursor_.restart(); }
  // Debug mode: weights that the strategy keeps whole may be read only outside of the update window.
  void show_whole(bool readable);
  VisitCursor::Positions cursors() const { return cursor_.positions(); }
  void set_cursors(VisitCursor::Positions positions) { cursor_.set_positions(positions); }

 private:
  // What a call asks for: a slot's pieces, all or one.
  struct Request {
    Group &group;
    std::span<GatherSlot> slots;
    uint32_t piece;  // whole_group, or the number of the piece
    fsdp_phase phase;

    bool whole() const { return piece == whole_group; }
    const char *unshard_call() const { return whole() ? "fsdp_unshard" : "fsdp_unshard_piece"; }
    const char *reshard_call() const { return whole() ? "fsdp_reshard" : "fsdp_reshard_piece"; }
    std::string name() const;
  };
  // The slots that have the pool request of this key.
  struct Owner {
    Group *group = nullptr;
    std::span<GatherSlot> slots;

    bool gathered() const { return std::ranges::any_of(slots, &GatherSlot::gathered); }
    bool held() const {
      return std::ranges::any_of(slots, [](const GatherSlot &slot) { return slot.hold_count() > 0; });
    }
    std::string name() const;
  };

  static Request ask(Group &group, uint32_t piece, fsdp_phase phase);
  bool prefetch(const Request &asked, const device::Stream &caller);
  void require_form(const Request &asked) const;
  std::string advise_return(const Request &asked) const;
  void require_backward_weights(const Request &asked) const;
  void prefetch_after(fsdp_phase phase, uint32_t position, const device::Stream &caller);
  bool is_sooner_here(const Request &asked, const device::Stream &caller) const;
  // Gathers what is not gathered. Throws if a group with holds has the buffer; drops the weights of one without holds.
  // ahead: before the unshard. here: on the caller's thread; else the gather is enqueued.
  void gather(const Request &asked, bool ahead, bool here);
  bool blocked(const GatherSlot &slot) const;
  std::string advise_residence(const Owner &held) const;
  std::string advise_planes(const Request &asked) const;
  void require_buffer(const Request &asked, const GatherSlot &slot) const;
  void evict(const GatherSlot &slot);
  bool any_order() const { return runtime_.spec.schedule == FSDP_SCHEDULE_ANY; }
  std::optional<uint32_t> choose_buffer(bool ahead) const;
  void take_buffer(const Request &asked, bool ahead);
  [[noreturn]] void refuse_buffer(const Request &asked) const;
  bool is_short_copy(const Request &asked, const device::Stream &waiting) const;
  void copy_here(const Request &asked);
  void enqueue_copies(const Request &asked);
  bool keeps(const Group &group, const GatherSlot &slot, fsdp_phase phase) const;
  void release(Group &group, GatherSlot &slot);
  void release(const Owner &owner);
  void drop(Group &group);
  void set_readable(const Group &group, uint32_t piece, bool readable);
  void poison(const GatherSlot &slot);

  Runtime &runtime_;
  VisitCursor cursor_;
  HeldBuffers held_;
  std::vector<Owner> owners_;              // by key
  std::vector<transport::Gather> launch_;  // the gathers of several pieces in one launch
  const uint64_t longest_unprefetched_;    // bytes of a copy that costs a caller less than a prefetch of it
};

}  // namespace fsdp::engine
