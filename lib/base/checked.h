// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes that come from outside: it fails instead of wrapping around. Names are formatted only then.
#pragma once

#include <cstdint>
#include <numeric>

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

}  // namespace fsdp
