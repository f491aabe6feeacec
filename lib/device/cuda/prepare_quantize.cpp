// SPDX-License-Identifier: Apache-2.0
// The kernels of 8-bit numbers: see prepare.cpp.
#include <initializer_list>

#include "device/cuda/kernels.h"

namespace fsdp::device::cuda::kernels {
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
  auto *const count = reinterpret_cast<uint64_t *>(scale + 16);
  auto *const codes = reinterpret_cast<uint8_t *>(scale + 32);
  if (const int error = prepare_casts(stream, codes, values)) return error;
  if (const int error = prepare_dequantize(stream, codes, values, scale)) return error;
  const Mxfp8Quantize both{values, 32, 32, {}, false, codes, codes + tile, codes + 2 * tile, codes + 3 * tile};
  for (const int error :
       {quantize_mxfp8(stream, both), count_nonfinite_scales(stream, count, codes, 1),
        swizzle_scales(stream, {codes, 1, 1, Mxfp8Form::row, codes + tile}), find_amax(stream, scale, values, 1, false),
        find_fp8_scales(stream, {scale, 1, 1, false, scale + 1, scale + 2}),
        quantize_fp8(stream, {values, 1, false, scale, codes}),
        quantize_fp8_blocks(stream, {values, 1, 1, false, false, codes, scale})})
    if (error) return error;
  return 0;
}

}  // namespace fsdp::device::cuda::kernels
