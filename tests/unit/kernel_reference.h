// SPDX-License-Identifier: Apache-2.0
// Helpers of the kernel tests: slow conversions written from the formats' definitions, awkward values, and all SIMD
// targets.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../float_modes.h"
#include "base/dtype.h"
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#include <hwy/highway.h>
#include <hwy/targets.h>

namespace fsdp::test {

// Converts to any binary format of 16 bits. It rounds to nearest even by examining the bits that are cut off.
inline uint16_t narrow(float value, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const auto u = std::bit_cast<uint32_t>(value);
  const uint32_t sign = u >> 31 << 15, exponent = u >> 23 & 255, mantissa = u & 0x7fffff;
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  if (exponent == 255 && mantissa != 0)
    return static_cast<uint16_t>(sign | infinity | 1u << (mantissa_bits - 1) | mantissa >> (23 - mantissa_bits));
  if (exponent == 255) return static_cast<uint16_t>(sign | infinity);
  const int e = exponent ? static_cast<int>(exponent) - 127 : -126;
  const int lowest = 2 - (1 << (exponent_bits - 1));
  const uint64_t significand = exponent ? mantissa | 1u << 23 : mantissa;
  const int cut = std::min(23 - mantissa_bits + std::max(lowest - e, 0), 60);
  uint64_t kept = significand >> cut;
  const uint64_t rest = significand & ((uint64_t{1} << cut) - 1), half = uint64_t{1} << (cut - 1);
  if (rest > half || (rest == half && kept % 2 == 1)) ++kept;
  const uint64_t bits = kept + (static_cast<uint64_t>(std::max(e - lowest, 0)) << mantissa_bits);
  return static_cast<uint16_t>(sign | std::min<uint64_t>(bits, infinity));
}

inline float widen(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t sign = static_cast<uint32_t>(bits >> 15) << 31;
  float magnitude;
  if (exponent == (1 << exponent_bits) - 1)
    magnitude = std::bit_cast<float>(0x7f800000u | static_cast<uint32_t>(mantissa) << (23 - mantissa_bits));
  else if (exponent == 0)
    magnitude = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  else
    magnitude = std::ldexp(static_cast<float>(mantissa | 1 << mantissa_bits), exponent - bias - mantissa_bits);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

constexpr int exponent_bits(fsdp_dtype dtype) { return dtype == FSDP_BFLOAT16 ? 8 : 5; }

inline float read(const void *from, fsdp_dtype dtype, size_t i) {
  if (dtype == FSDP_FLOAT32) return static_cast<const float *>(from)[i];
  return widen(static_cast<const uint16_t *>(from)[i], exponent_bits(dtype));
}

inline void write(void *to, fsdp_dtype dtype, size_t i, float value) {
  if (dtype == FSDP_FLOAT32)
    static_cast<float *>(to)[i] = value;
  else
    static_cast<uint16_t *>(to)[i] = narrow(value, exponent_bits(dtype));
}

inline float round_to(float value, fsdp_dtype dtype) {
  return dtype == FSDP_FLOAT32 ? value : widen(narrow(value, exponent_bits(dtype)), exponent_bits(dtype));
}

// Compares for the same bits, or two NaNs, because arithmetic leaves a NaN's payload open.
inline bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

enum class Values { ordinary, awkward };

// Ordinary values lie around 1 and have both signs. Awkward values include subnormals, zeros of both signs, the largest
// number, Inf and NaN.
inline float random_value(std::mt19937 &random, Values values) {
  if (values == Values::awkward) switch (random() % 16) {
      case 0: return random() % 2 ? 0.0f : -0.0f;
      case 1: return std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807fffffu));
      case 2: return random() % 2 ? HUGE_VALF : -HUGE_VALF;
      case 3: return std::nanf("");
      case 4: return std::bit_cast<float>(static_cast<uint32_t>(0x7f7fffffu ^ (random() & 0x80000fffu)));
      case 5: return std::bit_cast<float>(static_cast<uint32_t>(random()));
      default: break;
    }
  return std::normal_distribution<float>()(random);
}

constexpr fsdp_dtype dtypes[] = {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16};

// Allocates count elements of dtype that start `offset` elements after an aligned address.
class Elements {
 public:
  Elements(fsdp_dtype dtype, size_t count, size_t offset = 0)
      : dtype_(dtype), offset_(offset), count_(count), words_((count + offset) + 16) {}
  Elements &fill(uint32_t seed, Values values) {
    std::mt19937 random(seed);
    constexpr size_t period = 65521;  // a prime; long fills repeat, because drawing takes time
    const size_t drawn = std::min(count_, period);
    for (size_t i = 0; i < drawn; ++i) write(data(), dtype_, i, random_value(random, values));
    for (size_t i = drawn; i < count_; ++i)
      std::memcpy(data() + i * dtype_size(dtype_), data() + (i - drawn) * dtype_size(dtype_), dtype_size(dtype_));
    return *this;
  }
  std::byte *data() { return reinterpret_cast<std::byte *>(words_.data()) + offset_ * dtype_size(dtype_); }
  float *floats() { return reinterpret_cast<float *>(data()); }
  float operator[](size_t i) { return read(data(), dtype_, i); }

 private:
  fsdp_dtype dtype_;
  size_t offset_, count_;
  std::vector<uint32_t> words_;
};

// Computes the CRC-32 of zlib.
inline uint32_t crc32(const void *data, size_t bytes) {
  uint32_t crc = 0xffffffff;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= static_cast<const uint8_t *>(data)[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc;
}
inline uint32_t crc32(const std::vector<uint8_t> &bytes) { return crc32(bytes.data(), bytes.size()); }

// Makes the matrix of numbers with known results, row by row.
constexpr size_t matrix_rows = 64, matrix_columns = 96;
inline std::vector<float> matrix() {
  std::vector<float> numbers;
  for (size_t r = 0; r < matrix_rows; ++r)
    for (size_t c = 0; c < matrix_columns; ++c) {
      const int whole = static_cast<int>((131 * r + 71 * c) % 257) - 128;
      numbers.push_back(std::ldexp(static_cast<float>(whole), static_cast<int>((r / 32 + c / 32) % 7) - 3));
    }
  return numbers;
}

#if defined(FSDP_HAS_FLOAT_MODES)
// These modes flush results and inputs to zero, and round down, up or towards zero.
constexpr float_modes::Modes odd_modes[] = {float_modes::standard | float_modes::flush | float_modes::round_down,
                                            float_modes::standard | float_modes::flush | float_modes::round_up,
                                            float_modes::standard | float_modes::flush | float_modes::round_to_zero};

// Runs the work in each of these modes, and checks that it restores them.
template <class Work>
void with_odd_modes(const Work &work) {
  for (const float_modes::Modes modes : odd_modes) {
    float_modes::set(modes);
    work();
    const float_modes::Modes after = float_modes::get();
    float_modes::set(float_modes::standard);
    EXPECT_EQ(after, modes);
  }
}
#endif

// Sanitizers look for other faults than wrong bits, and take many times as long. So they test only every n-th of all
// combinations.
#ifdef __SANITIZE_ADDRESS__
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif
constexpr int sampled(int n) { return sanitized ? n : 1; }

// Runs the test once for every SIMD target that was compiled and that this processor has.
template <class Test>
void on_every_target(const Test &test) {
  hwy::SetSupportedTargetsForTest(0);
  for (int64_t targets = hwy::SupportedTargets() & HWY_TARGETS; targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    test();
  }
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace fsdp::test
