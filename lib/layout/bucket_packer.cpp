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

// A start at which the item crosses the first boundary after `from`. The item crosses several boundaries if the shard
// is a multiple of its granule.
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
    // The nearest start at a boundary may be earlier than the next multiple of a large granule.
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
constexpr size_t max_granules_tried = 8;
constexpr int bisections = 8;
constexpr size_t lengths_tried = 8;
constexpr uint64_t tolerated = 20;  // up to one element in 20 may be padding

class Packer {
 public:
  Packer(std::span<const Item> items, uint32_t ranks, uint64_t least)
      : items_(items), least_(least), assigned_(items, ranks, least) {}

  Packing pack() {
    pack_shared(fill_slack());
    return finish();
  }

 private:
  void open_gaps(GapList &gaps, const BucketDraft &bucket, uint32_t index) const {
    for (const Gap &gap : bucket.gaps) gaps.add(gap);
    const uint64_t end = checked_multiply(bucket.shard, assigned_.rule.ranks, "elements of a sub-bucket");
    gaps.add({end - bucket.cursor, index, bucket.cursor});
  }

  // Places the tensors that fit, in the given order; returns the tensors that do not fit.
  Indices place_all(GapList &gaps, const Indices &indices) {
    std::vector<uint64_t> shards;
    for (const BucketDraft &bucket : assigned_.buckets) shards.push_back(bucket.shard);
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

  // Puts tensors into the slack of all buckets except the shared bucket; returns the remaining tensors, longest first.
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

  // Finds the shortest shard of the shared bucket with which every tensor has a place. Boundaries between shards must
  // not fall inside a tensor's granule, which limits where the tensor may start. A tensor
  // may find no place in a shard whose length is not a multiple of its granule, so multiples are tried as well.
  void pack_shared(const Indices &indices) {
    BucketDraft &shared = assigned_.buckets[0];
    if (indices.empty() && shared.cursor == 0) return;
    SharedTry shortest;
    for (const uint64_t granule : list_granules(indices)) shorten(indices, granule, shortest);
    shared.shard = shortest.shard, shared.granule = shortest.granule;
    assigned_.places = std::move(shortest.places);
  }

  struct SharedTry {
    uint64_t shard = too_many, granule = 1;
    std::vector<Position> places = {};
  };

  // Lists the granules to try: first that of the shared bucket. Then, for each granule of a tensor, from the largest
  // down, its least common multiple with the bucket's granule, and with all tensors' granules up to this one.
  std::vector<uint64_t> list_granules(const Indices &indices) const {
    std::set<uint64_t, std::greater<>> distinct;
    for (const uint32_t i : indices) distinct.insert(items_[i].granule);
    const uint64_t of_bucket = assigned_.buckets[0].granule;
    std::vector<uint64_t> granules{of_bucket};
    uint64_t common = of_bucket;
    for (const uint64_t granule : distinct) {
      if (granules.size() > max_granules_tried) break;
      common = saturating_lcm(common, granule);
      for (const uint64_t next : {saturating_lcm(of_bucket, granule), common})
        if (next != too_many && std::ranges::find(granules, next) == granules.end()) granules.push_back(next);
    }
    return granules;
  }

  // Tries shards that are multiples of the granule. Ends when they are no shorter than `shortest`, the best so far.
  void shorten(const Indices &indices, uint64_t granule, SharedTry &shortest) {
    const uint64_t least = least_shard(indices);
    uint64_t volume = volume_of_shared(indices), shard = 0, failed = 0;
    for (uint64_t growth = 1;; growth *= 2) {
      shard = assigned_.rule.shard_for(volume, granule, least);
      if (shard >= shortest.shard) break;
      const uint64_t left = try_shared(indices, granule, shard, shortest);
      if (left == 0) break;
      failed = shard;
      // Starts that are in phase with the boundaries cost some space, usually far less than the size of the tensors
      // without a place. The loop ends, because a shard that holds everything has no boundary inside.
      volume = checked_add(checked_multiply(shard, assigned_.rule.ranks, "elements of a sub-bucket"),
                           checked_multiply(left, growth, "elements of a sub-bucket"), "elements of a sub-bucket");
    }
    for (int i = 0; failed && i < bisections; ++i) {
      const uint64_t middle = saturating_round_up(failed + (std::min(shard, shortest.shard) - failed) / 2, granule);
      if (middle >= shortest.shard) return;
      if (try_shared(indices, granule, middle, shortest)) failed = middle;
    }
  }

  uint64_t least_shard(const Indices &indices) const {
    uint64_t least = std::max<uint64_t>(least_, 1);
    for (uint32_t i : indices) least = std::max(least, items_[i].granule);
    return least;
  }

  uint64_t volume_of_shared(const Indices &indices) const {
    uint64_t volume = checked_add(assigned_.buckets[0].cursor, volume_of(indices), "elements of a sub-bucket");
    if (!indices.empty()) volume -= padded_count(items_[indices.back()]) - items_[indices.back()].count;
    return volume;
  }

  // If every tensor has a place, keeps the places and returns 0. If not, returns the number of elements by which the
  // shared bucket should grow.
  uint64_t try_shared(const Indices &indices, uint64_t granule, uint64_t shard, SharedTry &shortest) {
    assigned_.buckets[0].shard = shard;
    GapList gaps(smallest());
    open_gaps(gaps, assigned_.buckets[0], 0);
    const Indices left = place_all(gaps, indices);
    if (!left.empty()) return divide_up(volume_of(left), left.size() <= few ? 32 : 1);
    shortest = {shard, granule, assigned_.places};
    return 0;
  }

  // The shared bucket comes last, because its shards need not end aligned.
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
  uint64_t least_;  // the shared bucket's shard has at least this many elements
  HeavyAssignment assigned_;
};

uint64_t shard_of(const Packing &packing) {
  uint64_t shard = 0;
  for (const PackedBucket &bucket : packing.buckets) shard = saturating_add(shard, bucket.shard);
  return shard;
}

// Returns the lengths of a few of the tensors, the shortest first.
std::vector<uint64_t> sample_counts(std::span<const Item> items) {
  std::set<uint64_t> distinct;
  for (const Item &item : items) distinct.insert(item.count);
  const std::vector<uint64_t> counts(distinct.begin(), distinct.end());
  std::vector<uint64_t> some;
  for (size_t i = 0; i < std::min(counts.size(), lengths_tried); ++i)
    some.push_back(counts[(i + 1) * counts.size() / std::min(counts.size(), lengths_tried) - 1]);
  return some;
}

}  // namespace

// A heavy tensor begins at a common multiple of its granule and the alignment. If rows are long and of an odd length,
// such multiples are far apart, and the padding may be large. In that case shards that are as long as a tensor may need
// less padding.
Packing pack_buckets(std::span<const Item> items, uint32_t ranks) {
  Packing best = Packer(items, ranks, 0).pack();
  uint64_t elements = 0;
  for (const Item &item : items) elements = saturating_add(elements, item.count);
  const uint64_t enough = divide_up(elements, ranks) + elements / ranks / tolerated;
  if (shard_of(best) <= enough) return best;
  for (const uint64_t least : sample_counts(items)) {
    if (least >= shard_of(best)) break;
    Packing other = Packer(items, ranks, least).pack();
    if (shard_of(other) < shard_of(best)) best = std::move(other);
  }
  return best;
}

}  // namespace fsdp::layout
