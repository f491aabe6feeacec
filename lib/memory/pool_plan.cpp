// SPDX-License-Identifier: Apache-2.0

#include "memory/pool_plan.h"

#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "base/error.h"

namespace fsdp::memory {

namespace {

// Rounds sizes up to the alignment, so that sums of sizes are aligned offsets.
std::vector<uint64_t> rounded_sizes(std::span<const PoolRequest> requests, uint64_t alignment_bytes) {
  std::vector<uint64_t> sizes;
  sizes.reserve(requests.size());
  uint64_t sum = 0;
  for (const PoolRequest &request : requests) {
    sizes.push_back(round_up(request.bytes, alignment_bytes, "pool bytes"));
    sum = checked_add(sum, sizes.back(), "pool bytes");  // no plan is larger than this sum, so later sums need no check
  }
  return sizes;
}

// The peaks of different tracks are added, because they may coincide.
uint64_t peak_bytes(std::span<const LiveEvent> events, std::span<const uint64_t> sizes) {
  std::map<uint32_t, std::map<uint32_t, uint64_t>> peaks;  // by mode, then track
  uint64_t live = 0;
  for (const LiveEvent &event : events) {
    live = event.begin ? live + sizes[event.request] : live - sizes[event.request];
    uint64_t &peak = peaks[event.mode][event.track];
    peak = std::max(peak, live);
  }
  uint64_t most = 0;
  for (const auto &[mode, tracks] : peaks) {
    uint64_t sum = 0;
    for (const auto &[track, peak] : tracks) sum += peak;
    most = std::max(most, sum);
  }
  return most;
}

// Sets offsets by slot: each slot is as large as its largest member.
uint64_t stack_slots(const Colouring &colouring, std::span<const uint64_t> sizes, std::span<const uint32_t> members,
                     std::vector<uint64_t> &offsets) {
  std::vector<uint64_t> starts(colouring.slot_count, 0);
  for (uint32_t r : members) starts[colouring.slots[r]] = std::max(starts[colouring.slots[r]], sizes[r]);
  uint64_t end = 0;
  for (uint64_t &start : starts) end += std::exchange(start, end);
  for (uint32_t r : members) offsets[r] = starts[colouring.slots[r]];
  return end;
}

struct TrackPlan {
  std::vector<uint64_t> offsets;  // one per request of the pool
  uint64_t size_bytes;
};

// Returns the smallest of several plans. The plan that stacks the slots wins a tie, because its slots are disjoint.
TrackPlan plan_track(const Colouring &colouring, std::span<const LiveEvent> events, std::span<const uint64_t> sizes,
                     std::span<const uint32_t> members) {
  TrackPlan best{std::vector<uint64_t>(sizes.size(), 0), 0};
  best.size_bytes = stack_slots(colouring, sizes, members, best.offsets);
  const bool equal = std::ranges::all_of(members, [&](uint32_t r) { return sizes[r] == sizes[members.front()]; });
  const auto conflicts = equal ? std::nullopt : Conflicts::find(events, sizes.size());
  if (!conflicts) return best;
  std::vector<uint32_t> by_size(members.begin(), members.end());
  std::ranges::stable_sort(by_size, std::greater<>(), [&](uint32_t r) { return sizes[r]; });
  for (const std::span<const uint32_t> order : {std::span<const uint32_t>(by_size), members}) {
    for (const Fit fit : {Fit::lowest, Fit::tightest}) {
      TrackPlan plan{std::vector<uint64_t>(sizes.size(), 0), 0};
      plan.size_bytes = assign_offsets(*conflicts, sizes, order, fit, plan.offsets);
      if (plan.size_bytes < best.size_bytes) best = std::move(plan);
    }
  }
  return best;
}

}  // namespace

PoolPlan plan_pool(std::span<const PoolRequest> requests, uint64_t alignment_bytes) {
  if (alignment_bytes == 0) fail(FSDP_INVALID_ARGUMENT, "a pool alignment of 0 bytes");
  const std::vector<uint64_t> sizes = rounded_sizes(requests, alignment_bytes);
  const std::vector<LiveEvent> events = live_events(requests);
  PoolPlan plan;
  plan.offsets.assign(requests.size(), 0);
  plan.slots.assign(requests.size(), no_slot);
  plan.lower_bound_bytes = peak_bytes(events, sizes);

  std::map<uint32_t, std::vector<LiveEvent>> tracks;
  for (uint32_t r = 0; r < requests.size(); ++r)
    if (requests[r].bytes != 0) tracks[requests[r].track];
  for (const LiveEvent &event : events) tracks[event.track].push_back(event);
  uint32_t slot_count = 0;
  for (const auto &[track, track_events] : tracks) {
    const Colouring colouring = colour_requests(requests, track, track_events);
    const TrackPlan placed = plan_track(colouring, track_events, sizes, colouring.first_use);
    for (uint32_t r : colouring.first_use) {
      plan.offsets[r] = plan.size_bytes + placed.offsets[r];
      plan.slots[r] = slot_count + colouring.slots[r];
    }
    plan.size_bytes += placed.size_bytes;
    slot_count += colouring.slot_count;
  }
  return plan;
}

namespace {

// The times when a slot is in use: disjoint intervals in each mode.
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
  // The first slot that is not in use, starting at `slot`.
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

  // A request that begins for the first time gets the first slot that is free whenever the request is live.
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

namespace {

constexpr size_t max_conflicts = 2'000'000;

using Range = std::pair<uint64_t, uint64_t>;  // [begin, end)

// `taken` is ordered by begin.
uint64_t offset_beside(std::span<const Range> taken, uint64_t size, Fit fit) {
  uint64_t best = 0, best_gap = UINT64_MAX, end = 0;
  for (const auto &[from, to] : taken) {
    const uint64_t gap = from > end ? from - end : 0;
    if (gap >= size && gap < best_gap) {
      if (fit == Fit::lowest) return end;
      best = end;
      best_gap = gap;
    }
    end = std::max(end, to);
  }
  return best_gap == UINT64_MAX ? end : best;
}

}  // namespace

std::optional<Conflicts> Conflicts::find(std::span<const LiveEvent> events, size_t request_count) {
  std::vector<std::pair<uint32_t, uint32_t>> pairs;
  std::vector<uint32_t> live;
  for (const LiveEvent &event : events) {
    if (!event.begin) {
      live.erase(std::ranges::find(live, event.request));
      continue;
    }
    if (pairs.size() + live.size() > max_conflicts) return std::nullopt;
    for (uint32_t other : live) pairs.emplace_back(event.request, other);
    live.push_back(event.request);
  }
  Conflicts conflicts;
  conflicts.starts_.assign(request_count + 1, 0);
  for (const auto &[a, b] : pairs) {
    ++conflicts.starts_[a + 1];
    ++conflicts.starts_[b + 1];
  }
  for (size_t r = 0; r < request_count; ++r) conflicts.starts_[r + 1] += conflicts.starts_[r];
  conflicts.neighbours_.resize(2 * pairs.size());
  std::vector<size_t> next(conflicts.starts_.begin(), conflicts.starts_.end() - 1);
  for (const auto &[a, b] : pairs) {
    conflicts.neighbours_[next[a]++] = b;
    conflicts.neighbours_[next[b]++] = a;
  }
  return conflicts;
}

uint64_t assign_offsets(const Conflicts &conflicts, std::span<const uint64_t> sizes, std::span<const uint32_t> order,
                        Fit fit, std::vector<uint64_t> &offsets) {
  std::vector<bool> placed(sizes.size(), false);
  std::vector<Range> taken;
  uint64_t end = 0;
  for (uint32_t r : order) {
    taken.clear();
    for (uint32_t other : conflicts.of(r))
      if (placed[other]) taken.emplace_back(offsets[other], offsets[other] + sizes[other]);
    std::ranges::sort(taken);
    offsets[r] = offset_beside(taken, sizes[r], fit);
    placed[r] = true;
    end = std::max(end, offsets[r] + sizes[r]);
  }
  return end;
}

// Checks the promises of a pool plan, without the code that makes the plan.

namespace {

// Byte ranges that are in use, disjoint.
class UsedBytes {
 public:
  // Returns a request that uses some of the bytes, or takes the bytes and returns no_slot.
  uint32_t take(uint64_t begin, uint64_t end, uint32_t request) {
    const auto next = ranges_.lower_bound(end);
    if (next != ranges_.begin() && std::prev(next)->second.first > begin) return std::prev(next)->second.second;
    ranges_[begin] = {end, request};
    return no_slot;
  }
  void give_back(uint64_t begin) { ranges_.erase(begin); }

 private:
  std::map<uint64_t, std::pair<uint64_t, uint32_t>> ranges_;  // begin to (end, request)
};

std::string check_time(const PoolPlan &plan, std::span<const PoolRequest> requests) {
  UsedBytes used;
  for (const LiveEvent &event : live_events(requests)) {
    const uint64_t begin = plan.offsets[event.request];
    if (!event.begin) {
      used.give_back(begin);
      continue;
    }
    const uint32_t other = used.take(begin, begin + requests[event.request].bytes, event.request);
    if (other != no_slot)
      return format_text("requests {} and {} share bytes while both are live, in mode {} at time {}", other,
                         event.request, event.mode, event.time);
  }
  return {};
}

// Requests of different tracks never share bytes, whenever they are live.
std::string check_tracks(const PoolPlan &plan, std::span<const PoolRequest> requests) {
  std::vector<uint32_t> order;
  for (uint32_t r = 0; r < requests.size(); ++r)
    if (requests[r].bytes != 0) order.push_back(r);
  std::ranges::sort(order, {}, [&](uint32_t r) { return plan.offsets[r]; });
  std::map<uint32_t, std::pair<uint64_t, uint32_t>>
      ends;  // by track: the highest end so far, and the request that has it
  for (uint32_t r : order) {
    const uint64_t end = plan.offsets[r] + requests[r].bytes;
    for (const auto &[track, highest] : ends)
      if (track != requests[r].track && highest.first > plan.offsets[r])
        return format_text("requests {} and {} share bytes on different tracks", highest.second, r);
    auto &highest = ends[requests[r].track];
    if (end > highest.first) highest = {end, r};
  }
  return {};
}

}  // namespace

std::string validate(const PoolPlan &plan, std::span<const PoolRequest> requests) {
  if (plan.offsets.size() != requests.size() || plan.slots.size() != requests.size())
    return format_text("the plan has {} offsets for {} requests", plan.offsets.size(), requests.size());
  for (size_t r = 0; r < requests.size(); ++r)
    if (plan.offsets[r] > plan.size_bytes || requests[r].bytes > plan.size_bytes - plan.offsets[r])
      return format_text("request {} ends beyond the pool's {} bytes", r, plan.size_bytes);
  if (plan.lower_bound_bytes > plan.size_bytes)
    return format_text("a pool of {} bytes below the bound of {}", plan.size_bytes, plan.lower_bound_bytes);
  if (std::string broken = check_time(plan, requests); !broken.empty()) return broken;
  return check_tracks(plan, requests);
}

}  // namespace fsdp::memory
