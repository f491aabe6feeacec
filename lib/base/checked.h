// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes from outside of the library: it fails instead of wrapping around. Names of sizes are formatted
// only on failure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>

#include "base/error.h"

namespace fsdp {

template <class Name>
uint64_t checked_multiply(uint64_t a, uint64_t b, const Name &what) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) fail(FSDP_INVALID_ARGUMENT, "{}: {} x {} exceeds 64 bits", what, a, b);
  return product;
}

template <class Name>
uint64_t checked_add(uint64_t a, uint64_t b, const Name &what) {
  uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) fail(FSDP_INVALID_ARGUMENT, "{}: {} + {} exceeds 64 bits", what, a, b);
  return sum;
}

constexpr uint64_t divide_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

inline uint64_t round_up(uint64_t value, uint64_t multiple, const char *what = "size") {
  return checked_multiply(divide_up(value, multiple), multiple, what);
}

template <class Name>
uint64_t checked_lcm(uint64_t a, uint64_t b, const Name &what) {
  return checked_multiply(a / std::gcd(a, b), b, what);
}

// A caller's array with one struct every `stride` bytes. The caller's struct may be shorter or longer than ours.

template <class T>
class Strided {
 public:
  Strided(const T *first, uint64_t count, uint64_t stride) : first_(first), count_(count), stride_(stride) {}

  uint64_t size() const { return count_; }
  // Fields that the caller's struct lacks are zero.
  T operator[](uint64_t index) const {
    T value{};
    std::memcpy(static_cast<void *>(&value), bytes(index), std::min<uint64_t>(stride_, sizeof(T)));
    return value;
  }
  // The offset of the element's first byte that is not zero and unknown to this release.
  std::optional<uint64_t> unknown_byte(uint64_t index) const {
    for (uint64_t byte = sizeof(T); byte < stride_; ++byte)
      if (bytes(index)[byte]) return byte;
    return std::nullopt;
  }

 private:
  const unsigned char *bytes(uint64_t index) const {
    return reinterpret_cast<const unsigned char *>(first_) + index * stride_;
  }

  const T *first_;
  uint64_t count_, stride_;
};

}  // namespace fsdp
