// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/quantizer.h"

#include <cmath>

#include "memory/plane.h"

namespace fsdp::engine {

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
  counted_.push_back({name_of(main), work.rows * work.columns / device::mxfp8_block, work, {}});
}

void NonfiniteWeights::add(const PlaneSlice &main, const device::Fp8BlockQuantize &work) {
  counted_.push_back({name_of(main), 0, {}, work});
}

void NonfiniteWeights::add_amax(const PlaneSlice &main, uint64_t index) { measured_.push_back({name_of(main), index}); }

// While earlier counts are under way, these weights are not counted; a weight that is not finite stays so and is found
// later. Weights that a graph publishes are not counted either, because no event tells when the count is done.
void NonfiniteWeights::count(device::Stream &stream, const float *amaxes) {
  if (counted_.empty() && measured_.empty()) return;
  if (!runtime_.context.logs(FSDP_LOG_WARNING)) return;
  const std::lock_guard lock(mutex_);
  report();
  if (version_ || stream.capture_id()) return;
  enqueue(stream, amaxes);
  stream.record(*done_);
  version_ = runtime_.step.version() + 1;
  runtime_.context.flight_log().expect_word(true);
  report();
}

void NonfiniteWeights::enqueue(device::Stream &stream, const float *amaxes) {
  for (size_t i = 0; i < counted_.size(); ++i)
    if (counted_[i].scales)
      stream.count_nonfinite_scales(found_ + i, counted_[i].mxfp8.row_scales, counted_[i].scales);
    else
      stream.count_nonfinite_blocks(found_ + i, counted_[i].blocks);
  if (found_ != counts_) stream.copy(counts_, found_, counted_.size() * sizeof(uint64_t));
  if (!measured_.empty()) stream.copy(amaxes_, amaxes, runtime_.plan.amax_count * sizeof(float));
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
  for (size_t i = 0; i < counted_.size(); ++i)
    if (counts_[i])
      runtime_.context.log(
          FSDP_LOG_WARNING,
          counted_[i].scales
              ? format_text("rank {}: version {}: {}: {} are Inf or NaN: {} of {} ROW scales stand for it",
                            runtime_.context.rank(), version_, counted_[i].name, quantized_weights(), counts_[i],
                            counted_[i].scales)
              : format_text("rank {}: version {}: {}: {} main weights are Inf or NaN", runtime_.context.rank(),
                            version_, counted_[i].name, counts_[i]));
}

void NonfiniteWeights::report_amaxes() const {
  for (const Measured &measured : measured_)
    if (!std::isfinite(amaxes_[measured.index]))
      runtime_.context.log(FSDP_LOG_WARNING,
                           format_text("rank {}: version {}: {}: {} are Inf or NaN, so its scale is 1",
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
      add(runtime, main);
  });
}

void Quantizer::add(const Runtime &runtime, const PlaneSlice &main) {
  const layout::Slice scales = memory::slice_of(*main.bucket.plan->scale_layout, main.tensor, main.plane.plan->owned,
                                                runtime.spec.mesh, runtime.teams.all->rank());
  const BlockWork work = make_block_work(
      runtime.spec, {main.bucket, main.param(), main.slice, scales, reinterpret_cast<const float *>(main.data())});
  std::visit([&](const auto &part) { nonfinite_.add(main, part); }, work);
  blocks_.push_back(work);
}

void Quantizer::add_part(const PlaneSlice &main, bool via_bf16, uint64_t index) {
  parts_.push_back({{.from = reinterpret_cast<const float *>(main.data()),
                     .count = main.slice.count,
                     .via_bf16 = via_bf16,
                     .scale = amaxes_.scale(index),
                     .codes = reinterpret_cast<uint8_t *>(main.bucket.plane(PlaneKind::compute).at(main.slice))},
                    index});
  nonfinite_.add_amax(main, index);
}

// Adds the scales of a bucket. All ranks know all scales, and each writes its part of the plane, in the order of the
// parameters.
void Quantizer::add_scales(const Runtime &runtime, const Bucket &bucket, uint64_t first) {
  const Plane &plane = bucket.plane(PlaneKind::compute_scales);
  for (uint64_t tensor = 0; tensor < plane.layout->tensors.size(); ++tensor) {
    const layout::Slice slice = memory::slice_of(*plane.layout, tensor, bucket.plane(PlaneKind::main).plan->owned,
                                                 runtime.spec.mesh, runtime.teams.all->rank());
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
  for (const BlockWork &work : blocks_) engine::quantize(stream, work);
  quantize_whole(stream);
  nonfinite_.count(stream, amaxes_.own(0));
}

// Passes over the numbers twice. Between the passes, the amaxes of all parameters are exchanged at once.
void Quantizer::quantize_whole(device::Stream &stream) {
  for (const WholePart &part : parts_)
    stream.find_amax(amaxes_.own(part.index), part.work.from, part.work.count, part.work.via_bf16);
  amaxes_.find_scales(stream);
  for (const WholePart &part : parts_) stream.quantize_fp8(part.work);
  for (const ScaleCopy &copy : scales_) stream.copy(copy.to, copy.from, copy.count * sizeof(float));
}

}  // namespace fsdp::engine
