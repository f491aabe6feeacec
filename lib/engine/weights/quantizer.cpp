// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/quantizer.h"

#include <cmath>

#include "memory/plane.h"

namespace fsdp::engine {

BlockWork make_block_work(const memory::ModelSpec &spec, const BlockRows &part) {
  const auto codes = [&](uint32_t form) {
    return reinterpret_cast<uint8_t *>(part.bucket.plane(PlaneKind::compute, form).at(part.elements));
  };
  const auto scales = [&](uint32_t form) { return part.bucket.plane(PlaneKind::compute_scales, form).at(part.scales); };
  const uint64_t columns = part.param.shape.back(), rows = part.elements.count / columns;
  const bool via_bf16 = spec.quantize_from == FSDP_BFLOAT16;
  if (part.param.quantization == FSDP_QUANTIZE_MXFP8)
    return device::Mxfp8Quantize{
        .from = part.from,
        .rows = rows,
        .columns = columns,
        .rule = spec.scale_rule == FSDP_SCALE_FLOOR ? device::ScaleRule::floor : device::ScaleRule::round_up,
        .via_bf16 = via_bf16,
        .row = codes(0),
        .row_scales = reinterpret_cast<uint8_t *>(scales(0)),
        .column = codes(1),
        .column_scales = reinterpret_cast<uint8_t *>(scales(1))};
  return device::Fp8BlockQuantize{.from = part.from,
                                  .rows = rows,
                                  .columns = columns,
                                  .power_of_two = spec.scale_rounding == FSDP_SCALE_POWER_OF_TWO,
                                  .via_bf16 = via_bf16,
                                  .codes = codes(0),
                                  .scale_inv = reinterpret_cast<float *>(scales(0))};
}

void quantize(device::Stream &stream, const BlockWork &work) {
  if (const auto *mxfp8 = std::get_if<device::Mxfp8Quantize>(&work))
    stream.quantize_mxfp8(*mxfp8);
  else
    stream.quantize_fp8_blocks(std::get<device::Fp8BlockQuantize>(work));
}

namespace {

std::string name_of(const PlaneSlice &main) {
  return format_text("parameter '{}' of group '{}'", main.param().name, main.group.name());
}

}  // namespace

NonfiniteWeights::NonfiniteWeights(Runtime &runtime)
    : runtime_(runtime), done_(runtime.context.device().create_event()) {
  const memory::RegionPlan &region = runtime.plan.region(memory::RegionId::norms);
  std::byte *const tail =
      runtime.storage->own_part(memory::RegionId::norms) + region.bytes - memory::nonfinite_bytes(runtime.plan);
  counts_ = found_ = reinterpret_cast<uint64_t *>(tail);
  if (const memory::RegionPlan &device = runtime.plan.region(memory::RegionId::device_norms); device.bytes)
    found_ = reinterpret_cast<uint64_t *>(runtime.storage->own_part(memory::RegionId::device_norms) + device.bytes -
                                          memory::nonfinite_count_bytes(runtime.plan));
  amaxes_ = reinterpret_cast<float *>(tail + memory::nonfinite_count_bytes(runtime.plan));
  runtime.context.flight_log().add_unsettled(this);
}

NonfiniteWeights::~NonfiniteWeights() {
  runtime_.context.flight_log().remove_unsettled(this);
  settle();
  if (version_) runtime_.context.flight_log().expect_word(false);
}

void NonfiniteWeights::add(const PlaneSlice &main, const device::Mxfp8Quantize &work) {
  of_scales_.push_back({name_of(main), work.rows * work.columns / device::mxfp8_block});
}

void NonfiniteWeights::add(const PlaneSlice &main, const device::Fp8BlockQuantize &) {
  of_blocks_.push_back(name_of(main));
}

void NonfiniteWeights::add_amax(const PlaneSlice &main, uint64_t index) { measured_.push_back({name_of(main), index}); }

// Weights are not counted while earlier counts are under way; a weight that is not finite stays so and is found later.
// Weights that a graph publishes are not counted either, because no event tells when their count is done.
bool NonfiniteWeights::begin(device::Stream &stream) {
  if (!counts() && measured_.empty()) return false;
  if (!runtime_.context.logs(FSDP_LOG_WARNING)) return false;
  const std::lock_guard lock(mutex_);
  report();
  return !version_ && !stream.capture_id();
}

void NonfiniteWeights::finish(device::Stream &stream, const float *amaxes) {
  const std::lock_guard lock(mutex_);
  if (found_ != counts_) stream.copy(counts_, found_, counts() * sizeof(uint64_t));
  if (!measured_.empty()) stream.copy(amaxes_, amaxes, runtime_.plan.amax_count * sizeof(float));
  stream.record(*done_);
  version_ = runtime_.step.version() + 1;
  runtime_.context.flight_log().expect_word(true);
  report();
}

void NonfiniteWeights::settle() noexcept {
  const std::lock_guard lock(mutex_);
  report();
}

// Errors are ignored, because losing a line of the log is better than failing a step.
void NonfiniteWeights::report() noexcept {
  if (!version_ || !done_->done()) return;
  try {
    report_counts();
    report_amaxes();
  } catch (...) {
  }
  version_ = 0;
  runtime_.context.flight_log().expect_word(false);
}

// The name of the numbers that were counted. Finite numbers may be too large for bf16.
const char *NonfiniteWeights::quantized_weights() const {
  return runtime_.spec.quantize_from == FSDP_BFLOAT16 ? "main weights, as bf16," : "main weights";
}

void NonfiniteWeights::report_counts() const {
  const uint64_t *found = counts_;
  for (const CountedScales &counted : of_scales_)
    if (const uint64_t count = *found++)
      runtime_.context.log(
          FSDP_LOG_WARNING,
          format_text("rank {}: version {}: {}: {} are Inf or NaN, so {} of {} ROW scales are NaN",
                      runtime_.context.rank(), version_, counted.name, quantized_weights(), count, counted.scales));
  for (const std::string &name : of_blocks_)
    if (const uint64_t count = *found++)
      runtime_.context.log(FSDP_LOG_WARNING, format_text("rank {}: version {}: {}: {} main weights are Inf or NaN",
                                                         runtime_.context.rank(), version_, name, count));
}

void NonfiniteWeights::report_amaxes() const {
  for (const Measured &measured : measured_)
    if (!std::isfinite(amaxes_[measured.index]))
      runtime_.context.log(
          FSDP_LOG_WARNING,
          format_text("rank {}: version {}: {}: {} are Inf or NaN, so no scale can be computed and 1 is used",
                      runtime_.context.rank(), version_, measured.name, quantized_weights()));
}

Quantizer::Quantizer(Runtime &runtime) : amaxes_(runtime), nonfinite_(runtime) {
  std::vector<uint64_t> first_amax;  // by bucket
  uint64_t amax_count = 0;
  for (const Bucket &bucket : runtime.storage->buckets()) {
    first_amax.push_back(amax_count);
    if (bucket.plan->frozen || !memory::scales_whole_tensors(bucket.plan->quantization)) continue;
    add_scales(runtime, bucket, amax_count);
    amax_count += bucket.plan->params.size();
  }
  const bool via_bf16 = runtime.spec.quantize_from == FSDP_BFLOAT16;
  for_each_slice(runtime, {PlaneKind::main}, [&](const PlaneSlice &main) {
    if (!main.param().quantized() || !main.slice.count) return;
    const uint32_t bucket = main.group.places[main.param_index].bucket;
    if (memory::scales_whole_tensors(main.param().quantization))
      add_part(main, via_bf16, first_amax[bucket] + main.tensor);
    else
      add_blocks(runtime, main);
  });
}

void Quantizer::add_blocks(const Runtime &runtime, const PlaneSlice &main) {
  const layout::Slice scales =
      runtime.slice_of(*main.bucket.plan->scale_layout, main.tensor, main.plane.plan->owned, main.bucket.plan->mesh);
  const BlockWork work = make_block_work(
      runtime.spec, {main.bucket, main.param(), main.slice, scales, reinterpret_cast<const float *>(main.data())});
  std::visit([&](const auto &part) { nonfinite_.add(main, part); }, work);
  if (const auto *mxfp8 = std::get_if<device::Mxfp8Quantize>(&work))
    mxfp8_.push_back(*mxfp8);
  else
    fp8_blocks_.push_back(std::get<device::Fp8BlockQuantize>(work));
}

void Quantizer::add_part(const PlaneSlice &main, bool via_bf16, uint64_t index) {
  const auto *const from = reinterpret_cast<const float *>(main.data());
  amax_spans_.push_back({amaxes_.own(index), from, main.slice.count, via_bf16});
  parts_.push_back({.from = from,
                    .count = main.slice.count,
                    .via_bf16 = via_bf16,
                    .scale = amaxes_.scale(index),
                    .codes = reinterpret_cast<uint8_t *>(main.bucket.plane(PlaneKind::compute).at(main.slice))});
  nonfinite_.add_amax(main, index);
}

// Adds the scales of a bucket. Every rank knows all scales and writes its own part of the plane, in the order of the
// parameters.
void Quantizer::add_scales(const Runtime &runtime, const Bucket &bucket, uint64_t first) {
  const Plane &plane = bucket.plane(PlaneKind::compute_scales);
  for (uint64_t tensor = 0; tensor < plane.layout->tensors.size(); ++tensor) {
    const layout::Slice slice = runtime.slice_of(plane, tensor, bucket.plane(PlaneKind::main).plan->owned);
    if (!slice.count) continue;
    std::byte *const to = plane.at(slice);
    if (!scales_.empty() && scales_.back().to + scales_.back().count * sizeof(float) == to &&
        scales_.back().from + scales_.back().count == amaxes_.inverse(first + tensor))
      ++scales_.back().count;
    else
      scales_.push_back({to, amaxes_.inverse(first + tensor), 1});
  }
}

void Quantizer::quantize(device::Stream &stream) {
  const bool counts = nonfinite_.begin(stream);
  stream.quantize_all_mxfp8(mxfp8_, counts ? nonfinite_.scale_counts() : nullptr);
  stream.quantize_all_fp8_blocks(fp8_blocks_, counts ? nonfinite_.block_counts() : nullptr);
  quantize_whole(stream);
  if (counts) nonfinite_.finish(stream, amaxes_.own(0));
}

// Passes over the numbers twice. Between the passes, the amaxes of all parameters are exchanged at once.
void Quantizer::quantize_whole(device::Stream &stream) {
  stream.find_all_amaxes(amax_spans_);
  amaxes_.find_scales(stream);
  stream.quantize_all_fp8(parts_);
  for (const ScaleCopy &copy : scales_) stream.copy(copy.to, copy.from, copy.count * sizeof(float));
}

}  // namespace fsdp::engine
