// SPDX-License-Identifier: Apache-2.0
#include "memory/offset_assignment.h"

#include <utility>

namespace fsdp::memory {
namespace {

constexpr size_t most_conflicts = 2'000'000;

using Range = std::pair<uint64_t, uint64_t>;  // [begin, end)

// `taken` in order of begin.
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
    if (pairs.size() + live.size() > most_conflicts) return std::nullopt;
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

}  // namespace fsdp::memory
