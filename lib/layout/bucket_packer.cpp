// SPDX-License-Identifier: Apache-2.0
#include "layout/bucket_packer.h"

#include <functional>

#include "layout/heavy_assignment.h"

namespace fsdp::layout {
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

  // Places what fits, in the order given; returns what does not.
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
      // Starts in phase with the boundaries have cost some space, usually far less than the last tensor that found
      // none. A slice that holds everything has no boundary to care for, so this ends.
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
