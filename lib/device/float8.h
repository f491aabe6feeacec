// SPDX-License-Identifier: Apache-2.0
// The 8-bit numbers of the OCP's "8-bit Floating Point Specification" (E4M3, E5M2) and "Microscaling Formats" (E8M0),
// as plain functions of bits. The kernels of every device must give the same bits, whatever the caller's floating-point
// modes.
//
// E4M3 and E5M2 round to the nearest number, ties to even, subnormals included. Numbers above the largest finite
// number, and Inf, become the largest finite number. A NaN stays a NaN, with its sign and the top of its payload.
#pragma once

#include <cstdint>

#include "device/both.h"

namespace fsdp::device {

enum class Float8 : uint8_t { e4m3, e5m2 };

// The bits of fp32 numbers that kernels use most.
constexpr uint32_t fp32_infinity = 0x7f800000, fp32_magnitude = 0x7fffffff;

FSDP_BOTH constexpr uint32_t fp32_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
FSDP_BOTH constexpr float fp32_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// The constants in which the two formats differ. `quiet` has the bits of a NaN without its payload.
template <uint32_t mantissa_bits_, uint32_t bias_, uint32_t largest_, uint32_t quiet_>
struct Float8Layout {
  static constexpr uint32_t mantissa_bits = mantissa_bits_, bias = bias_, largest = largest_, quiet = quiet_;
  static constexpr uint32_t cut = 23 - mantissa_bits;        // number of bits cut from fp32's mantissa
  static constexpr uint32_t rebias = (127 - bias) << 23;     // difference of the exponents
  static constexpr uint32_t lowest = rebias + (1u << 23);    // the lowest normal number, as fp32
  static constexpr uint32_t aligner = lowest + (cut << 23);  // an fp32 whose last bit is the lowest subnormal
  static constexpr uint32_t half = (1u << (cut - 1)) - 1;    // just below half of the value that is cut
  static constexpr uint32_t top_mask = (1u << mantissa_bits) - 1;
};
using E4M3Layout = Float8Layout<3, 7, 0x7e, 0x7f>;
using E5M2Layout = Float8Layout<2, 15, 0x7b, 0x7e>;

// Rounds an fp32 magnitude below Layout::lowest: its significand is shifted to the place of the subnormals.
template <class Layout>
FSDP_BOTH constexpr uint32_t float8_subnormal(uint32_t magnitude) {
  const uint32_t exponent = magnitude >> 23, least = exponent ? exponent : 1;
  const uint32_t significand = exponent ? (magnitude & 0x7fffff) | 0x800000 : magnitude;
  const uint32_t shift = Layout::cut + (Layout::lowest >> 23) - least;
  if (shift > 25) return 0;  // less than a quarter of the lowest subnormal
  return (significand + (1u << (shift - 1)) - 1 + (significand >> shift & 1)) >> shift;
}

template <class Layout>
FSDP_BOTH constexpr uint8_t float8_stored(float value) {
  const uint32_t bits = fp32_bits(value), magnitude = bits & fp32_magnitude, sign = bits >> 24 & 0x80;
  if (magnitude > fp32_infinity)
    return static_cast<uint8_t>(sign | Layout::quiet | (magnitude >> Layout::cut & Layout::top_mask));
  if (magnitude < Layout::lowest) return static_cast<uint8_t>(sign | float8_subnormal<Layout>(magnitude));
  const uint32_t odd = magnitude >> Layout::cut & 1;
  const uint32_t rounded = (magnitude - Layout::rebias + Layout::half + odd) >> Layout::cut;
  return static_cast<uint8_t>(sign | (rounded < Layout::largest ? rounded : Layout::largest));
}

// The exact value of a code.
template <class Layout>
FSDP_BOTH constexpr float float8_value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
  if (magnitude > Layout::largest && (Layout::mantissa_bits == 3 || magnitude > Layout::largest + 1))
    return fp32_of(sign | fp32_infinity | (magnitude & Layout::top_mask) << Layout::cut);
  if (magnitude == Layout::largest + 1) return fp32_of(sign | fp32_infinity);
  if (magnitude > Layout::top_mask) return fp32_of(sign | ((magnitude << Layout::cut) + Layout::rebias));
  const float lowest = fp32_of(Layout::lowest), moved = fp32_of((magnitude << Layout::cut) + Layout::lowest);
  return fp32_of(sign | fp32_bits(moved - lowest));  // exact: a subnormal number is a count of the lowest one
}

struct E4M3 {
  using Layout = E4M3Layout;
  static constexpr uint8_t nan = 0x7f;
  FSDP_BOTH static constexpr uint8_t stored(float value) { return float8_stored<Layout>(value); }
  FSDP_BOTH static constexpr float value(uint8_t code) { return float8_value<Layout>(code); }
};

struct E5M2 {
  using Layout = E5M2Layout;
  FSDP_BOTH static constexpr uint8_t stored(float value) { return float8_stored<Layout>(value); }
  FSDP_BOTH static constexpr float value(uint8_t code) { return float8_value<Layout>(code); }
};

// Powers of two without a sign: 2^(code - 127), 0xff is NaN.
struct E8M0 {
  static constexpr uint8_t largest = 0xfe, nan = 0xff;

  FSDP_BOTH static constexpr float value(uint8_t code) {
    if (code == nan) return fp32_of(fp32_magnitude);
    return fp32_of(code == 0 ? 0x00400000u : static_cast<uint32_t>(code) << 23);
  }

  // The smallest power of two that is not below the value, which must not be negative. Values above the largest power
  // of two become the largest.
  FSDP_BOTH static constexpr uint8_t stored(float value) {
    const uint32_t magnitude = fp32_bits(value) & fp32_magnitude, exponent = magnitude >> 23;
    if (magnitude > fp32_infinity) return nan;
    if (exponent >= largest) return largest;
    if (exponent == 0) return magnitude > 0x00400000;
    return static_cast<uint8_t>(exponent + ((magnitude & 0x7fffff) != 0));
  }
};

}  // namespace fsdp::device
