// SPDX-License-Identifier: Apache-2.0
// E4M3 and E5M2 elements for kernels. sm_89 and later have an instruction for them; the bits are those of
// device/float8.h.
#pragma once

#include "device/cuda/elements.h"
#include "device/float8.h"

namespace fsdp::device::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FSDP_FLOAT8_INSTRUCTION 1

// The instruction makes the second operand the lower byte.
FSDP_DEVICE uint8_t saturated(float value, E4M3) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return static_cast<uint8_t>(pair);
}
FSDP_DEVICE uint8_t saturated(float value, E5M2) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return static_cast<uint8_t>(pair);
}
#endif

template <class Number>
struct Float8Element {
  using Stored = uint8_t;
  FSDP_DEVICE static float value(uint8_t stored) { return Number::value(stored); }
  FSDP_DEVICE static uint8_t stored(float value) {
#if defined(FSDP_FLOAT8_INSTRUCTION)
    // The instruction drops the sign and the payload of a NaN.
    if ((bits_of(value) & fp32_magnitude) <= fp32_infinity) return saturated(value, Number());
#endif
    return Number::stored(value);
  }
};

FSDP_DEVICE float via(float value, bool via_bf16) { return via_bf16 ? BF16::value(BF16::stored(value)) : value; }

// Rounds four numbers to bf16. A NaN keeps its sign if `keeps_sign`.
template <bool keeps_sign>
FSDP_DEVICE void round_to_bf16(Pack<float, 4> &values) {
  const auto with_sign = [](uint32_t rounded, float value) {
    if constexpr (!keeps_sign) return float_of(rounded);
    return float_of((rounded & fp32_magnitude) | (bits_of(value) & ~fp32_magnitude));
  };
  FSDP_UNROLL
  for (unsigned j = 0; j < 4; j += 2) {
    const uint32_t both = rounded_to_bf16(values.lane[j], values.lane[j + 1]);
    values.lane[j] = with_sign(both << 16, values.lane[j]);
    values.lane[j + 1] = with_sign(both & 0xffff0000, values.lane[j + 1]);
  }
}

// The largest of four magnitudes; a NaN if one of the numbers is NaN.
FSDP_DEVICE float largest_magnitude(const Pack<float, 4> &values) {
  return larger_magnitude(larger_magnitude(values.lane[0], values.lane[1]),
                          larger_magnitude(values.lane[2], values.lane[3]));
}

FSDP_DEVICE bool is_finite(float value) { return (bits_of(value) & fp32_magnitude) < fp32_infinity; }

// E4M3 codes are made four at a time; the code of the first number is the lowest byte. If there is an instruction for
// it, a NaN becomes the code 0x7f without a test.

#if defined(FSDP_FLOAT8_INSTRUCTION)
FSDP_DEVICE uint32_t four_codes(float a, float b, float c, float d) {
  uint16_t lower, upper;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lower) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(upper) : "f"(d), "f"(c));
  uint32_t codes;
  asm("mov.b32 %0, {%1, %2};" : "=r"(codes) : "h"(lower), "h"(upper));
  return codes;
}
#else
// A code without its sign, before it is limited to the largest finite code. The code of a NaN is above all others.
FSDP_DEVICE uint32_t unlimited_code(float value) {
  using Layout = E4M3Layout;
  const uint32_t magnitude = bits_of(value) & fp32_magnitude;
  // The addition leaves the bits of a subnormal number at the bottom of the sum, and rounds it.
  const uint32_t low = bits_of(added(float_of(magnitude), float_of(Layout::aligner))) - Layout::aligner;
  const uint32_t odd = magnitude >> Layout::cut & 1;
  const uint32_t rounded = (magnitude - Layout::rebias + Layout::half + odd) >> Layout::cut;
  return magnitude < Layout::lowest ? low : rounded;
}
FSDP_DEVICE uint32_t limited_code(float value, uint32_t largest) {
  const uint32_t code = unlimited_code(value);
  return code < largest ? code : largest;
}
#endif

// The factors of four blocks, which may be the same block. A block with a NaN has the factor NaN and only the code
// 0x7f; no other block has a NaN.
struct FourFactors {
  Pack<float, 4> factor;

  FSDP_DEVICE uint32_t codes(const Pack<float, 4> &values) const {
    float scaled[4];
    FSDP_UNROLL
    for (unsigned j = 0; j < 4; ++j) scaled[j] = multiplied(values.lane[j], factor.lane[j]);
#if defined(FSDP_FLOAT8_INSTRUCTION)
    return four_codes(scaled[0], scaled[1], scaled[2], scaled[3]);
#else
    uint32_t codes = 0, signs = 0;
    FSDP_UNROLL
    for (unsigned j = 0; j < 4; ++j) {
      const bool is_nan = (bits_of(factor.lane[j]) & fp32_magnitude) > fp32_infinity;
      codes |= limited_code(scaled[j], is_nan ? E4M3::nan : E4M3Layout::largest) << 8 * j;
      signs |= (is_nan ? 0u : 0x80u) << 8 * j;
    }
    return codes | (top_bytes(values.lane[0], values.lane[1], values.lane[2], values.lane[3]) & signs);
#endif
  }
};

// The codes of four numbers with one scale. They have the signs of the numbers, even if the numbers are NaN.
FSDP_DEVICE uint32_t scaled_codes(const Pack<float, 4> &values, float scale) {
  float scaled[4];
  FSDP_UNROLL
  for (unsigned j = 0; j < 4; ++j) scaled[j] = multiplied(values.lane[j], scale);
#if defined(FSDP_FLOAT8_INSTRUCTION)
  uint32_t codes = four_codes(scaled[0], scaled[1], scaled[2], scaled[3]);
#else
  uint32_t codes = 0;
  FSDP_UNROLL
  for (unsigned j = 0; j < 4; ++j) {
    const bool is_nan = (bits_of(values.lane[j]) & fp32_magnitude) > fp32_infinity;
    codes |= limited_code(scaled[j], is_nan ? E4M3::nan : E4M3Layout::largest) << 8 * j;
  }
#endif
  return codes | (top_bytes(values.lane[0], values.lane[1], values.lane[2], values.lane[3]) & 0x80808080);
}

FSDP_DEVICE Pack<uint8_t, 4> bytes_of(uint32_t codes) {
  Pack<uint8_t, 4> bytes;
  FSDP_UNROLL
  for (unsigned j = 0; j < 4; ++j) bytes.lane[j] = static_cast<uint8_t>(codes >> 8 * j);
  return bytes;
}

// Does the same for one number.
FSDP_DEVICE uint8_t scaled_code(float value, float scale) {
  const uint32_t bits = bits_of(value);
  if ((bits & fp32_magnitude) > fp32_infinity) return static_cast<uint8_t>((bits >> 24 & 0x80) | E4M3::nan);
  return Float8Element<E4M3>::stored(multiplied(value, scale));
}

}  // namespace fsdp::device::cuda
