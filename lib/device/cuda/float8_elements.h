// SPDX-License-Identifier: Apache-2.0
// E4M3 and E5M2 elements for kernels. sm_89 and later have an instruction for them; the bits are those of
// device/float8.h.
#pragma once

#include "device/cuda/elements.h"
#include "device/float8.h"

namespace fsdp::device::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FSDP_FLOAT8_INSTRUCTION 1

// The second operand becomes the lower byte.
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

// The code has the sign of the number, even if that is NaN.
FSDP_DEVICE uint8_t scaled_code(float value, float scale) {
  const uint32_t bits = bits_of(value);
  if ((bits & fp32_magnitude) > fp32_infinity) return static_cast<uint8_t>((bits >> 24 & 0x80) | E4M3::nan);
  return Float8Element<E4M3>::stored(multiplied(value, scale));
}

}  // namespace fsdp::device::cuda
