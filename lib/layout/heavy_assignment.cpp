// SPDX-License-Identifier: Apache-2.0
#include "layout/heavy_assignment.h"

#include <functional>
#include <tuple>

namespace fsdp::layout {
namespace {

constexpr size_t buckets_considered = 16;  // bounds the work for lists with very many granules
constexpr int assignment_rounds = 16;

uint64_t elements_of(std::span<const Item> items) {
  uint64_t sum = 0;
  for (const Item &item : items) sum = checked_add(sum, item.count, "elements of all tensors");
  return sum;
}

// Elements from the start of the first member to the end of the last, if the first starts at a multiple of its step.
uint64_t span_of(std::span<const Item> items, std::span<const uint32_t> members) {
  uint64_t end = 0;
  for (uint32_t i : members)
    end = checked_add(round_up(end, items[i].step, "tensor offset"), items[i].count, "elements of a sub-bucket");
  return end;
}

}  // namespace

HeavyAssignment::HeavyAssignment(std::span<const Item> items, uint32_t ranks, uint64_t least)
    : rule{ranks, elements_of(items) / ranks / 1024},
      buckets(1),
      places(items.size()),
      fillers(items.size()),
      items_(items),
      least_(least),
      penalty_(rule.allowance / 2) {
  std::iota(fillers.begin(), fillers.end(), 0u);
  std::ranges::stable_sort(fillers, std::greater<>(), [&](uint32_t i) { return items_[i].count; });
  measure_fillers();
  assign_all();
}

void HeavyAssignment::assign_all() {
  for (int round = 0; round < assignment_rounds; ++round) {
    // Tensors that become heavy may leave the shared bucket. Its shard then shrinks, and more tensors become heavy.
    Indices heavy = take_heavy(shard_of_shared(buckets[0].granule, buckets[0].cursor, slack_));
    if (heavy.empty()) return;
    measure_fillers();
    for (auto first = heavy.begin(); first != heavy.end();) {
      const auto last =
          std::find_if(first, heavy.end(), [&](uint32_t i) { return items_[i].granule != items_[*first].granule; });
      assign_class({first, last});
      first = last;
    }
  }
}

// Takes the heavy tensors from the fillers, ordered by granule and then by length, largest first.
Indices HeavyAssignment::take_heavy(uint64_t shard) {
  const auto is_filler = [&](uint32_t i) {
    return items_[i].count <= shard || buckets[0].granule % items_[i].granule == 0;
  };
  const auto first = std::ranges::stable_partition(fillers, is_filler).begin();
  Indices heavy(first, fillers.end());
  fillers.erase(first, fillers.end());
  std::ranges::stable_sort(heavy, std::greater<>(), [&](uint32_t i) { return items_[i].granule; });
  return heavy;
}

void HeavyAssignment::measure_fillers() {
  filler_volume_ = 0;
  filler_granule_ = 1;
  for (uint32_t i : fillers) {
    filler_volume_ = checked_add(filler_volume_, padded_count(items_[i]), "elements of all tensors");
    filler_granule_ = std::max(filler_granule_, items_[i].granule);
  }
}

uint64_t HeavyAssignment::slack(const BucketDraft &bucket) const {
  const uint64_t taken = checked_add(bucket.cursor, bucket.reserved, "elements of a sub-bucket");
  return std::max(saturating_multiply(bucket.shard, rule.ranks), taken) - taken;
}

uint64_t HeavyAssignment::shard_of_shared(uint64_t granule, uint64_t heavy, uint64_t slack) const {
  const uint64_t left = filler_volume_ - std::min(filler_volume_, slack);
  const uint64_t volume = saturating_add(heavy, left);
  const uint64_t least = std::max<uint64_t>(least_, left == 0 ? 1 : filler_granule_);
  return volume == 0 ? 0 : rule.shard_for(volume, granule, least);
}

void HeavyAssignment::assign_class(std::span<const uint32_t> members) {
  Indices rest;
  for (uint32_t i : members)
    if (!fits_existing(i)) rest.push_back(i);
  if (!rest.empty()) place_together(rest);
}

// Puts the tensor into the slack of a bucket if that does not change the bucket's shard.
bool HeavyAssignment::fits_existing(uint32_t index) {
  const Item &item = items_[index];
  for (size_t b = std::min(buckets.size(), buckets_considered); b-- > 0;) {
    BucketDraft &bucket = buckets[b];
    if (bucket.granule % item.granule == 0) {
      const uint64_t end = saturating_add(saturating_round_up(bucket.cursor, item.step), item.count);
      const bool fits = b == 0 ? shard_of_shared(bucket.granule, end, slack_) ==
                                     shard_of_shared(bucket.granule, bucket.cursor, slack_)
                               : end - bucket.cursor <= slack(bucket);
      if (fits) {
        if (b != 0) slack_ -= end - bucket.cursor;
        add_heavy(static_cast<uint32_t>(b), index);
        return true;
      }
    } else if (b != 0 && item.count <= bucket.shard && saturating_add(item.count, item.step) <= slack(bucket)) {
      bucket.reserved += item.count + item.step;
      slack_ -= item.count + item.step;
      guests.push_back(index);
      return true;
    }
  }
  return false;
}

HeavyAssignment::Outlook HeavyAssignment::outlook(uint32_t bucket, uint64_t granule, uint64_t step,
                                                  uint64_t span) const {
  const BucketDraft old = bucket < buckets.size() ? buckets[bucket] : BucketDraft{};
  BucketDraft joined = old;
  joined.granule = saturating_lcm(old.granule, granule);
  joined.cursor = saturating_add(saturating_round_up(old.cursor, step), span);
  if (bucket == 0) {
    joined.shard = shard_of_shared(joined.granule, joined.cursor, slack_);
    return {saturating_add(shards_, joined.shard), joined.granule, joined.shard};
  }
  joined.shard = rule.shard_for(saturating_add(joined.cursor, old.reserved), joined.granule, old.shard);
  const uint64_t slack_then = saturating_add(slack_ - slack(old), slack(joined));
  const uint64_t shared = shard_of_shared(buckets[0].granule, buckets[0].cursor, slack_then);
  return {saturating_add(saturating_add(shards_ - old.shard, joined.shard), shared), joined.granule, joined.shard};
}

// All members have the same granule.
void HeavyAssignment::place_together(std::span<const uint32_t> members) {
  const Item &first = items_[members.front()];
  const uint64_t span = span_of(items_, members);
  auto best_bucket = static_cast<uint32_t>(buckets.size());
  Outlook best = outlook(best_bucket, first.granule, first.step, span);
  uint64_t bar = saturating_add(best.shards, penalty_);
  for (uint32_t b = 0; b < std::min(buckets.size(), buckets_considered); ++b) {
    const Outlook joined = outlook(b, first.granule, first.step, span);
    if (joined.shards == too_many || joined.shards > bar || (best_bucket < b && joined.shards == bar)) continue;
    best_bucket = b;
    best = joined;
    bar = joined.shards;
  }
  if (best.shards == too_many) fail(FSDP_INVALID_ARGUMENT, "{} elements on {} ranks exceed 64 bits", span, rule.ranks);
  if (best_bucket == buckets.size()) buckets.emplace_back();
  BucketDraft &bucket = buckets[best_bucket];
  const uint64_t old_slack = best_bucket == 0 ? 0 : slack(bucket);
  const uint64_t old_shard = bucket.shard;
  bucket.granule = best.granule;
  if (best_bucket != 0) bucket.shard = best.shard;
  for (uint32_t i : members) add_heavy(best_bucket, i);
  if (best_bucket == 0) return;
  shards_ = checked_add(shards_ - old_shard, bucket.shard, "elements of a shard");
  slack_ = saturating_add(slack_ - old_slack, slack(bucket));
}

void HeavyAssignment::add_heavy(uint32_t index_of_bucket, uint32_t index) {
  BucketDraft &bucket = buckets[index_of_bucket];
  const uint64_t start = round_up(bucket.cursor, items_[index].step, "tensor offset");
  if (start != bucket.cursor) bucket.gaps.push_back({start - bucket.cursor, index_of_bucket, bucket.cursor});
  places[index] = {index_of_bucket, start};
  bucket.cursor = checked_add(start, items_[index].count, "elements of a sub-bucket");
}

}  // namespace fsdp::layout
