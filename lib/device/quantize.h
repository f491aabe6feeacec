// SPDX-License-Identifier: Apache-2.0
// Weights as 8-bit numbers with scales: the arguments of the kernels, and the definition of scales. Sources: OCP
// "Microscaling Formats (MX)" 1.0 (5-6), and the recipes of TransformerEngine, which are matched bit for bit.
#pragma once

#include <cstdint>

#include "device/both.h"
#include "device/float8.h"

namespace fsdp::device {

// How the E8M0 scale of a block follows from the largest magnitude in the block. With round_up no scaled number of a
// finite block is larger than the largest E4M3 number. With floor (OCP 6.3) larger numbers saturate.
enum class ScaleRule : uint8_t { round_up, floor };

// An MXFP8 block is 32 numbers in a row (the ROW plane) or in a column (the COL plane). Both planes keep the order of
// the elements. In both, the scales of a slice that starts at element e start at scale e / 32.
constexpr uint64_t mxfp8_block = 32;
enum class Mxfp8Form : uint8_t { row, column };

// Quantizes a dense slice from fp32. `rows` and `columns` are multiples of 32. Outputs are the codes and the scales of
// both planes.
struct Mxfp8Quantize {
  const float *from;
  uint64_t rows, columns;
  ScaleRule rule;
  bool via_bf16;  // each number is rounded to bf16 first
  uint8_t *row, *row_scales, *column, *column_scales;
};

struct Mxfp8Dequantize {
  const uint8_t *codes, *scales;
  uint64_t rows, columns;
  Mxfp8Form form;
};

// FP8 with one scale for a block of 128 x 128 numbers; blocks at the right and lower edges are smaller. A row of scales
// has ceil(columns / 128) scales.
constexpr uint64_t fp8_block = 128;
FSDP_BOTH constexpr uint64_t fp8_blocks(uint64_t count) { return (count + fp8_block - 1) / fp8_block; }

struct Fp8BlockQuantize {
  const float *from;
  uint64_t rows, columns;
  bool power_of_two, via_bf16;
  uint8_t *codes;
  float *scale_inv;
};

// Computes number = code * scale_inv.
struct Fp8BlockDequantize {
  const uint8_t *codes;
  const float *scale_inv;
  uint64_t rows, columns;
};

// Finds the scales of `count` tensors. amaxes[r * count + i] is the largest magnitude of tensor i on rank r. Outputs
// are scales[i], by which the numbers of tensor i are multiplied, and scale_inv[i] = 1 / scales[i].
struct Fp8Scales {
  const float *amaxes;
  uint32_t ranks;
  uint64_t count;
  bool power_of_two;
  float *scales, *scale_inv;
};

// Finds the largest magnitude of `count` numbers, each rounded to bf16 first if `via_bf16` is set: Inf if one of them
// is NaN, 0 if there are none.
struct AmaxSpan {
  float *amax;
  const float *values;
  uint64_t count;
  bool via_bf16;
};

// Quantizes `count` numbers with one scale.
struct Fp8Quantize {
  const float *from;
  uint64_t count;
  bool via_bf16;
  const float *scale;  // a positive number; read when the work executes, not when it is enqueued
  uint8_t *codes;
};

struct Fp8Dequantize {
  const uint8_t *codes;
  uint64_t count;
  const float *scale_inv;
};

// Copies MXFP8 scales into the layout that GEMMs of Blackwell read. A matrix of scales becomes tiles of 128 x 4 scales.
// The tiles of a row of tiles follow one another, and then come those of the next row. In a tile, scale (r, c) is at r
// % 32 * 16 + r / 32 * 4 + c. Places of a tile outside of the matrix are 0. The matrix of a COL plane's scales is
// transposed first. Several matrices follow one another, in the input and in the output.
struct Mxfp8Swizzle {
  const uint8_t *scales;
  uint64_t rows, columns;  // size of an input matrix, for R x C weights: R x C/32 for ROW, R/32 x C for COL
  Mxfp8Form form;
  uint8_t *to;
  uint64_t matrices = 1;

  FSDP_BOTH constexpr uint64_t outer() const { return form == Mxfp8Form::row ? rows : columns; }
  FSDP_BOTH constexpr uint64_t inner() const { return form == Mxfp8Form::row ? columns : rows; }
  FSDP_BOTH constexpr uint64_t tiles_across() const { return (inner() + 3) / 4; }
  FSDP_BOTH constexpr uint64_t matrix_bytes() const { return (outer() + 127) / 128 * tiles_across() * 512; }
  FSDP_BOTH constexpr uint64_t bytes() const { return matrices * matrix_bytes(); }
};

// The byte at `index` of the output.
FSDP_BOTH constexpr uint8_t swizzled_scale(const Mxfp8Swizzle &work, uint64_t index) {
  const uint64_t matrix = index / work.matrix_bytes(), tile = index % work.matrix_bytes() / 512, at = index % 512;
  const uint64_t outer = tile / work.tiles_across() * 128 + at % 16 / 4 * 32 + at / 16;
  const uint64_t inner = tile % work.tiles_across() * 4 + at % 4;
  if (outer >= work.outer() || inner >= work.inner()) return 0;
  const uint64_t first = matrix * work.rows * work.columns;
  return work
      .scales[first + (work.form == Mxfp8Form::row ? outer * work.columns + inner : inner * work.columns + outer)];
}

// 1 / 448 in fp32. The scale is defined by a multiplication by this number, not by a division by 448.
constexpr uint32_t one_448th = 0x3b124925;

// `amax` is the bits of the largest magnitude. Magnitudes are compared as integers, so that NaN is the largest of all.
// The floating-point modes must be IEEE's defaults.
FSDP_BOTH constexpr uint8_t mxfp8_scale(uint32_t amax, ScaleRule rule) {
  if (rule == ScaleRule::round_up) return E8M0::stored(fp32_of(amax) * fp32_of(one_448th));
  const uint32_t exponent = amax >> 23;
  if (exponent == 255) return E8M0::nan;
  return static_cast<uint8_t>(exponent > 8 ? exponent - 8 : 0);
}

// The exact factor 2^(127 - scale) by which numbers are multiplied.
FSDP_BOTH constexpr float mxfp8_factor(uint8_t scale) { return E8M0::value(static_cast<uint8_t>(254 - scale)); }

FSDP_BOTH constexpr uint8_t mxfp8_code(float value, uint8_t scale) {
  return scale == E8M0::nan ? E4M3::nan : E4M3::stored(value * mxfp8_factor(scale));
}

// The scale of E4M3 by current scaling: 448 / amax; 1 if amax is 0, Inf or NaN.
FSDP_BOTH constexpr float fp8_scale(float amax, bool power_of_two) {
  const uint32_t bits = fp32_bits(amax) & fp32_magnitude;
  if (bits == 0 || bits >= fp32_infinity) return 1;
  const uint32_t scale = fp32_bits(E4M3::value(E4M3::Layout::largest) / fp32_of(bits));
  const uint32_t finite = scale < fp32_infinity ? scale : fp32_infinity - 1;
  return fp32_of(power_of_two ? finite & fp32_infinity : finite);
}

// The largest magnitude of tensor `index` on any rank. Amaxes are never NaN, so their bits have the order of the
// numbers.
FSDP_BOTH constexpr float largest_amax(const Fp8Scales &work, uint64_t index) {
  uint32_t largest = 0;
  for (uint32_t r = 0; r < work.ranks; ++r) {
    const uint32_t told = fp32_bits(work.amaxes[r * work.count + index]);
    largest = told > largest ? told : largest;
  }
  return fp32_of(largest);
}

// The code has the sign of `value` even if it is NaN, because the NaNs that GPUs make have no sign.
FSDP_BOTH constexpr uint8_t fp8_code(float value, float scale) {
  const uint32_t bits = fp32_bits(value), sign = bits >> 24 & 0x80;
  if ((bits & fp32_magnitude) > fp32_infinity) return static_cast<uint8_t>(sign | E4M3::nan);
  return E4M3::stored(value * scale);
}

}  // namespace fsdp::device
