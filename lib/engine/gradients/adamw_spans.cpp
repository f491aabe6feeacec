// SPDX-License-Identifier: Apache-2.0
#include "engine/gradients/adamw_spans.h"

#include <algorithm>
#include <functional>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/dtype.h"
#include "device/state_codes.h"
#include "memory/plane.h"

namespace fsdp::engine {
namespace {

device::MainForm form_of(fsdp_main_storage storage) {
  return storage == FSDP_MAIN_SPLIT16 ? device::MainForm::split16
         : storage == FSDP_MAIN_NONE  ? device::MainForm::rounded
                                      : device::MainForm::float32;
}

uint32_t hash_name(const memory::ParamSpec &param) {
  return static_cast<uint32_t>(XXH64(param.name.data(), param.name.size(), 0));
}

// The address to which the update writes the compute weights. It is NULL if the main weights are the compute weights.
// It is also NULL if the compute weights are codes, because a code depends on more than one element.
std::byte *compute_of(const Shard &shard) {
  if (shard.bucket->plane(PlaneKind::main).plan->again || shard.bucket->plan->quantization) return nullptr;
  return shard.bucket->plane(PlaneKind::compute).at(shard.slice);
}

void set_states(const Runtime &runtime, const Shard &shard, device::CompactSpan &span) {
  const Bucket &bucket = *shard.bucket;
  span.exp_avg = bucket.plane(PlaneKind::state, 0).at(shard.slice);
  span.exp_avg_sq = bucket.plane(PlaneKind::state, 1).at(shard.slice);
  if (!bucket.plan->coded_states) return;
  const layout::Slice scales =
      runtime.slice_of(*bucket.plan->state_layout, shard.tensor, bucket.owned_plane().plan->owned, bucket.plan->mesh);
  span.exp_avg_scales = reinterpret_cast<float *>(bucket.plane(PlaneKind::state_scales, 0).at(scales));
  span.exp_avg_sq_scales = reinterpret_cast<float *>(bucket.plane(PlaneKind::state_scales, 1).at(scales));
}

device::CompactSpan compact_span_of(const Runtime &runtime, const Shard &shard, bool adamw) {
  const Bucket &bucket = *shard.bucket;
  device::CompactSpan span{};
  span.weight = bucket.plane(PlaneKind::main).at(shard.slice);
  span.grad = shard.main_grad();
  span.compute = compute_of(shard);
  span.compute_dtype = bucket.plane(PlaneKind::compute).dtype();
  span.form = form_of(bucket.plan->main_storage);
  span.numbers = {0, shard.slice.count, 0};
  span.count = shard.slice.count;
  if (shard.is_split()) span.rest = reinterpret_cast<int16_t *>(bucket.plane(PlaneKind::rest).at(shard.slice));
  if (adamw) set_states(runtime, shard, span);
  return span;
}

template <class T>
void advance(T *&array, uint64_t bytes) {
  if (array) array = reinterpret_cast<T *>(reinterpret_cast<std::byte *>(array) + bytes);
}
void advance(void *&array, uint64_t bytes) {
  if (array) array = static_cast<std::byte *>(array) + bytes;
}

// Returns the part of a span that consists of the elements of `run`. If states are in codes, runs begin at blocks.
device::CompactSpan part_of(device::CompactSpan span, const memory::ElementRun &run) {
  const uint64_t state = span.exp_avg_scales ? 1 : sizeof(float);
  const uint64_t blocks = run.begin / device::state_block * sizeof(float);
  advance(span.weight, run.begin * (span.form == device::MainForm::float32 ? sizeof(float) : sizeof(uint16_t)));
  advance(span.rest, run.begin * sizeof(int16_t));
  advance(span.compute, run.begin * dtype_size(span.compute_dtype));
  span.grad += run.begin;
  advance(span.exp_avg, run.begin * state);
  advance(span.exp_avg_sq, run.begin * state);
  advance(span.exp_avg_scales, blocks);
  advance(span.exp_avg_sq_scales, blocks);
  span.numbers = {run.first, run.length, run.pitch}, span.count = run.count;
  return span;
}

// Does an array of `count` elements end where `next` begins? If neither span has such an array, the answer is yes.
bool follows(const void *array, uint64_t count, uint64_t size, const void *next) {
  return array ? static_cast<const std::byte *>(array) + count * size == next : !next;
}

// Does b begin where a ends, in every array of the span?
bool continues(const device::AdamWSpan &a, const device::AdamWSpan &b) {
  return a.compute_dtype == b.compute_dtype && follows(a.weight, a.count, sizeof(float), b.weight) &&
         follows(a.grad, a.count, sizeof(float), b.grad) && follows(a.exp_avg, a.count, sizeof(float), b.exp_avg) &&
         follows(a.exp_avg_sq, a.count, sizeof(float), b.exp_avg_sq) &&
         follows(a.compute, a.count, dtype_size(a.compute_dtype), b.compute);
}

// Spans with scales are never joined, nor are spans with weights that need the numbers of their elements.
bool continues(const device::CompactSpan &a, const device::CompactSpan &b) {
  return a.form == device::MainForm::split16 && b.form == a.form && !a.exp_avg_scales && !b.exp_avg_scales &&
         follows(a.weight, a.count, sizeof(uint16_t), b.weight) && follows(a.rest, a.count, sizeof(int16_t), b.rest) &&
         follows(a.grad, a.count, sizeof(float), b.grad) && follows(a.exp_avg, a.count, sizeof(float), b.exp_avg) &&
         follows(a.exp_avg_sq, a.count, sizeof(float), b.exp_avg_sq);
}

template <class Span>
void append_any(std::vector<Span> &spans, const Span &span) noexcept {
  if (!spans.empty() && continues(spans.back(), span))
    spans.back().count += span.count;
  else
    spans.push_back(span);
}

}  // namespace

void append(std::vector<device::AdamWSpan> &spans, const device::AdamWSpan &span) noexcept { append_any(spans, span); }
void append(std::vector<device::CompactSpan> &spans, const device::CompactSpan &span) noexcept {
  append_any(spans, span);
}

bool is_compact(const Shard &shard) {
  return shard.bucket->plan->coded_states || shard.bucket->plan->main_storage != FSDP_MAIN_FLOAT32;
}

device::AdamWSpan span_of(const Runtime &runtime, const Shard &shard, uint64_t first, uint64_t count) {
  const bool adamw = !shard.param(runtime).by_caller();
  const auto state = [&](uint32_t index) {
    return adamw ? reinterpret_cast<float *>(shard.bucket->plane(PlaneKind::state, index).at(shard.slice)) + first
                 : nullptr;
  };
  const fsdp_dtype dtype = shard.bucket->plane(PlaneKind::compute).dtype();
  std::byte *compute = compute_of(shard);
  advance(compute, first * dtype_size(dtype));
  return {reinterpret_cast<float *>(shard.main_weight()) + first,
          shard.main_grad() + first,
          state(0),
          state(1),
          compute,
          dtype,
          count};
}

// Stochastic rounding needs the numbers of the elements. The elements of a box may be several runs, and in that case
// each run is a span.
std::vector<device::CompactSpan> compact_spans_of(const Runtime &runtime, const Shard &shard, uint64_t first,
                                                  uint64_t count) {
  const memory::ParamSpec &param = shard.param(runtime);
  device::CompactSpan whole = compact_span_of(runtime, shard, !param.by_caller());
  if (whole.form != device::MainForm::rounded) return {part_of(whole, {first, count, 0, count, 0})};
  whole.name = hash_name(param);
  std::vector<device::CompactSpan> spans;
  for (memory::ElementRun run : list_runs(param, shard.slice.tensor_offset + first, count)) {
    run.begin += first;
    spans.push_back(part_of(whole, run));
  }
  return spans;
}

void AdamWBatch::add(const Runtime &runtime, const Shard &shard) {
  if (!is_compact(shard)) return shards.push_back({&shard, span_of(runtime, shard, 0, shard.slice.count)});
  for (const device::CompactSpan &span : compact_spans_of(runtime, shard, 0, shard.slice.count))
    compact_shards.push_back({&shard, span});
}

void AdamWBatch::order() {
  std::ranges::sort(shards, std::less<>(), [](const auto &one) { return one.span.weight; });
  std::ranges::sort(compact_shards, std::less<>(), [](const auto &one) { return one.span.weight; });
  spans.reserve(shards.size());
  compact.reserve(compact_shards.size());
}

void round_randomly(const Runtime &runtime, const memory::ParamSpec &param, const device::RandomRounding &numbers,
                    uint64_t first, uint64_t step, device::Stream &caller) {
  runtime.join_window(caller);
  for (const memory::ElementRun &run : list_runs(param, first, numbers.count)) {
    device::RandomRounding work = numbers;
    work.from += run.begin, work.to += run.begin, work.count = run.count;
    work.numbers = {run.first, run.length, run.pitch};
    work.key = {runtime.spec.rounding_seed, hash_name(param), static_cast<uint32_t>(step)};
    caller.round_randomly(work);
  }
  runtime.leave_window(caller);
}

}  // namespace fsdp::engine
