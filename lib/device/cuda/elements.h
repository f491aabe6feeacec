// SPDX-License-Identifier: Apache-2.0
// fp32, bf16 and fp16 elements for kernels. The conversions are those of host/simd-inl.h, operation by operation:
// integer arithmetic on bits, so that subnormals are kept and the payloads of NaNs are the same on every device.
#pragma once

#include "device/cuda/portable.h"

namespace fsdp::device::cuda {

struct F32 {
  using Stored = float;
  FSDP_DEVICE static float value(float stored) { return stored; }
  FSDP_DEVICE static float stored(float value) { return value; }
};

struct BF16 {
  using Stored = uint16_t;
  FSDP_DEVICE static float value(uint16_t stored) { return float_of(static_cast<uint32_t>(stored) << 16); }
  FSDP_DEVICE static uint16_t stored(float value) {
    const uint32_t u = bits_of(value), high = u >> 16;
    const uint32_t rounded = (u + (high & 1) + 0x7fff) >> 16;
    const bool nan = (u & 0x7fffffff) > 0x7f800000;
    return static_cast<uint16_t>(nan ? high | 0x0040 : rounded);
  }
};

struct F16 {
  using Stored = uint16_t;
  FSDP_DEVICE static float value(uint16_t stored) {
    constexpr uint32_t rebias = 112u << 23, lowest = 113u << 23;  // 2^-14, the lowest normal number
    const uint32_t shifted = (stored & 0x7fffu) << 13;
    uint32_t magnitude = shifted + rebias;
    if (shifted > 0x0f7fffff) magnitude += rebias;  // Inf and NaN
    if (shifted < 0x00800000) magnitude = bits_of(subtracted(float_of(shifted + lowest), float_of(lowest)));  // exact
    return float_of(magnitude | (stored & 0x8000u) << 16);
  }
  FSDP_DEVICE static uint16_t stored(float value) {
    const uint32_t u = bits_of(value), magnitude = u & 0x7fffffff;
    uint32_t result;
    if (magnitude > 255u << 23) {
      result = (magnitude >> 13 & 0x03ff) | 0x7e00;
    } else if (magnitude >= 143u << 23) {
      result = 0x7c00;
    } else if (magnitude < 113u << 23) {
      // Adding 0.5 leaves a subnormal's bits at the bottom of the sum, rounded by the addition itself.
      result = bits_of(added(float_of(magnitude), 0.5f)) - (126u << 23);
    } else {
      result = (magnitude + (magnitude >> 13 & 1) + 0xc8000fffu) >> 13;
    }
    return static_cast<uint16_t>(result | (u >> 16 & 0x8000));
  }
};

// Accesses n values of Type, starting at element `index`.
template <class Type, unsigned n>
FSDP_DEVICE Pack<typename Type::Stored, n> load(const void *from, uint64_t index) {
  return load_pack<n>(static_cast<const typename Type::Stored *>(from) + index);
}

template <class Type, unsigned n>
FSDP_DEVICE void store(void *to, uint64_t index, const Pack<float, n> &values) {
  Pack<typename Type::Stored, n> pack;
  for (unsigned j = 0; j < n; ++j) pack.lane[j] = Type::stored(values.lane[j]);
  store_pack<n>(static_cast<typename Type::Stored *>(to) + index, pack);
}

}  // namespace fsdp::device::cuda
