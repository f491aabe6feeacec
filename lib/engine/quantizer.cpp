// SPDX-License-Identifier: Apache-2.0
#include "engine/quantizer.h"

namespace fsdp::engine {

Quantizer::Quantizer(const Runtime &runtime) {
  for_each_slice(runtime, {PlaneKind::main}, [&](const PlaneSlice &main) {
    if (main.param().quantized() && main.slice.count) add(runtime, main);
  });
}

void Quantizer::add(const Runtime &runtime, const PlaneSlice &main) {
  const memory::ModelSpec &spec = runtime.spec;
  const layout::Slice scale_slice = memory::slice_of(*main.bucket.plan->scale_layout, main.tensor,
                                                     main.plane.plan->owned, spec.mesh, runtime.teams.all->rank());
  const auto codes = [&](uint32_t form) {
    return reinterpret_cast<uint8_t *>(main.bucket.plane(PlaneKind::compute, form).at(main.slice));
  };
  const auto scales = [&](uint32_t form) { return main.bucket.plane(PlaneKind::compute_scales, form).at(scale_slice); };
  const auto *from = reinterpret_cast<const float *>(main.data());
  const uint64_t columns = main.param().shape.back(), rows = main.slice.count / columns;
  const bool via_bf16 = spec.quantize_from == FSDP_BFLOAT16;
  if (main.bucket.plan->quantization == FSDP_QUANTIZE_MXFP8)
    mxfp8_.push_back(
        {.from = from,
         .rows = rows,
         .columns = columns,
         .rule = spec.scale_rule == FSDP_SCALE_FLOOR ? device::ScaleRule::floor : device::ScaleRule::round_up,
         .via_bf16 = via_bf16,
         .row = codes(0),
         .row_scales = reinterpret_cast<uint8_t *>(scales(0)),
         .column = codes(1),
         .column_scales = reinterpret_cast<uint8_t *>(scales(1))});
  else
    blocks_.push_back({.from = from,
                       .rows = rows,
                       .columns = columns,
                       .power_of_two = spec.scale_rounding == FSDP_SCALE_POWER_OF_TWO,
                       .via_bf16 = via_bf16,
                       .codes = codes(0),
                       .scale_inv = reinterpret_cast<float *>(scales(0))});
}

void Quantizer::quantize(device::Stream &stream) const {
  for (const device::Mxfp8Quantize &work : mxfp8_) stream.quantize_mxfp8(work);
  for (const device::Fp8BlockQuantize &work : blocks_) stream.quantize_fp8_blocks(work);
}

}  // namespace fsdp::engine
