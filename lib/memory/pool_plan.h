// SPDX-License-Identifier: Apache-2.0
// The pool planner: a pure function. Each request is a buffer of fixed size that is live during some intervals. Two
// requests whose intervals overlap in any mode get disjoint bytes. The offset of a request never changes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

namespace fsdp::memory {

struct Interval {
  uint32_t mode;        // each mode (train, eval) has its own time axis
  uint64_t begin, end;  // the interval [begin, end)
};

struct PoolRequest {
  uint64_t bytes;  // 0: the request needs no buffer
  std::vector<Interval> live;
  // Requests of different tracks (forward and backward of an interleaved schedule) advance independently of each other,
  // so any two of them may be live at the same time.
  uint32_t track = 0;
};

inline constexpr uint32_t no_slot = UINT32_MAX;

struct PoolPlan {
  std::vector<uint64_t> offsets;  // one per request, multiples of the alignment
  // One per request: its colour, counted from 0 in order of first use, or no_slot if the request needs no buffer.
  // Requests of one slot are never live together. With unequal sizes two slots may share bytes, if the requests that
  // use these bytes are never live together.
  std::vector<uint32_t> slots;
  uint64_t size_bytes = 0;         // a multiple of the alignment
  uint64_t lower_bound_bytes = 0;  // maximum of bytes live at one time in any mode, each buffer aligned
};

// Throws INVALID_ARGUMENT if the alignment is 0 or the sizes overflow.
PoolPlan plan_pool(std::span<const PoolRequest> requests, uint64_t alignment_bytes);

// Returns an empty text, or says which two requests share bytes while both are live. For tests and debug mode.
std::string validate(const PoolPlan &plan, std::span<const PoolRequest> requests);

// The beginnings and ends of pool requests sorted by track, then mode, then time. Among events of the same track, mode
// and time, ends come before beginnings. Inside the pool planner only.

struct LiveEvent {
  uint32_t track, mode;
  uint64_t time;
  bool begin;
  uint32_t request;
};

// The request's intervals, with overlapping and touching ones joined, so that its beginnings and ends alternate.
inline std::vector<Interval> joined_intervals(const PoolRequest &request) {
  std::vector<Interval> sorted, joined;
  for (const Interval &interval : request.live)
    if (interval.begin < interval.end) sorted.push_back(interval);
  std::ranges::sort(sorted, {}, [](const Interval &i) { return std::tuple(i.mode, i.begin, i.end); });
  for (const Interval &interval : sorted) {
    if (!joined.empty() && joined.back().mode == interval.mode && interval.begin <= joined.back().end)
      joined.back().end = std::max(joined.back().end, interval.end);
    else
      joined.push_back(interval);
  }
  return joined;
}

// The events in order of time. Requests without bytes are left out.
inline std::vector<LiveEvent> live_events(std::span<const PoolRequest> requests) {
  std::vector<LiveEvent> events;
  for (uint32_t r = 0; r < requests.size(); ++r) {
    if (requests[r].bytes == 0) continue;
    for (const Interval &i : joined_intervals(requests[r])) {
      events.push_back({requests[r].track, i.mode, i.begin, true, r});
      events.push_back({requests[r].track, i.mode, i.end, false, r});
    }
  }
  std::ranges::sort(events, {},
                    [](const LiveEvent &e) { return std::tuple(e.track, e.mode, e.time, e.begin, e.request); });
  return events;
}

// Greedy colouring of the conflict graph of pool requests in first-use order. Inside the pool planner only.

struct Colouring {
  std::vector<uint32_t> first_use;  // the requests of the track that have bytes, in order of their first use
  std::vector<uint32_t> slots;      // one per request of the pool; valid for the requests in first_use
  uint32_t slot_count = 0;
};

Colouring colour_requests(std::span<const PoolRequest> requests, uint32_t track, std::span<const LiveEvent> events);

// Offsets for requests of unequal sizes: greedy dynamic storage allocation. Places the requests one after the other, so
// that each is disjoint from those with which it conflicts. Only for the pool planner.

// Finds which requests are live at the same time.
class Conflicts {
 public:
  // Returns nothing if there are so many conflicts that planning with them would take too long.
  static std::optional<Conflicts> find(std::span<const LiveEvent> events, size_t request_count);
  // The requests that conflict with this one; a request may be listed twice.
  std::span<const uint32_t> of(uint32_t request) const {
    return std::span(neighbours_).subspan(starts_[request], starts_[request + 1] - starts_[request]);
  }

 private:
  std::vector<uint32_t> neighbours_;
  std::vector<size_t> starts_;
};

enum class Fit {
  lowest,   // place a request at the lowest address where it fits
  tightest  // place a request in the smallest gap where it fits
};

// Sets the offsets of the requests, one after the other in `order`; returns the end of the highest request.
uint64_t assign_offsets(const Conflicts &conflicts, std::span<const uint64_t> sizes, std::span<const uint32_t> order,
                        Fit fit, std::vector<uint64_t> &offsets);

}  // namespace fsdp::memory
