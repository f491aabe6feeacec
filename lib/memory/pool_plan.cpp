// SPDX-License-Identifier: Apache-2.0
#include "memory/pool_plan.h"

#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "base/checked.h"
#include "memory/live_sweep.h"
#include "memory/offset_assignment.h"
#include "memory/slot_colouring.h"

namespace fsdp::memory {
namespace {

// Sizes rounded up to the alignment, so that offsets that add up sizes are aligned.
std::vector<uint64_t> rounded_sizes(std::span<const PoolRequest> requests, uint64_t alignment_bytes) {
  std::vector<uint64_t> sizes;
  sizes.reserve(requests.size());
  uint64_t sum = 0;
  for (const PoolRequest &request : requests) {
    sizes.push_back(round_up(request.bytes, alignment_bytes, "pool bytes"));
    sum = checked_add(sum, sizes.back(), "pool bytes");  // no plan is larger: later sums need no check
  }
  return sizes;
}

// Peaks of different tracks may coincide.
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

// Offsets by slot: each slot is as large as its largest member.
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
  std::vector<uint64_t> offsets;  // one a request of the pool
  uint64_t size_bytes;
};

// The smallest of the ways that we know; the plain one wins a tie, since its slots are disjoint.
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

}  // namespace fsdp::memory
