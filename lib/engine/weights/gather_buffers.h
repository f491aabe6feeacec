// SPDX-License-Identifier: Apache-2.0
// Decides which pieces of groups have which buffer of the pool: planned by the schedule or, with FSDP_SCHEDULE_ANY,
// chosen by a gather.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/runtime/runtime.h"
#include "memory/visit_order.h"

namespace fsdp::engine {

// The place of a model in its schedule, which tells the visit that an unshard begins.
class VisitCursor {
 public:
  static constexpr uint32_t no_position = UINT32_MAX;
  static constexpr uint32_t whole_group = UINT32_MAX;

  VisitCursor(const memory::VisitOrder &order, uint32_t group_count);

  // For a group with several visits: where the search for the next visit begins.
  struct Positions {
    uint32_t train = 0, eval = 0;
  };
  Positions positions() const { return now_; }
  void set_positions(Positions positions) { now_ = positions; }
  void restart() { now_ = {}; }

  // The list of visits for the phase. ahead() lists the visits for which a visit gathers ahead.
  const std::vector<fsdp_visit> &visits(fsdp_phase phase) const {
    return phase == FSDP_EVAL ? order_.eval : order_.train;
  }
  const std::vector<uint32_t> &ahead(fsdp_phase phase, uint32_t position) const {
    return phase == FSDP_EVAL ? order_.eval_prefetch[position] : order_.train_prefetch[position];
  }
  bool has_visits(uint32_t group, fsdp_phase phase) const { return !positions_of(group, phase).empty(); }
  // Moves to the visit that begins when the piece (or whole_group) is unsharded, and returns its position. Returns
  // no_position if the schedule has no visit of the group in this phase. `last` is the position at which this piece was
  // unsharded last time.
  uint32_t advance(uint32_t group, uint32_t piece, fsdp_phase phase, uint32_t last);

 private:
  const std::vector<uint32_t> &positions_of(uint32_t group, fsdp_phase phase) const {
    return positions_[4 * size_t{group} + static_cast<size_t>(phase) - 1];
  }
  uint32_t find(uint32_t group, uint32_t piece, fsdp_phase phase, uint32_t last, uint32_t from) const;

  const memory::VisitOrder &order_;
  std::vector<std::vector<uint32_t>> positions_;  // by group and phase
  Positions now_;
};

// Decides which gathered weights have which buffer with FSDP_SCHEDULE_ANY, without moving bytes. Weights whose last
// hold was returned keep their buffer until other weights need it. The buffer that has been idle longest is reused
// first.

class HeldBuffers {
 public:
  struct Buffer {
    std::optional<uint32_t> key;  // key of the slot whose weights are in the buffer
    uint64_t idle_since = 0;      // time, counted in gathers and returned holds; valid while nothing holds the buffer
  };

  explicit HeldBuffers(size_t count) : buffers_(count) {}

  size_t count() const { return buffers_.size(); }
  const std::vector<Buffer> &buffers() const { return buffers_; }
  // Returns a buffer without weights. If there is none, returns the buffer that has been idle longest among those with
  // weights that may be dropped.
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
// For errors: lists the holds of the slots by phase, and names the calls that return them.
std::string describe_holds(std::span<const GatheredPiece> slots);
const char *calls_of_holds(std::span<const GatheredPiece> slots);

// The pieces of a slot for which a call asks: all or one.
struct GatherRequest {
  Group &group;
  std::span<GatheredPiece> slots;
  uint32_t piece;  // VisitCursor::whole_group, or the number of the piece
  fsdp_phase phase;

  GatherRequest(Group &group, uint32_t piece, fsdp_phase phase)
      : group(group), slots(group.pieces(phase)), piece(piece), phase(phase) {
    if (!whole()) slots = slots.subspan(piece, 1);
  }
  bool whole() const { return piece == VisitCursor::whole_group; }
  bool gathered() const { return std::ranges::all_of(slots, &GatheredPiece::gathered); }
  // The bytes of the pieces that are not gathered.
  uint64_t missing_bytes() const;
  const char *unshard_call() const { return whole() ? "fsdp_unshard" : "fsdp_unshard_piece"; }
  std::string name() const;
};

class GatherBuffers {
 public:
  // The pieces that share one key, and so one buffer.
  struct Owner {
    Group *group = nullptr;
    std::span<GatheredPiece> slots;

    bool gathered() const { return std::ranges::any_of(slots, &GatheredPiece::gathered); }
    bool held() const {
      return std::ranges::any_of(slots, [](const GatheredPiece &slot) { return slot.hold_count() > 0; });
    }
    std::string name() const;
  };
  using Drop = std::function<void(const Owner &)>;

  explicit GatherBuffers(Runtime &runtime);

  // Is there a buffer for a gather ahead of the unshard? If buffers are planned, no weights in the buffer may be
  // gathered now. With FSDP_SCHEDULE_ANY, the weights in the buffer must have no holds.
  bool has_room(const GatherRequest &asked) const;
  // Gives a buffer to each piece that is not gathered. Throws if a group or piece with holds has one of these buffers;
  // drops weights without holds.
  void take(const GatherRequest &asked, bool ahead, const Drop &drop);
  // Called when the last hold of the slot was returned.
  void set_idle(const GatheredPiece &slot) {
    if (!owners_[slot.key].held()) held_.set_idle(slot.key);
  }
  // Called when the slot's weights are no longer gathered.
  void give_back(const GatheredPiece &slot) {
    if (!owners_[slot.key].gathered()) held_.give_back(slot.key);
  }

 private:
  bool any_order() const { return runtime_.spec.schedule == FSDP_SCHEDULE_ANY; }
  bool blocked(const GatherRequest &asked, const GatheredPiece &slot) const;
  static bool is_asked(const GatherRequest &asked, const Owner &owner);
  std::string advise_residence(const Owner &held) const;
  std::string advise_planes(const GatherRequest &asked) const;
  void require_buffer(const GatherRequest &asked, const GatheredPiece &slot) const;
  std::optional<uint32_t> choose_buffer(bool ahead) const;
  bool needs_buffer(const GatherRequest &asked) const;
  void take_buffer(const GatherRequest &asked, bool ahead, const Drop &drop);
  [[noreturn]] void refuse_buffer(const GatherRequest &asked) const;

  Runtime &runtime_;
  HeldBuffers held_;
  std::vector<Owner> owners_;  // by key
};

}  // namespace fsdp::engine
