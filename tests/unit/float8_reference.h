// SPDX-License-Identifier: Apache-2.0
// Computes 8-bit numbers from their definitions, in double: the value of a code from its fields, and the code of a
// number by search for the nearest value. Scales are found by comparison with powers of two.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "device/quantize.h"
#include "kernel_reference.h"

namespace fsdp::test {

struct Float8Format {
  device::Float8 format;
  int mantissa_bits, bias;
  uint8_t largest;
  uint8_t quiet;  // a NaN without payload
};
constexpr Float8Format e4m3{device::Float8::e4m3, 3, 7, 0x7e, 0x7f}, e5m2{device::Float8::e5m2, 2, 15, 0x7b, 0x7e};

// Returns the value of a finite code.
inline double value_of(uint8_t code, const Float8Format &f) {
  const int magnitude = code & 0x7f, top = 1 << f.mantissa_bits;
  const int exponent = magnitude / top, mantissa = magnitude % top;
  const double value = exponent == 0 ? std::ldexp(mantissa, 1 - f.bias - f.mantissa_bits)
                                     : std::ldexp(top + mantissa, exponent - f.bias - f.mantissa_bits);
  return code & 0x80 ? -value : value;
}

inline const std::vector<double> &finite_values(const Float8Format &f) {
  static const auto values = [] {
    std::array<std::vector<double>, 2> all;
    for (const Float8Format &format : {e4m3, e5m2})
      for (int code = 0; code <= format.largest; ++code)
        all[format.mantissa_bits - 2].push_back(value_of(static_cast<uint8_t>(code), format));
    return all;
  }();
  return values[f.mantissa_bits - 2];
}

// Tests call these functions for each number, and they only read one table, so they are not instrumented.
#define FSDP_TEST_BARE __attribute__((no_sanitize("address", "undefined")))

// Returns the nearest finite code, or the even one of two, with the number's sign.
FSDP_TEST_BARE inline uint8_t nearest_code(double value, const Float8Format &f) {
  const double *const values = finite_values(f).data(), magnitude = std::fabs(value);
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (magnitude >= values[f.largest]) return sign | f.largest;
  int low = 0, high = f.largest;  // values[low] <= magnitude < values[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (values[middle] <= magnitude ? low : high) = middle;
  }
  const double over = magnitude - values[low], under = values[high] - magnitude;
  const int nearest = over == under ? low + low % 2 : over < under ? low : high;
  return static_cast<uint8_t>(sign | nearest);
}

inline uint8_t float8_of(float value, const Float8Format &f) {
  if (!std::isnan(value)) return nearest_code(value, f);
  const uint32_t payload = std::bit_cast<uint32_t>(value) & 0x7fffff;
  return static_cast<uint8_t>((std::signbit(value) ? 0x80 : 0) | f.quiet | payload >> (23 - f.mantissa_bits));
}

inline uint8_t scale_of(float amax, device::ScaleRule rule) {
  const bool up = rule == device::ScaleRule::round_up;
  if (std::isnan(amax)) return 0xff;
  if (std::isinf(amax)) return up ? 0xfe : 0xff;
  if (amax == 0) return 0;
  if (!up) return static_cast<uint8_t>(std::clamp(std::ilogb(amax) - 8 + 127, 0, 254));
  // The computation is exact in double, then rounded once.
  const auto v = static_cast<float>(double{amax} * double{std::bit_cast<float>(0x3b124925u)});
  static const auto powers = [] {
    std::array<double, 255> made;
    for (int scale = 0; scale < 255; ++scale) made[static_cast<size_t>(scale)] = std::ldexp(1.0, scale - 127);
    return made;
  }();
  const auto least = std::lower_bound(powers.begin(), powers.end(), double{v});
  if (least == powers.end()) std::abort();
  return static_cast<uint8_t>(least - powers.begin());
}

inline uint8_t mxfp8_element(float value, uint8_t scale) {
  if (scale == 0xff) return 0x7f;
  return nearest_code(std::ldexp(double{value}, 127 - scale), e4m3);
}

// NaN counts as the largest number.
inline void raise(float &amax, float value) {
  if (std::isnan(value) || std::fabs(value) > amax) amax = std::fabs(value);
}

struct Mxfp8Planes {
  std::vector<uint8_t> row, row_scales, column, column_scales;
  bool operator==(const Mxfp8Planes &) const = default;
};

inline Mxfp8Planes quantized(const std::vector<float> &x, size_t rows, size_t columns, device::ScaleRule rule) {
  Mxfp8Planes planes{std::vector<uint8_t>(x.size()), std::vector<uint8_t>(x.size() / 32),
                     std::vector<uint8_t>(x.size()), std::vector<uint8_t>(x.size() / 32)};
  std::vector<float> row_amax(x.size() / 32), column_amax(x.size() / 32);
  const auto row_block = [&](size_t r, size_t c) { return r * (columns / 32) + c / 32; };
  const auto column_block = [&](size_t r, size_t c) { return r / 32 * columns + c; };
  const auto each = [&](const auto &visit) {
    for (size_t r = 0; r < rows; ++r)
      for (size_t c = 0; c < columns; ++c) visit(r, c, x[r * columns + c]);
  };
  each([&](size_t r, size_t c, float value) {
    raise(row_amax[row_block(r, c)], value), raise(column_amax[column_block(r, c)], value);
  });
  for (size_t i = 0; i < x.size() / 32; ++i)
    planes.row_scales[i] = scale_of(row_amax[i], rule), planes.column_scales[i] = scale_of(column_amax[i], rule);
  each([&](size_t r, size_t c, float value) {
    planes.row[r * columns + c] = mxfp8_element(value, planes.row_scales[row_block(r, c)]);
    planes.column[r * columns + c] = mxfp8_element(value, planes.column_scales[column_block(r, c)]);
  });
  return planes;
}

// The division is exact in double to far below fp32's last bit, and rounded once.
inline float scale_for(float amax, bool power_of_two) {
  if (amax == 0 || !std::isfinite(amax)) return 1;
  const double exact = 448.0 / double{amax}, largest = std::ldexp(2 - std::ldexp(1, -23), 127);
  const float scale = exact >= std::ldexp(1.0, 128) ? static_cast<float>(largest) : static_cast<float>(exact);
  return power_of_two ? std::ldexp(1.0f, std::ilogb(scale)) : scale;
}

inline float inverse(float scale) { return static_cast<float>(1 / double{scale}); }

// The product is exact in double, then rounded to fp32 once.
inline uint8_t code_for(float value, float scale) {
  if (std::isnan(value)) return std::signbit(value) ? 0xff : 0x7f;
  return float8_of(static_cast<float>(double{value} * double{scale}), e4m3);
}

// Computes FP8 blocks of 128 x 128.
struct Fp8Blocks {
  std::vector<uint8_t> codes;
  std::vector<float> scale_inv;
};

inline Fp8Blocks fp8_blocks_of(const std::vector<float> &x, size_t rows, size_t columns, bool power_of_two) {
  const size_t across = (columns + 127) / 128;
  std::vector<float> amaxes((rows + 127) / 128 * across), scales;
  for (size_t i = 0; i < x.size(); ++i) raise(amaxes[i / columns / 128 * across + i % columns / 128], x[i]);
  Fp8Blocks blocks{std::vector<uint8_t>(x.size()), {}};
  for (const float amax : amaxes) scales.push_back(scale_for(amax, power_of_two));
  for (const float scale : scales) blocks.scale_inv.push_back(inverse(scale));
  for (size_t i = 0; i < x.size(); ++i)
    blocks.codes[i] = code_for(x[i], scales[i / columns / 128 * across + i % columns / 128]);
  return blocks;
}

}  // namespace fsdp::test
