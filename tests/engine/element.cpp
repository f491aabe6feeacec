// SPDX-License-Identifier: Apache-2.0
#include "element.h"

#include <bit>
#include <cmath>

namespace harness {
namespace {

float half_to_float(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? std::nanf("") : bits >> 15 ? -HUGE_VALF : HUGE_VALF;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa | 1024), static_cast<int>(exponent) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Finds the nearest multiple of the last place, which is exact in double. A value that is too large becomes infinite.
uint16_t to_half(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return 0x7E00 | sign;
  if (magnitude >= 65520) return 0x7C00 | sign;
  const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
  const auto places = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // ties to even
  // Above 1024 places there is an implicit one; a carry into 2048 is the next exponent.
  return static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + places));
}

// E4M3: 8 places to an exponent, subnormals below 2^-6, and no Inf.
float e4m3_to_float(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7F) == 0x7F) return std::nanf("");
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(mantissa + 8), exponent - 10);
  return code >> 7 ? -magnitude : magnitude;
}

// As to_half, but a value that is too large becomes the largest finite one.
uint8_t to_e4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return 0x7F | sign;
  if (magnitude >= 448) return 0x7E | sign;
  const int exponent = magnitude < 0x1p-6 ? -6 : std::ilogb(magnitude);
  const auto places = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));  // ties to even
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + places));
}

}  // namespace

float load_element(const void *data, fsdp_dtype dtype, uint64_t i) {
  if (dtype == FSDP_E8M0) {
    const uint8_t code = static_cast<const uint8_t *>(data)[i];
    return code == 255 ? std::nanf("") : std::ldexp(1.0f, code - 127);
  }
  if (dtype == FSDP_FLOAT8_E4M3) return e4m3_to_float(static_cast<const uint8_t *>(data)[i]);
  if (dtype == FSDP_FLOAT32) return static_cast<const float *>(data)[i];
  const uint16_t bits = static_cast<const uint16_t *>(data)[i];
  if (dtype == FSDP_BFLOAT16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  return half_to_float(bits);
}

void store_element(void *data, fsdp_dtype dtype, uint64_t i, float value) {
  if (dtype == FSDP_FLOAT8_E4M3)
    static_cast<uint8_t *>(data)[i] = to_e4m3(value);
  else if (dtype == FSDP_FLOAT32)
    static_cast<float *>(data)[i] = value;
  else
    static_cast<uint16_t *>(data)[i] = dtype == FSDP_BFLOAT16 ? to_bf16(value) : to_half(value);
}

float round_to(float value, fsdp_dtype dtype) {
  if (dtype == FSDP_BFLOAT16) return std::bit_cast<float>(static_cast<uint32_t>(to_bf16(value)) << 16);
  return dtype == FSDP_FLOAT16 ? half_to_float(to_half(value)) : value;
}

uint32_t crc32(const void *data, size_t bytes) {
  uint32_t crc = 0xffffffff;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= static_cast<const uint8_t *>(data)[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc;
}

}  // namespace harness
