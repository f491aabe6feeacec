// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/block_work.h"

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

}  // namespace fsdp::engine
