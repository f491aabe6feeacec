// SPDX-License-Identifier: Apache-2.0
#include "memory/slot_colouring.h"

#include <map>
#include <utility>

namespace fsdp::memory {
namespace {

// When a slot is taken: disjoint intervals of each mode.
class Occupancy {
 public:
  bool is_free(std::span<const Interval> intervals) const {
    for (const Interval &i : intervals) {
      const auto next = taken_.lower_bound({i.mode, i.end});
      if (next == taken_.begin()) continue;
      const auto &[key, end] = *std::prev(next);
      if (key.first == i.mode && end > i.begin) return false;
    }
    return true;
  }
  void take(std::span<const Interval> intervals) {
    for (const Interval &i : intervals) taken_[{i.mode, i.begin}] = i.end;
  }

 private:
  std::map<std::pair<uint32_t, uint64_t>, uint64_t> taken_;  // (mode, begin) to end
};

// The slots in use at the present time of a sweep.
class BusySlots {
 public:
  void set(uint32_t slot, bool busy) {
    if (slot / 64 >= words_.size()) words_.resize(slot / 64 + 1, 0);
    const uint64_t bit = uint64_t{1} << (slot % 64);
    words_[slot / 64] = busy ? words_[slot / 64] | bit : words_[slot / 64] & ~bit;
  }
  // The first slot from `slot` on that is not in use.
  uint32_t next_idle(uint32_t slot) const {
    for (; slot / 64 < words_.size(); slot = (slot / 64 + 1) * 64) {
      const uint64_t idle = ~words_[slot / 64] >> (slot % 64);
      if (idle != 0) return slot + static_cast<uint32_t>(__builtin_ctzll(idle));
    }
    return slot;
  }

 private:
  std::vector<uint64_t> words_;
};

class Sweep {
 public:
  explicit Sweep(std::span<const PoolRequest> requests) : requests_(requests) {
    colouring_.slots.assign(requests.size(), no_slot);
  }

  // Requests that the sweep meets for the first time get the first slot that is free whenever they are live.
  void meet(const LiveEvent &event) {
    if (event.begin && colouring_.slots[event.request] == no_slot) colour(event.request);
    busy_.set(colouring_.slots[event.request], event.begin);
  }

  void colour(uint32_t request) {
    const std::vector<Interval> intervals = joined_intervals(requests_[request]);
    uint32_t slot = busy_.next_idle(0);
    while (slot < occupancy_.size() && !occupancy_[slot].is_free(intervals)) slot = busy_.next_idle(slot + 1);
    if (slot >= occupancy_.size()) {
      slot = static_cast<uint32_t>(occupancy_.size());
      occupancy_.emplace_back();
    }
    occupancy_[slot].take(intervals);
    colouring_.slots[request] = slot;
    colouring_.first_use.push_back(request);
  }

  bool has_slot(uint32_t request) const { return colouring_.slots[request] != no_slot; }

  Colouring finish() {
    colouring_.slot_count = static_cast<uint32_t>(occupancy_.size());
    return std::move(colouring_);
  }

 private:
  std::span<const PoolRequest> requests_;
  Colouring colouring_;
  std::vector<Occupancy> occupancy_;
  BusySlots busy_;
};

}  // namespace

Colouring colour_requests(std::span<const PoolRequest> requests, uint32_t track, std::span<const LiveEvent> events) {
  Sweep sweep(requests);
  for (const LiveEvent &event : events) sweep.meet(event);
  // Requests that are never live still get an address.
  for (uint32_t r = 0; r < requests.size(); ++r)
    if (requests[r].track == track && requests[r].bytes != 0 && !sweep.has_slot(r)) sweep.colour(r);
  return sweep.finish();
}

}  // namespace fsdp::memory
