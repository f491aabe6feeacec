// SPDX-License-Identifier: Apache-2.0
// Main weights in fewer bits than fp32, as plain functions of bits: fp32 in two halves, and bf16 that is rounded
// stochastically. The kernels of every device must give the same bits.
//
// The random bits are those of Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). The
// key is the model's seed. The counter consists of the number of the element in its parameter, divided by 8, a hash of
// the parameter's name, and the step. So the bits depend on no rank, no mesh and no order of the work.
#pragma once

#include <cstdint>

#include "device/float8.h"

namespace fsdp::device {

// The form in which the main weights of a run of elements are stored.
enum class MainForm : uint8_t {
  float32,  // fp32
  split16,  // the upper half is the compute weight in bf16; the rest is a signed number of 16 bits
  rounded   // only the compute weight in bf16
};

struct SplitWeight {
  uint16_t upper;
  int16_t rest;
};

// The upper half is rounded to nearest, ties away from zero. A NaN loses its payload. For every other number
// join_weight() gives the same bits again.
FSDP_BOTH constexpr SplitWeight split_weight(uint32_t bits) {
  if ((bits & fp32_magnitude) > fp32_infinity) return {static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7fc0), 0};
  const uint32_t upper = (bits + 0x8000) >> 16;
  return {static_cast<uint16_t>(upper), static_cast<int16_t>(bits - (upper << 16))};
}
FSDP_BOTH constexpr uint32_t join_weight(uint16_t upper, int16_t rest) {
  return (static_cast<uint32_t>(upper) << 16) + static_cast<uint32_t>(static_cast<int32_t>(rest));
}

// Element i of a run has the number first + i / length * pitch + i % length in its parameter, or for a box in the whole
// tensor. A run is one piece, or several pieces of the same length at equal distances.
struct ElementNumbers {
  uint64_t first, length, pitch;

  FSDP_BOTH constexpr uint64_t at(uint64_t i) const { return first + i / length * pitch + i % length; }
};

struct RoundingKey {
  uint64_t seed;
  uint32_t name;  // the low half of XXH64 of the parameter's name
  uint32_t step;
};

// 128 random bits for 8 elements: the elements with the numbers from 8 * group on. Element h of the 8 has a half of
// word h / 2: the lower half if h is even, else the upper half.
struct RandomWords {
  uint32_t word[4];

  FSDP_BOTH constexpr uint32_t half(unsigned h) const { return word[h / 2] >> h % 2 * 16 & 0xffff; }
};

// The upper half of a product. nvcc would make a 64-bit multiplication from the plain expression.
FSDP_BOTH constexpr uint32_t upper_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

FSDP_BOTH constexpr RandomWords random_words(const RoundingKey &key, uint64_t group) {
  uint32_t x0 = static_cast<uint32_t>(group), x1 = static_cast<uint32_t>(group >> 32), x2 = key.name, x3 = key.step;
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    constexpr uint32_t a = 0xD2511F53u, b = 0xCD9E8D57u;
    const uint32_t upper0 = upper_product(b, x2), upper2 = upper_product(a, x0), lower1 = b * x2, lower3 = a * x0;
    x0 = upper0 ^ x1 ^ k0, x1 = lower1;
    x2 = upper2 ^ x3 ^ k1, x3 = lower3;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{x0, x1, x2, x3}};
}

// Rounds fp32 to bf16 with 16 random bits. Inf and NaN are rounded as by a cast. A finite number stays finite.
FSDP_BOTH constexpr uint16_t round_randomly(uint32_t bits, uint32_t random) {
  constexpr uint32_t exponent = fp32_infinity;
  if ((bits & exponent) == exponent)
    return static_cast<uint16_t>(bits >> 16 | ((bits & fp32_magnitude) > fp32_infinity ? 0x0040u : 0u));
  const uint32_t sum = bits + random;
  return static_cast<uint16_t>(((sum & exponent) == exponent ? bits : sum) >> 16);
}

// Numbers to be rounded stochastically, for callers that update weights themselves.
struct RandomRounding {
  const float *from;
  uint16_t *to;
  uint64_t count;
  RoundingKey key;
  ElementNumbers numbers;
};

}  // namespace fsdp::device
