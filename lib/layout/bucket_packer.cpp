// SPDX-License-Identifier: Apache-2.0

#include "layout/bucket_packer.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/checked.h"
#include "layout/flat_layout.h"
#include "layout/heavy_assignment.h"

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

// A start at which the item crosses the first boundary after `from`. It crosses several if the slice is a multiple of
// its granule.
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

namespace {

constexpr size_t few = 64;

class Packer {
 public:
  Packer(std::span<const Item> items, uint32_t ranks) : items_(items), assigned_(items, ranks) {}

  Packing pack() {
    pack_host(fill_slack());
    return finish();
  }

 private:
  void open_gaps(GapList &gaps, const Bin &bucket, uint32_t index) const {
    for (const Gap &gap : bucket.gaps) gaps.add(gap);
    const uint64_t end = checked_multiply(bucket.shard, assigned_.rule.ranks, "elements of a sub-bucket");
    gaps.add({end - bucket.cursor, index, bucket.cursor});
  }

  // Places the tensors that fit, in the order given; returns those that do not.
  Indices place_all(GapList &gaps, const Indices &indices) {
    std::vector<uint64_t> shards;
    for (const Bin &bucket : assigned_.buckets) shards.push_back(bucket.shard);
    Indices left;
    for (uint32_t i : indices) {
      if (const auto position = gaps.place(items_[i], shards))
        assigned_.places[i] = *position;
      else
        left.push_back(i);
    }
    return left;
  }

  uint64_t smallest() const {
    uint64_t count = UINT64_MAX;
    for (const Item &item : items_) count = std::min(count, item.count);
    return count;
  }

  // Puts tensors into the slack of all buckets but the host; returns the rest, longest first.
  Indices fill_slack() {
    GapList gaps(smallest());
    for (uint32_t b = 1; b < assigned_.buckets.size(); ++b) open_gaps(gaps, assigned_.buckets[b], b);
    Indices left = place_all(gaps, assigned_.guests);
    std::ranges::copy(place_all(gaps, assigned_.fillers), std::back_inserter(left));
    std::ranges::stable_sort(left, std::greater<>(), [&](uint32_t i) { return items_[i].count; });
    return left;
  }

  uint64_t volume_of(const Indices &indices) const {
    uint64_t volume = 0;
    for (uint32_t i : indices) volume = checked_add(volume, padded_count(items_[i]), "elements of a sub-bucket");
    return volume;
  }

  // Makes the host's slice just long enough.
  void pack_host(const Indices &indices) {
    Bin &host = assigned_.buckets[0];
    if (indices.empty() && host.cursor == 0) return;
    uint64_t least = 1;
    for (uint32_t i : indices) least = std::max(least, items_[i].granule);
    uint64_t volume = checked_add(host.cursor, volume_of(indices), "elements of a sub-bucket");
    if (!indices.empty()) volume -= padded_count(items_[indices.back()]) - items_[indices.back()].count;
    for (uint64_t impatience = 1;; impatience *= 2) {
      host.shard = assigned_.rule.shard_for(volume, host.granule, 1, least);
      GapList gaps(smallest());
      open_gaps(gaps, host, 0);
      const Indices left = place_all(gaps, indices);
      if (left.empty()) return;
      // Starts in phase with the boundaries cost some space, usually far less than the size of a tensor without a
      // place. The loop ends, because a slice that holds everything has no boundary inside.
      const uint64_t growth = divide_up(volume_of(left), left.size() <= few ? 32 : 1);
      volume =
          checked_add(checked_multiply(host.shard, assigned_.rule.ranks, "elements of a sub-bucket"),
                      checked_multiply(growth, impatience, "elements of a sub-bucket"), "elements of a sub-bucket");
    }
  }

  // The host comes last: its slices need not end aligned.
  Packing finish() {
    Packing packing;
    const auto &buckets = assigned_.buckets;
    for (size_t b = 1; b < buckets.size(); ++b) packing.buckets.push_back({buckets[b].granule, buckets[b].shard});
    if (buckets[0].shard != 0) packing.buckets.push_back({buckets[0].granule, buckets[0].shard});
    packing.places = std::move(assigned_.places);
    for (Position &place : packing.places)
      place.bucket = static_cast<uint32_t>(place.bucket == 0 ? buckets.size() - 1 : place.bucket - 1);
    return packing;
  }

  std::span<const Item> items_;
  HeavyAssignment assigned_;
};

}  // namespace

Packing pack_buckets(std::span<const Item> items, uint32_t ranks) { return Packer(items, ranks).pack(); }

}  // namespace fsdp::layout
