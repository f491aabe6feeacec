// SPDX-License-Identifier: Apache-2.0
// Optimizer states in 8 bits: a code for each element and a scale for each block. The codes are those of the dynamic
// maps of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022). The numbers of a map are in seven
// decades below 1, and each decade has twice as many as the next lower one. The kernels of every device must give the
// same bits.
#pragma once

#include <cstdint>

#include "device/float8.h"

namespace fsdp::device {

// The number of elements that share a scale. Blocks are counted from the first element of a parameter.
constexpr uint64_t state_block = 256;
FSDP_BOTH constexpr uint64_t state_blocks(uint64_t count) { return (count + state_block - 1) / state_block; }

// A map gives the number of each code, in fp32. The numbers ascend. The signed map is for first moments, the unsigned
// map for second moments.
struct StateMap {
  float value[256];
  // A number above limit[c] gets code c + 1 or a higher one. The limit is the largest fp32 number that is not above the
  // middle between value[c] and value[c + 1].
  float limit[255];
};

constexpr StateMap make_state_map(bool is_signed) {
  double numbers[256] = {};
  int count = 0;
  double scale[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
  for (int i = 0; i < 7; ++i) {
    // The numbers of a decade are the middles of equal parts of [0.1, 1], times the decade's scale.
    const int parts = is_signed ? 1 << i : 2 << i;
    const double step = (1 - 0.1) / parts;
    for (int k = 0; k < parts; ++k) {
      const double begin = k * step + 0.1, end = k + 1 == parts ? 1.0 : (k + 1) * step + 0.1;
      const double middle = scale[i] * ((begin + end) / 2);
      numbers[count++] = middle;
      if (is_signed) numbers[count++] = -middle;
    }
  }
  numbers[count++] = 0, numbers[count++] = 1;
  for (int i = 1; i < count; ++i)  // insertion sort
    for (int j = i; j > 0 && numbers[j] < numbers[j - 1]; --j) {
      const double greater = numbers[j - 1];
      numbers[j - 1] = numbers[j], numbers[j] = greater;
    }
  StateMap map{};
  for (int i = 0; i < 256; ++i) map.value[i] = static_cast<float>(numbers[i]);
  for (int i = 0; i < 255; ++i) {
    const double middle = (static_cast<double>(map.value[i]) + static_cast<double>(map.value[i + 1])) / 2;  // exact
    const auto nearest = static_cast<float>(middle);
    const uint32_t bits = fp32_bits(nearest);
    const bool is_above = static_cast<double>(nearest) > middle;
    map.limit[i] = is_above ? fp32_of(nearest > 0 ? bits - 1 : bits + 1) : nearest;
  }
  return map;
}

inline constexpr StateMap signed_state_map = make_state_map(true), unsigned_state_map = make_state_map(false);
constexpr uint8_t signed_zero_code = 127, unsigned_zero_code = 0;

// Finds the code whose number is nearest to `ratio`, a number divided by its block's scale. A tie gets the lower code,
// and NaN gets code 0. `limits` may be a copy in faster memory.
FSDP_BOTH constexpr uint8_t state_code(const float *limits, float ratio) {
  unsigned code = 0;
  for (unsigned step = 128; step; step /= 2)
    if (ratio > limits[code + step - 1]) code += step;
  return static_cast<uint8_t>(code);
}

// The scale of a block. `largest` has the bits of the block's largest magnitude; magnitudes are compared as integers,
// so that a NaN gives the scale NaN.
FSDP_BOTH constexpr float state_scale(uint32_t largest) {
  constexpr uint32_t least = 0x2b8cbccc;  // 1e-12f
  return fp32_of(largest > least ? largest : least);
}

}  // namespace fsdp::device
