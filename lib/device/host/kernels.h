// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the host device, on the calling thread. Every kernel gives the same bits on every SIMD target, for
// any alignment and split of its input, and with any rounding and flush modes of the caller. Only the payload of a NaN
// that arithmetic makes is undefined. Pointers are aligned to their elements. Operands must not overlap except where a
// comment allows it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.h"
#include "device/quantize.h"

namespace fsdp::device::kernels {

void copy_bytes(void *to, const void *from, size_t bytes);

// Rounds to nearest even, keeps subnormals, and overflows to Inf. A NaN becomes a quiet NaN with the top of its
// payload.
void cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count);

// Makes the casts that device/float8.h defines. NaNs keep their sign and the top of their payload.
void cast_to_float8(uint8_t *to, Float8 format, const void *from, fsdp_dtype from_dtype, uint64_t count);
void cast_from_float8(void *to, fsdp_dtype to_dtype, const uint8_t *from, Float8 format, uint64_t count);

// Makes both planes in one pass, as defined in device/quantize.h.
void quantize_mxfp8(const Mxfp8Quantize &work);
// Converts to fp32 or bf16 and rounds once. The result is exact in fp32, except that numbers that are too large become
// Inf.
void dequantize_mxfp8(void *to, fsdp_dtype to_dtype, const Mxfp8Dequantize &work);
// The number of scales that stand for Inf or NaN.
uint64_t count_nonfinite_scales(const uint8_t *scales, uint64_t count);
void swizzle_scales(const Mxfp8Swizzle &work);

// The largest magnitude. It is Inf if any number is Inf or NaN, so that every kind of maximum over ranks keeps it.
float find_amax(const float *values, uint64_t count, bool via_bf16);
void find_fp8_scales(const Fp8Scales &work);
void quantize_fp8(const Fp8Quantize &work);
void dequantize_fp8(void *to, fsdp_dtype to_dtype, const Fp8Dequantize &work);
void quantize_fp8_blocks(const Fp8BlockQuantize &work);
// The number of Inf and NaN among numbers that have been quantized. Only blocks with scale 1 are checked, because
// blocks with numbers that are not finite have this scale.
uint64_t count_nonfinite_blocks(const Fp8BlockQuantize &work);
void dequantize_fp8_blocks(void *to, fsdp_dtype to_dtype, const Fp8BlockDequantize &work);

// to += from in fp32, rounded once to to's dtype.
void add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count);

void scale(float *values, float factor, uint64_t count);

// Works in one pass: starts from rank 0's value, adds the others in rank order, and multiplies unless the factor is 1.
// `out` may be the slice of one of the ranks, at the same elements. Other outputs bypass the caches if they are large
// or read late (late_bytes), unless they are added to.
void rank_sum(const RankSum &sum);

// The order of the additions is described at norm_piece in device/work.h. A granule of 0 means that all values are one
// granule.
double sum_squares(const float *values, uint64_t count, uint64_t granule);
// Gives the same bits as for fp32 numbers with the same values.
double sum_compact_squares(const CompactSquaresSpan &span);

double sum_values(const double *values, uint64_t count);
Norm find_norm(const NormShares &shares);

uint64_t count_nonfinite(const float *values, uint64_t count);
uint64_t count_zeros(const float *values, uint64_t count);

// See adamw-inl.h for the order of operations.
void adamw(const AdamW &step, std::span<const AdamWSpan> spans);
// Updates weights and states in the forms of device/main_weight.h and device/state_codes.h. A second moment above 0
// never gets the code of 0.
void compact_adamw(const AdamW &step, std::span<const CompactSpan> spans);

void round_randomly(const RandomRounding &work);

// Outputs of at least this size that are not read soon bypass the caches.
constexpr uint64_t streaming_bytes = uint64_t{8} << 20;
// So do shorter outputs of rank_sum, if at least this many bytes are written before any of them is read. If there are
// fewer, the norm and the update that follow find many of them in the last cache.
constexpr uint64_t late_bytes = uint64_t{24} << 20;
// Codes bypass the caches in the same case; codes in rows only if each row is whole lines of memory.
constexpr uint64_t line_bytes = 64;
inline bool are_lines(const void *codes, uint64_t columns) {
  return reinterpret_cast<uintptr_t>(codes) % line_bytes == 0 && columns % line_bytes == 0;
}
inline bool is_streamed(const Mxfp8Quantize &work) {
  return are_lines(work.row, work.columns) && are_lines(work.column, work.columns) &&
         work.rows * work.columns * 2 >= streaming_bytes;
}
inline bool is_streamed(const Fp8BlockQuantize &work) {
  return are_lines(work.codes, work.columns) && work.rows * work.columns >= streaming_bytes;
}
inline bool is_streamed(const Fp8Quantize &work) { return work.count >= streaming_bytes; }

}  // namespace fsdp::device::kernels
