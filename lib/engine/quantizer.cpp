// SPDX-License-Identifier: Apache-2.0
#include "engine/quantizer.h"

#include "memory/quantization.h"

namespace fsdp::engine {

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

// All ranks know all of them; each writes its part of the plane, in the order of the parameters.
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

// Twice over the numbers: the amaxes of all parameters travel at once between.
void Quantizer::quantize_whole(device::Stream &stream) {
  for (const WholePart &part : parts_)
    stream.find_amax(amaxes_.own(part.index), part.work.from, part.work.count, part.work.via_bf16);
  amaxes_.find_scales(stream);
  for (const WholePart &part : parts_) stream.quantize_fp8(part.work);
  for (const ScaleCopy &copy : scales_) stream.copy(copy.to, copy.from, copy.count * sizeof(float));
}

}  // namespace fsdp::engine
