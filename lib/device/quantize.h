// SPDX-License-Identifier: Apache-2.0
// Weights as 8-bit numbers with scales: what the kernels are given, and how a scale is found. Sources: OCP
// "Microscaling Formats (MX)" 1.0 (5-6); the ways of TransformerEngine's recipes, bit for bit.
#pragma once

#include <cstdint>

#include "device/both.h"
#include "device/float8.h"

namespace fsdp::device {

// How the E8M0 scale of a block comes from the largest magnitude in it. round_up: no number of a finite block is
// larger than the largest E4M3 number. floor (OCP 6.3): such numbers saturate.
enum class ScaleRule : uint8_t { round_up, floor };

// MXFP8 blocks are 32 numbers in a row (the ROW plane), or in a column (COL). Both planes keep the order of the
// elements; the scales of a slice that starts at element e start at e / 32 in either.
constexpr uint64_t mxfp8_block = 32;
enum class Mxfp8Form : uint8_t { row, column };

// rows and columns are multiples of 32; the slice is dense.
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

// FP8 with one scale for 128 x 128 numbers; blocks at the right and lower edges are smaller. Scales lie in rows of
// ceil(columns / 128).
constexpr uint64_t fp8_block = 128;
FSDP_BOTH constexpr uint64_t fp8_blocks(uint64_t count) { return (count + fp8_block - 1) / fp8_block; }

struct Fp8BlockQuantize {
  const float *from;
  uint64_t rows, columns;
  bool power_of_two, via_bf16;
  uint8_t *codes;
  float *scale_inv;
};

// number = code * scale_inv.
struct Fp8BlockDequantize {
  const uint8_t *codes;
  const float *scale_inv;
  uint64_t rows, columns;
};

// Of `count` tensors: each rank has told the largest magnitude that it has of each, one rank after the other.
struct Fp8Scales {
  const float *amaxes;
  uint32_t ranks;
  uint64_t count;
  bool power_of_two;
  float *scales, *scale_inv;
};

// One scale for all numbers.
struct Fp8Quantize {
  const float *from;
  uint64_t count;
  bool via_bf16;
  const float *scale;  // read when the work is done
  uint8_t *codes;
};

struct Fp8Dequantize {
  const uint8_t *codes;
  uint64_t count;
  const float *scale_inv;
};

// The form of MXFP8 scales that GEMMs of Blackwell read: tiles of 128 x 4 scales, one after the other, rows of tiles
// by rows. In a tile scale (r, c) is at r % 32 * 16 + r / 32 * 4 + c; what a tile has beyond the scales is 0. The
// scales of a COL plane are taken as their transpose. Matrices lie one behind the other, before and after.
struct Mxfp8Swizzle {
  const uint8_t *scales;
  uint64_t rows, columns;  // of a matrix of scales as they lie: R x C/32 for ROW, R/32 x C for COL
  Mxfp8Form form;
  uint8_t *to;
  uint64_t matrices = 1;

  FSDP_BOTH constexpr uint64_t outer() const { return form == Mxfp8Form::row ? rows : columns; }
  FSDP_BOTH constexpr uint64_t inner() const { return form == Mxfp8Form::row ? columns : rows; }
  FSDP_BOTH constexpr uint64_t tiles_across() const { return (inner() + 3) / 4; }
  FSDP_BOTH constexpr uint64_t matrix_bytes() const { return (outer() + 127) / 128 * tiles_across() * 512; }
  FSDP_BOTH constexpr uint64_t bytes() const { return matrices * matrix_bytes(); }
};

// What is at `index` of the swizzled scales.
FSDP_BOTH constexpr uint8_t swizzled_scale(const Mxfp8Swizzle &work, uint64_t index) {
  const uint64_t matrix = index / work.matrix_bytes(), tile = index % work.matrix_bytes() / 512, at = index % 512;
  const uint64_t outer = tile / work.tiles_across() * 128 + at % 16 / 4 * 32 + at / 16;
  const uint64_t inner = tile % work.tiles_across() * 4 + at % 4;
  if (outer >= work.outer() || inner >= work.inner()) return 0;
  const uint64_t first = matrix * work.rows * work.columns;
  return work
      .scales[first + (work.form == Mxfp8Form::row ? outer * work.columns + inner : inner * work.columns + outer)];
}

// 1 / 448 in fp32: a multiplication by it is what defines the scale, not a division by 448.
constexpr uint32_t one_448th = 0x3b124925;

// amax: the bits of the largest magnitude, as integers order them, so that NaN is the largest of all. IEEE modes.
FSDP_BOTH constexpr uint8_t mxfp8_scale(uint32_t amax, ScaleRule rule) {
  if (rule == ScaleRule::round_up) return E8M0::stored(fp32_of(amax) * fp32_of(one_448th));
  const uint32_t exponent = amax >> 23;
  if (exponent == 255) return E8M0::nan;
  return static_cast<uint8_t>(exponent > 8 ? exponent - 8 : 0);
}

// What numbers are multiplied by: 2^(127 - scale), exact.
FSDP_BOTH constexpr float mxfp8_factor(uint8_t scale) { return E8M0::value(static_cast<uint8_t>(254 - scale)); }

FSDP_BOTH constexpr uint8_t mxfp8_code(float value, uint8_t scale) {
  return scale == E8M0::nan ? E4M3::nan : E4M3::stored(value * mxfp8_factor(scale));
}

// Current scaling of E4M3: 448 / amax; 1 where that says nothing.
FSDP_BOTH constexpr float fp8_scale(float amax, bool power_of_two) {
  const uint32_t bits = fp32_bits(amax) & fp32_magnitude;
  if (bits == 0 || bits >= fp32_infinity) return 1;
  const uint32_t scale = fp32_bits(E4M3::value(E4M3::Layout::largest) / fp32_of(bits));
  const uint32_t finite = scale < fp32_infinity ? scale : fp32_infinity - 1;
  return fp32_of(power_of_two ? finite & fp32_infinity : finite);
}

// Magnitudes, of which NaN is none: their bits have the same order.
FSDP_BOTH constexpr float largest_amax(const Fp8Scales &work, uint64_t index) {
  uint32_t largest = 0;
  for (uint32_t r = 0; r < work.ranks; ++r) {
    const uint32_t told = fp32_bits(work.amaxes[r * work.count + index]);
    largest = told > largest ? told : largest;
  }
  return fp32_of(largest);
}

// The sign is the number's, also of a NaN: GPUs give the NaNs that they make no sign.
FSDP_BOTH constexpr uint8_t fp8_code(float value, float scale) {
  const uint32_t bits = fp32_bits(value), sign = bits >> 24 & 0x80;
  if ((bits & fp32_magnitude) > fp32_infinity) return static_cast<uint8_t>(sign | E4M3::nan);
  return E4M3::stored(value * scale);
}

}  // namespace fsdp::device
