// SPDX-License-Identifier: Apache-2.0
#include "engine/quantizer.h"

#include "engine/plane_slices.h"

namespace fsdp::engine {

Quantizer::Quantizer(const Runtime &runtime) {
  for_each_slice(runtime, {PlaneKind::main}, [&](const PlaneSlice &main) {
    if (!main.param().quantized() || !main.slice.count) return;
    const Plane &codes = main.bucket.plane(PlaneKind::compute);
    const Plane &scales = main.bucket.plane(PlaneKind::compute_scales);
    const layout::Slice slice = memory::slice_of(*scales.layout, main.tensor, main.plane.plan->owned, runtime.spec.mesh,
                                                 runtime.teams.all->rank());
    const uint64_t columns = main.param().shape.back();
    blocks_.push_back({.from = reinterpret_cast<const float *>(main.data()),
                       .rows = main.slice.count / columns,
                       .columns = columns,
                       .power_of_two = runtime.spec.scale_rounding == FSDP_SCALE_POWER_OF_TWO,
                       .via_bf16 = runtime.spec.quantize_from == FSDP_BFLOAT16,
                       .codes = reinterpret_cast<uint8_t *>(codes.at(main.slice)),
                       .scale_inv = reinterpret_cast<float *>(scales.at(slice))});
  });
}

void Quantizer::quantize(device::Stream &stream) const {
  for (const device::Fp8BlockQuantize &work : blocks_) stream.quantize_fp8_blocks(work);
}

}  // namespace fsdp::engine
