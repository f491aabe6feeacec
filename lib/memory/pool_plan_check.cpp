// SPDX-License-Identifier: Apache-2.0
// What a pool plan promises, checked without the code that makes it.
#include <map>

#include "base/error.h"
#include "memory/live_sweep.h"

namespace fsdp::memory {
namespace {

// Byte ranges that are in use, disjoint.
class UsedBytes {
 public:
  // The request in the way, or no_slot after taking the bytes.
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

// Requests of different tracks never share bytes, at whatever time.
std::string check_tracks(const PoolPlan &plan, std::span<const PoolRequest> requests) {
  std::vector<uint32_t> order;
  for (uint32_t r = 0; r < requests.size(); ++r)
    if (requests[r].bytes != 0) order.push_back(r);
  std::ranges::sort(order, {}, [&](uint32_t r) { return plan.offsets[r]; });
  std::map<uint32_t, std::pair<uint64_t, uint32_t>> ends;  // by track: the highest end so far and whose it is
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
