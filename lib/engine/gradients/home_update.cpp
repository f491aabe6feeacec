// SPDX-License-Identifier: Apache-2.0
#include "engine/gradients/home_update.h"

#include <algorithm>

#include "device/state_codes.h"
#include "engine/context/context.h"
#include "engine/gradients/weight_norms.h"
#include "memory/home_plan.h"

namespace fsdp::engine {
namespace {

bool is_main(const memory::PlanePlan &plane) { return plane.kind == PlaneKind::main; }

bool is_grad(const memory::PlanePlan &plane) { return plane.kind == PlaneKind::grad; }

// Does AdamW change the plane?
bool is_changed(const memory::PlanePlan &plane) {
  return is_main(plane) || plane.kind == PlaneKind::rest ||
         (plane.kind == PlaneKind::state && plane.index < memory::adamw_states);
}

bool is_read(const memory::PlanePlan &plane) { return is_changed(plane) || is_grad(plane); }

bool has(const Shard &shard, bool (*chooses)(const memory::PlanePlan &)) {
  return std::ranges::any_of(shard.bucket->plan->planes,
                             [&](const memory::PlanePlan &plane) { return plane.in_file() && chooses(plane); });
}

// Are the compute weights a cast of main weights in other memory?
bool is_cast(const Shard &shard) {
  return !shard.bucket->plane(PlaneKind::main).plan->again && !shard.bucket->plan->quantization;
}

// The index of the shard's first element in the planes of the optimizer. Main weights that are the compute weights are
// numbered otherwise.
uint64_t index_of(const Shard &shard) {
  return shard.bucket->is_whole() ? shard.slice.full_offset : shard.slice.shard_offset;
}

}  // namespace

HomeUpdate::HomeUpdate(Runtime &runtime, const std::vector<Shard> &shards)
    : runtime_(runtime), shards_(shards), turns_(runtime), batch_of_(shards.size()) {
  for (const Bucket &bucket : runtime.storage->buckets()) {
    if (!memory::has_home(*bucket.plan)) continue;
    std::vector<uint32_t> own;
    for (uint32_t s = 0; s < shards.size(); ++s)
      if (shards[s].bucket == &bucket) own.push_back(s);
    std::ranges::sort(own, {}, [&](uint32_t s) { return index_of(shards[s]); });
    plan_bucket(bucket, own);
  }
  visited_.reserve(planned_.size());
  visiting_.reserve(planned_.size());
}

bool HomeUpdate::updates_in_file(const Shard &shard) { return has(shard, is_read); }
bool HomeUpdate::has_grads_in_file(const Shard &shard) { return has(shard, is_grad); }
bool HomeUpdate::casts_in_file(const Shard &shard) { return has(shard, is_main); }

// Segments begin at pages of every plane. Shards with states in codes begin at blocks, so no block is cut either.
void HomeUpdate::plan_bucket(const Bucket &bucket, const std::vector<uint32_t> &shards) {
  const std::vector<uint64_t> sizes = memory::home_planes(*bucket.plan);
  const uint64_t step = memory::segment_elements(sizes, runtime_.spec.homes.turn_bytes);
  const uint64_t end = shards.empty() ? 0 : index_of(shards_[shards.back()]) + shards_[shards.back()].slice.count;
  for (uint64_t begin = 0; begin < end; begin += step) {
    PlannedSegment planned{{&bucket, begin, std::min(begin + step, end)}, {}};
    for (const uint32_t s : shards) {
      const uint64_t first = index_of(shards_[s]), after = first + shards_[s].slice.count;
      const uint64_t from = std::max(first, planned.segment.begin), to = std::min(after, planned.segment.end);
      if (from < to) planned.parts.push_back({s, from - first, to - from});
      if (bucket.plan->coded_states && first % device::state_block)
        fail(FSDP_INTERNAL, "states in codes of '{}' begin at element {} of a bucket, inside a block",
             shards_[s].param(runtime_).name, first);
    }
    if (!planned.parts.empty()) planned_.push_back(std::move(planned));
  }
}

template <class Span>
void HomeUpdate::bring(const HomeView &view, Span &span) const {
  const HomeFile &file = *runtime_.storage->home_file();
  view.bring(span.weight, file);
  view.bring(span.grad, file);
  view.bring(span.exp_avg, file);
  view.bring(span.exp_avg_sq, file);
  if constexpr (std::is_same_v<Span, device::CompactSpan>) view.bring(span.rest, file);
}

void HomeUpdate::add_part(const HomeView &view, const ShardPart &part, BatchSpans &to) const {
  const Shard &shard = shards_[part.shard];
  if (!is_compact(shard)) {
    device::AdamWSpan span = span_of(runtime_, shard, part.first, part.count);
    bring(view, span);
    return append(to.spans, span);
  }
  for (device::CompactSpan span : compact_spans_of(runtime_, shard, part.first, part.count)) {
    bring(view, span);
    append(to.compact, span);
  }
}

float *HomeUpdate::grads_of(const HomeView &view, const ShardPart &part) const {
  float *grads = shards_[part.shard].main_grad() + part.first;
  view.bring(grads, *runtime_.storage->home_file());
  return grads;
}

void HomeUpdate::scale_part(const HomeView &view, const ShardPart &part, device::Stream &caller) const {
  if (!has_grads_in_file(shards_[part.shard])) return;
  const device::FloatSpan span{grads_of(view, part), part.count};
  for (const float factor : factors_) caller.scale_all({&span, 1}, factor);
}

void HomeUpdate::scale_grads(float factor) {
  if (factor != 1.0F && std::ranges::any_of(shards_, has_grads_in_file)) factors_.push_back(factor);
}

std::span<const float> HomeUpdate::scaled(std::span<float> numbers) const noexcept {
  for (const float factor : factors_)
    for (float &number : numbers) number *= factor;
  return numbers;
}

void HomeUpdate::sum_squares(double *values, device::Stream &caller) {
  std::optional<OrderedSquares> sum;
  const auto write = [&](const Shard &shard, double value) {
    runtime_.context.device().transfer(values + shard.ordinal, FSDP_UINT8, &value, FSDP_UINT8, sizeof value);
  };
  for (const Shard &shard : shards_)
    if (has_grads_in_file(shard) && shard.answers && !shard.param(runtime_).has_gradient()) write(shard, 0);
  read_grads(caller, [&](const Shard &shard, uint64_t first, std::span<const float> numbers) {
    if (!shard.answers) return;
    const Group &group = runtime_.groups[shard.group];
    if (first == 0) sum.emplace(runtime_.placement(group.places[shard.param_index]).granule);
    sum->add(numbers);
    if (first + numbers.size() == shard.slice.count) write(shard, sum->sum());
  });
}

// The buffers of segments are free between passes.
void HomeUpdate::settle_grads() {
  if (factors_.empty()) return;
  HomeFile &file = *runtime_.storage->home_file();
  const Region &turns = runtime_.storage->region(memory::RegionId::turns);
  const std::span<float> numbers(reinterpret_cast<float *>(turns.data),
                                 runtime_.plan.region(memory::RegionId::turns).bytes / sizeof(float));
  for (const Shard &shard : shards_)
    for (uint64_t first = 0; has_grads_in_file(shard) && first < shard.slice.count; first += numbers.size()) {
      const auto some = numbers.first(std::min<uint64_t>(numbers.size(), shard.slice.count - first));
      auto *const there = reinterpret_cast<std::byte *>(shard.main_grad() + first);
      runtime_.storage->attempt_on_file([&] {
        file.read(there, std::as_writable_bytes(some));
        scaled(some);
        file.write(there, std::as_bytes(some));
      });
    }
  factors_.clear();
}

void HomeUpdate::cast_part(const HomeView &view, const ShardPart &part, device::Stream &caller) const {
  const Shard &shard = shards_[part.shard];
  const Plane &main = shard.bucket->plane(PlaneKind::main), &compute = shard.bucket->plane(PlaneKind::compute);
  const std::byte *from = main.at(shard.slice) + part.first * dtype_size(main.dtype());
  view.bring(from, *runtime_.storage->home_file());
  caller.cast(compute.at(shard.slice) + part.first * dtype_size(compute.dtype()), compute.dtype(), from, main.dtype(),
              part.count);
}

void HomeUpdate::step(std::span<const AdamWBatch> batches, const std::vector<uint8_t> &kept, device::Stream &caller) {
  for (uint32_t b = 0; b < batches.size(); ++b) {
    for (const auto &one : batches[b].shards) batch_of_[static_cast<size_t>(one.shard - shards_.data())] = b;
    for (const auto &one : batches[b].compact_shards) batch_of_[static_cast<size_t>(one.shard - shards_.data())] = b;
  }
  batches_.resize(batches.size());
  visiting_.clear();
  for (PlannedSegment &planned : planned_) {
    const Shard &first = shards_[planned.parts.front().shard];  // all shards of a bucket have the same planes
    const bool updates = std::ranges::any_of(planned.parts, [&](const ShardPart &part) { return !kept[part.shard]; });
    planned.segment.writes = updates && has(first, is_changed);
    if ((updates && updates_in_file(first)) || casts_in_file(first)) visiting_.push_back(&planned);
  }
  visit(is_read, caller, [&](const HomeView &view, const std::vector<ShardPart> &parts) {
    for (BatchSpans &of : batches_) of.spans.clear(), of.compact.clear();
    for (const ShardPart &part : parts)
      if (!kept[part.shard])
        scale_part(view, part, caller), add_part(view, part, batches_[batch_of_[part.shard]]);
      else if (casts_in_file(shards_[part.shard]))
        cast_part(view, part, caller);
    for (size_t b = 0; b < batches.size(); ++b) {
      caller.adamw(batches[b].step, batches_[b].spans);
      caller.compact_adamw(batches[b].step, batches_[b].compact);
    }
  });
}

void HomeUpdate::cast(device::Stream &caller) {
  for (uint32_t s = 0; s < shards_.size(); ++s)
    if (updates_in_file(shards_[s]) && !casts_in_file(shards_[s]) && is_cast(shards_[s]))
      cast_part({}, {s, 0, shards_[s].slice.count}, caller);
  visiting_.clear();
  for (PlannedSegment &planned : planned_) {
    planned.segment.writes = false;
    if (casts_in_file(shards_[planned.parts.front().shard])) visiting_.push_back(&planned);
  }
  visit(is_main, caller, [&](const HomeView &view, const std::vector<ShardPart> &parts) {
    for (const ShardPart &part : parts) cast_part(view, part, caller);
  });
}

}  // namespace fsdp::engine
