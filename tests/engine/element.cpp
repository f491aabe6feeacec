// SPDX-License-Identifier: Apache-2.0
#include "element.h"

#include <bit>
#include <cmath>
#include <stdexcept>

namespace harness {
namespace {

float half_to_float(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa | 1024), static_cast<int>(exponent) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace

float load_element(const void *data, fsdp_dtype dtype, uint64_t i) {
  if (dtype == FSDP_FLOAT32) return static_cast<const float *>(data)[i];
  const uint16_t bits = static_cast<const uint16_t *>(data)[i];
  if (dtype == FSDP_BFLOAT16) return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  return half_to_float(bits);
}

void store_element(void *data, fsdp_dtype dtype, uint64_t i, float value) {
  if (dtype == FSDP_FLOAT32)
    static_cast<float *>(data)[i] = value;
  else if (dtype == FSDP_BFLOAT16)
    static_cast<uint16_t *>(data)[i] = to_bf16(value);
  else
    throw std::runtime_error("the harness writes no float16 gradients");
}

float round_to(float value, fsdp_dtype dtype) {
  if (dtype == FSDP_BFLOAT16) return std::bit_cast<float>(static_cast<uint32_t>(to_bf16(value)) << 16);
  return value;
}

}  // namespace harness
