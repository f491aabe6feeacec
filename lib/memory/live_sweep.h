// SPDX-License-Identifier: Apache-2.0
// Walks through the time of pool requests, one (track, mode) after the other: ends before begins. Inside the pool
// planner only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#include "memory/pool_plan.h"

namespace fsdp::memory {

struct LiveEvent {
  uint32_t track, mode;
  uint64_t time;
  bool begin;
  uint32_t request;
};

// The request's intervals with overlapping and touching ones joined, so that it begins once for each time it ends.
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

// In order of time. Requests without bytes are left out.
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

}  // namespace fsdp::memory
