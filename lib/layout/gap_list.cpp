// SPDX-License-Identifier: Apache-2.0
#include "layout/gap_list.h"

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "layout/flat_layout.h"
#include "layout/shard_rule.h"

namespace fsdp::layout {
namespace {

constexpr int boundary_attempts = 8;
constexpr int gap_attempts = 8;

uint64_t align(uint64_t value) { return round_up(value, alignment, "tensor offset"); }

bool fits_between(uint64_t start, uint64_t count, uint64_t shard) { return count <= shard - start % shard; }

// The smallest aligned start in [from, boundary) such that the boundary falls between two granules.
std::optional<uint64_t> start_in_phase(const Item &item, uint64_t from, uint64_t boundary) {
  const uint64_t common = std::gcd(item.granule, alignment);
  if (boundary % common != 0) return std::nullopt;
  uint64_t start = from + (boundary - from) % item.granule;
  for (uint64_t i = 0; i < alignment / common && start < boundary; ++i, start = saturating_add(start, item.granule))
    if (start % alignment == 0) return start;
  return std::nullopt;
}

// A start at which the item crosses the first boundary after `from`, or several where the slice is made of its
// granules.
std::optional<uint64_t> find_crossing_start(const Item &item, uint64_t shard, uint64_t from, uint64_t boundary) {
  if (shard % item.granule == 0) return round_up(from, item.step, "tensor offset");
  if (item.count > saturating_multiply(2, shard)) return std::nullopt;
  const auto start = start_in_phase(item, from, boundary);
  return start && saturating_add(*start, item.count) <= saturating_add(boundary, shard) ? start : std::nullopt;
}

}  // namespace

std::optional<uint64_t> find_start(const Item &item, uint64_t shard, uint64_t from, uint64_t end) {
  if (shard < item.granule || from > end) return std::nullopt;
  uint64_t start = align(from);
  for (int i = 0; i < boundary_attempts && start < end && item.count <= end - start; ++i) {
    if (fits_between(start, item.count, shard)) return start;
    const uint64_t boundary = (start / shard + 1) * shard;
    const auto crossing = find_crossing_start(item, shard, start, boundary);
    const uint64_t next = align(boundary);
    // Waiting for the boundary may be shorter than waiting for the next multiple of a large granule.
    const bool wait = !crossing || (*crossing > next && fits_between(next, item.count, shard));
    if (!wait) return *crossing <= end && item.count <= end - *crossing ? crossing : std::nullopt;
    start = next;
  }
  return std::nullopt;
}

void GapList::add(Gap gap) {
  const uint64_t skipped = (alignment - gap.start % alignment) % alignment;
  if (gap.size >= saturating_add(smallest_, skipped))
    gaps_.insert({gap.size - skipped, gap.bucket, gap.start + skipped});
}

std::optional<Position> GapList::place_in(Iterator gap, const Item &item, uint64_t shard) {
  const Gap whole = *gap;
  const auto start = find_start(item, shard, whole.start, whole.start + whole.size);
  if (!start) return std::nullopt;
  gaps_.erase(gap);
  add({*start - whole.start, whole.bucket, whole.start});
  const uint64_t end = *start + item.count;
  add({whole.start + whole.size - end, whole.bucket, end});
  return Position{whole.bucket, *start};
}

std::optional<Position> GapList::place(const Item &item, std::span<const uint64_t> shards) {
  auto gap = gaps_.lower_bound({item.count, 0, 0});
  for (int i = 0; i < gap_attempts && gap != gaps_.end(); ++i) {
    const auto tried = gap++;
    if (const auto position = place_in(tried, item, shards[tried->bucket])) return position;
  }
  if (gap == gaps_.end()) return std::nullopt;
  const auto largest = std::prev(gaps_.end());
  return place_in(largest, item, shards[largest->bucket]);
}

}  // namespace fsdp::layout
