// SPDX-License-Identifier: Apache-2.0
// Runs every kernel once on one element, so that its code is on the device before a step needs it. The driver loads
// code at its first use, and may wait for all work of the device before it does. If a running collective waits for work
// that this rank has not enqueued yet, that wait never ends. A captured graph would not contain the load either.

#include <initializer_list>

#include "device/cuda/kernels.h"

namespace fsdp::device::cuda::kernels {

namespace {

constexpr fsdp_dtype dtypes[] = {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16};

// The address of element i in the scratch memory; elements do not overlap.
float *at(void *scratch, size_t i) { return static_cast<float *>(scratch) + 16 * i; }

int prepare_pair(Stream stream, void *scratch, fsdp_dtype one, fsdp_dtype other) {
  if (const int error = cast(stream, at(scratch, 0), one, at(scratch, 1), other, 1)) return error;
  if (const int error = add(stream, at(scratch, 0), one, at(scratch, 1), other, 1)) return error;
  const bool rounded_to_fp32 = other == FSDP_FLOAT32 && one != other;  // the same kernel as without rounding
  if (rounded_to_fp32) return 0;
  const auto *const base = reinterpret_cast<const std::byte *>(at(scratch, 1));
  return rank_sum(stream, {base, 0, 1, one, other, at(scratch, 0), 1, 1, false});
}

int prepare_sums(Stream stream, void *scratch) {
  auto *const sum = reinterpret_cast<double *>(at(scratch, 5));
  auto *const count = reinterpret_cast<uint64_t *>(at(scratch, 6));
  const CompactSquaresSpan half{sum, reinterpret_cast<const uint16_t *>(at(scratch, 1)), nullptr, FSDP_FLOAT16, 1, 1};
  for (const int error :
       {sum_squares(stream, sum, at(scratch, 1), 1, 1, scratch), sum_compact_squares(stream, {&half, 1}, scratch),
        sum_values(stream, sum, sum, 1), count_nonfinite(stream, count, at(scratch, 0), 1),
        count_zeros(stream, count, at(scratch, 0), 1)})
    if (error) return error;
  return 0;
}

int prepare_compact(Stream stream, void *scratch) {
  CompactSpan span{};
  span.weight = at(scratch, 0), span.grad = at(scratch, 1), span.exp_avg = at(scratch, 2);
  span.exp_avg_sq = at(scratch, 3), span.count = 1;
  CompactSpan coded = span;
  coded.exp_avg_scales = at(scratch, 4), coded.exp_avg_sq_scales = at(scratch, 5);
  for (const CompactSpan &one : {span, coded})
    if (const int error = compact_adamw(stream, AdamW{}, {&one, 1})) return error;
  return round_randomly(stream, {at(scratch, 0), reinterpret_cast<uint16_t *>(at(scratch, 1)), 1, {}, {0, 1, 0}});
}

}  // namespace

int prepare(Stream stream, void *scratch) {
  for (const fsdp_dtype one : dtypes)
    for (const fsdp_dtype other : dtypes)
      if (const int error = prepare_pair(stream, scratch, one, other)) return error;
  const AdamWSpan span{at(scratch, 0), at(scratch, 1), at(scratch, 2), at(scratch, 3), nullptr, FSDP_FLOAT32, 1};
  const auto step = reinterpret_cast<AdamW *>(at(scratch, 4));
  auto *const sum = reinterpret_cast<double *>(at(scratch, 5));
  auto *const norm = reinterpret_cast<Norm *>(at(scratch, 7));
  for (const int error :
       {scale(stream, at(scratch, 0), 1, 1), scale_by(stream, at(scratch, 0), at(scratch, 1), 1),
        prepare_sums(stream, scratch), find_norm(stream, norm, {sum, 1, 1, 1, 1}), adamw(stream, AdamW{}, {&span, 1}),
        store_step(stream, step, AdamW{}), prepare_compact(stream, scratch), delay(stream, 0)})
    if (error) return error;
  return prepare_quantize(stream, scratch);
}

// Runs the kernels of 8-bit numbers: see prepare.cpp.

namespace {

int prepare_casts(Stream stream, uint8_t *codes, float *values) {
  for (const Float8 format : {Float8::e4m3, Float8::e5m2})
    for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16}) {
      if (const int error = cast_to_float8(stream, codes, format, values, dtype, 1)) return error;
      if (const int error = cast_from_float8(stream, values, dtype, codes, format, 1)) return error;
    }
  return 0;
}

int prepare_dequantize(Stream stream, const uint8_t *codes, float *values, const float *scale) {
  for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16})
    for (const int error : {dequantize_mxfp8(stream, values, dtype, {codes, codes, 1, 1, Mxfp8Form::row}),
                            dequantize_mxfp8(stream, values, dtype, {codes, codes, 1, 1, Mxfp8Form::column}),
                            dequantize_fp8(stream, values, dtype, {codes, 1, scale}),
                            dequantize_fp8_blocks(stream, values, dtype, {codes, scale, 1, 1})})
      if (error) return error;
  return 0;
}

}  // namespace

int prepare_quantize(Stream stream, void *scratch) {
  constexpr uint64_t tile = 32 * 32;
  auto *const values = static_cast<float *>(scratch), *const scale = values + tile;
  auto *const codes = reinterpret_cast<uint8_t *>(scale + 32);
  if (const int error = prepare_casts(stream, codes, values)) return error;
  if (const int error = prepare_dequantize(stream, codes, values, scale)) return error;
  const Mxfp8Quantize both{values, 32, 32, {}, false, codes, codes + tile, codes + 2 * tile, codes + 3 * tile};
  for (const int error :
       {quantize_mxfp8(stream, both), swizzle_scales(stream, {codes, 1, 1, Mxfp8Form::row, codes + tile}),
        find_amax(stream, scale, values, 1, false), find_fp8_scales(stream, {scale, 1, 1, false, scale + 1, scale + 2}),
        quantize_fp8(stream, {values, 1, false, scale, codes}),
        quantize_fp8_blocks(stream, {values, 1, 1, false, false, codes, scale})})
    if (error) return error;
  return 0;
}

}  // namespace fsdp::device::cuda::kernels
