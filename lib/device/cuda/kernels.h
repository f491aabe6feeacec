// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the CUDA device, enqueued on one of its streams. For every input the resulting bits are those of
// the host's kernels, which host/kernels.h defines: casts, add, scale, rank_sum, adamw, stochastic rounding and norms.
// Only the payload of a NaN that arithmetic makes is undefined on both devices: GPUs write 0x7fffffff, and processors
// keep an operand's payload.
//
// Every call returns the result of the launch, a cudaError_t as int: 0 is success. Work without elements launches
// nothing. No call allocates or synchronizes; all may be captured into a graph. Pointers are to memory that the device
// can read and write, aligned to their elements. Operands must not overlap except where a comment allows it. If all
// operands have the same alignment to 4 elements, elements are loaded and stored 4 at a time, otherwise one at a time.
// A warp accesses whole lines in both cases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "device/quantize.h"
#include "device/work.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace fsdp::device::cuda::kernels {

using Stream = CUstream_st *;

// If the dtypes are equal, the bits are copied; `to` may then equal `from`.
[[nodiscard]] int cast(Stream stream, void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype,
                       uint64_t count);

// Converts to and from numbers of 8 bits and their scales, as the host's kernels do. Scales and amaxes are in device
// memory.
[[nodiscard]] int cast_to_float8(Stream stream, uint8_t *to, Float8 format, const void *from, fsdp_dtype from_dtype,
                                 uint64_t count);
[[nodiscard]] int cast_from_float8(Stream stream, void *to, fsdp_dtype to_dtype, const uint8_t *from, Float8 format,
                                   uint64_t count);
// Work on many tensors is one launch: up to 44 of MXFP8 or of FP8 in blocks, up to 80 with one scale each. Up to 96
// largest magnitudes take two launches. Unless `found` is NULL, quantize_mxfp8 adds to found[i] the number of ROW
// scales of works[i] that stand for Inf or NaN. quantize_fp8_blocks adds the number of Inf and NaN among the numbers.
[[nodiscard]] int quantize_mxfp8(Stream stream, std::span<const Mxfp8Quantize> works, uint64_t *found);
[[nodiscard]] inline int quantize_mxfp8(Stream stream, const Mxfp8Quantize &work) {
  return quantize_mxfp8(stream, {&work, 1}, nullptr);
}
[[nodiscard]] int dequantize_mxfp8(Stream stream, void *to, fsdp_dtype to_dtype, const Mxfp8Dequantize &work);
[[nodiscard]] int swizzle_scales(Stream stream, const Mxfp8Swizzle &work);
[[nodiscard]] int find_amaxes(Stream stream, std::span<const AmaxSpan> spans);
[[nodiscard]] inline int find_amax(Stream stream, float *result, const float *values, uint64_t count, bool via_bf16) {
  const AmaxSpan one{result, values, count, via_bf16};
  return find_amaxes(stream, {&one, 1});
}
[[nodiscard]] int find_fp8_scales(Stream stream, const Fp8Scales &work);
[[nodiscard]] int quantize_fp8(Stream stream, std::span<const Fp8Quantize> works);
[[nodiscard]] inline int quantize_fp8(Stream stream, const Fp8Quantize &work) {
  return quantize_fp8(stream, std::span(&work, 1));
}
[[nodiscard]] int dequantize_fp8(Stream stream, void *to, fsdp_dtype to_dtype, const Fp8Dequantize &work);
[[nodiscard]] int quantize_fp8_blocks(Stream stream, std::span<const Fp8BlockQuantize> works, uint64_t *found);
[[nodiscard]] inline int quantize_fp8_blocks(Stream stream, const Fp8BlockQuantize &work) {
  return quantize_fp8_blocks(stream, {&work, 1}, nullptr);
}
[[nodiscard]] int dequantize_fp8_blocks(Stream stream, void *to, fsdp_dtype to_dtype, const Fp8BlockDequantize &work);

// to += from in fp32, rounded once to to's dtype.
[[nodiscard]] int add(Stream stream, void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype,
                      uint64_t count);

// Scales many arrays at once, up to 192 in one launch.
[[nodiscard]] int scale(Stream stream, std::span<const FloatSpan> spans, float factor);
[[nodiscard]] inline int scale(Stream stream, float *values, float factor, uint64_t count) {
  const FloatSpan one{values, count};
  return scale(stream, {&one, 1}, factor);
}

// `out` may be a slice of one of the sources, at the same elements. With 0 ranks nothing happens.
[[nodiscard]] int rank_sum(Stream stream, const RankSum &sum);

// Size of the device memory, aligned to 16 bytes, in which sum_squares works. Each stream that calls it needs its own.
constexpr uint64_t scratch_bytes = (uint64_t{1} << 19) + 256;

// A granule of 0 means that all values are one granule. Without elements *result is 0. Up to 56 sums with 32768 pieces
// in total take two launches.
[[nodiscard]] int sum_squares(Stream stream, std::span<const SquaresSpan> spans, void *scratch);
[[nodiscard]] inline int sum_squares(Stream stream, double *result, const float *values, uint64_t count,
                                     uint64_t granule, void *scratch) {
  const SquaresSpan one{result, values, count, granule};
  return sum_squares(stream, {&one, 1}, scratch);
}

// Gives the same bits as for fp32 numbers with the same values. A launch has up to 44 sums.
[[nodiscard]] int sum_compact_squares(Stream stream, std::span<const CompactSquaresSpan> spans, void *scratch);

// One thread adds the values in their order. There is one value per parameter or one per rank.
[[nodiscard]] int sum_values(Stream stream, double *result, const double *values, uint64_t count);
[[nodiscard]] int find_norm(Stream stream, Norm *norm, const NormShares &shares);

// The factor is in device memory and is read when the kernel runs; a factor of 1 changes no bit.
[[nodiscard]] int scale_by(Stream stream, std::span<const FloatSpan> spans, const float *factor);
[[nodiscard]] inline int scale_by(Stream stream, float *values, const float *factor, uint64_t count) {
  const FloatSpan one{values, count};
  return scale_by(stream, {&one, 1}, factor);
}

[[nodiscard]] int count_nonfinite(Stream stream, uint64_t *result, const float *values, uint64_t count);
[[nodiscard]] int count_zeros(Stream stream, uint64_t *result, const float *values, uint64_t count);

// The spans are copied into the launches, so they need not outlive the call.
[[nodiscard]] int adamw(Stream stream, const AdamW &step, std::span<const AdamWSpan> spans);

// Does the same with a step in device memory, which is read when the kernels run, as a replayed graph requires.
[[nodiscard]] int adamw_from(Stream stream, const AdamW *step, std::span<const AdamWSpan> spans);

// Spans of all forms may be mixed. Spans with fp32 states and spans with codes are launched separately, up to 32 at a
// time.
[[nodiscard]] int compact_adamw(Stream stream, const AdamW &step, std::span<const CompactSpan> spans);
[[nodiscard]] int compact_adamw_from(Stream stream, const AdamW *step, std::span<const CompactSpan> spans);

[[nodiscard]] int round_randomly(Stream stream, const RandomRounding &work);

// Writes the step to device memory in the order of the stream. The step is copied into the launch.
[[nodiscard]] int store_step(Stream stream, AdamW *to, const AdamW &step);

// Runs every kernel once in scratch memory, so that its code is loaded on the stream's device: see prepare.cpp. Must be
// called and be done before any collective runs on the device.
[[nodiscard]] int prepare(Stream stream, void *scratch);
[[nodiscard]] int prepare_quantize(Stream stream, void *scratch);  // a part of prepare()

// Keeps the stream busy for about `microseconds`. For tests of order: the kernel uses one thread, so that other work
// can run at the same time.
[[nodiscard]] int delay(Stream stream, uint32_t microseconds);

}  // namespace fsdp::device::cuda::kernels
