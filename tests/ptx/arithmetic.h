// SPDX-License-Identifier: Apache-2.0
// Operations on a lane, as the PTX ISA defines them. They share no code with the library. A NaN that fp32 arithmetic
// makes is always 0x7fffffff.
#pragma once

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "unit/float8_reference.h"

namespace ptx {

template <class T>
T canonical(T value) {
  if constexpr (std::is_same_v<T, float>)
    return std::isnan(value) ? std::bit_cast<float>(0x7fffffffu) : value;
  else
    return value;
}

using Predicate = uint8_t;  // 0 or 1

// Integers wrap around. An fp32 NaN is always the same.
template <class T, class Op>
T computed(T a, T b, Op op) {
  if constexpr (std::is_integral_v<T>) {
    using Bits = std::common_type_t<std::make_unsigned_t<T>, unsigned>;
    return static_cast<T>(op(static_cast<Bits>(a), static_cast<Bits>(b)));
  } else {
    return canonical(op(a, b));
  }
}

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return computed(a, b, [](auto x, auto y) { return x + y; });
  }
};
struct Subtract {
  template <class T>
  T operator()(T a, T b) const {
    return computed(a, b, [](auto x, auto y) { return x - y; });
  }
};
struct Multiply {
  template <class T>
  T operator()(T a, T b) const {
    return computed(a, b, [](auto x, auto y) { return x * y; });
  }
};
struct MultiplyWide {
  uint64_t operator()(uint32_t a, uint32_t b) const { return uint64_t{a} * b; }
  uint32_t operator()(uint16_t a, uint16_t b) const { return uint32_t{a} * b; }
};
struct MultiplyHigh {
  uint32_t operator()(uint32_t a, uint32_t b) const { return static_cast<uint32_t>(uint64_t{a} * b >> 32); }
};
struct MultiplyAdd {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add()(Multiply()(a, b), c);
  }
};
// PTX does not define the result of an integer division by zero. This simulation returns all ones.
struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) return b == 0 ? ~T{0} : a / b;
    return canonical(a / b);
  }
};
struct Remainder {
  template <class T>
  T operator()(T a, T b) const {
    return b == 0 ? a : a % b;
  }
};
struct Root {
  template <class T>
  T operator()(T a) const {
    return canonical(std::sqrt(a));
  }
};
struct Negate {
  template <class T>
  T operator()(T a) const {
    return Subtract()(T{0}, a);
  }
};
struct Least {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};
struct Most {
  template <class T>
  T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

struct Magnitude {
  float operator()(float a) const { return canonical(std::fabs(a)); }
};
// Returns the second number with the sign of the first. This holds for NaN, too.
struct WithSign {
  float operator()(float sign, float value) const {
    constexpr uint32_t bit = 0x80000000;
    return std::bit_cast<float>((std::bit_cast<uint32_t>(value) & ~bit) | (std::bit_cast<uint32_t>(sign) & bit));
  }
};
// Returns NaN if one of the two is NaN.
struct MostOrNan {
  float operator()(float a, float b) const {
    if (std::isnan(a) || std::isnan(b)) return canonical(std::nanf(""));
    if (a == b) return std::signbit(a) ? b : a;
    return a > b ? a : b;
  }
};

struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};
struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};
struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};
struct Not {
  template <class T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};
struct Opposed {
  Predicate operator()(Predicate a) const { return !a; }
};
// A shift by the width or more leaves no bits.
struct ShiftLeft {
  template <class T>
  T operator()(T a, uint32_t by) const {
    return by < 8 * sizeof(T) ? static_cast<T>(a << by) : T{0};
  }
};
struct ShiftRight {
  template <class T>
  T operator()(T a, uint32_t by) const {
    return by < 8 * sizeof(T) ? static_cast<T>(a >> by) : T{0};
  }
};
struct ExtractBits {
  uint32_t operator()(uint32_t a, uint32_t at, uint32_t count) const {
    at &= 0xff, count &= 0xff;
    if (at > 31 || count == 0) return 0;
    const uint32_t moved = a >> at;
    return count > 31 ? moved : moved & ((1u << count) - 1);
  }
};
struct InsertBits {
  template <class T>
  T operator()(T a, T into, uint32_t at, uint32_t count) const {
    constexpr uint32_t bits = 8 * sizeof(T);
    at &= 0xff, count &= 0xff;
    if (at >= bits || count == 0) return into;
    const T ones = count >= bits ? ~T{0} : (T{1} << count) - 1;
    return (into & ~(ones << at)) | ((a & ones) << at);
  }
};
struct CountOnes {
  uint32_t operator()(uint32_t a) const { return static_cast<uint32_t>(std::popcount(a)); }
};
// Selects bytes of b:a by number. If a selector has its top bit set, it copies the byte's sign instead.
struct Permute {
  uint32_t operator()(uint32_t a, uint32_t b, uint32_t which) const {
    const uint64_t bytes = uint64_t{b} << 32 | a;
    uint32_t made = 0;
    for (unsigned k = 0; k < 4; ++k) {
      const uint32_t nibble = which >> 4 * k & 15;
      uint32_t byte = static_cast<uint32_t>(bytes >> 8 * (nibble & 7)) & 0xff;
      if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
      made |= byte << 8 * k;
    }
    return made;
  }
};

struct Itself {
  template <class T>
  T operator()(T a) const {
    return a;
  }
};
struct Select {
  template <class T>
  T operator()(T a, T b, Predicate which) const {
    return which ? a : b;
  }
};
template <class To>
struct Convert {
  template <class From>
  To operator()(From a) const {
    return canonical(static_cast<To>(a));
  }
};
struct Combine {
  uint32_t operator()(uint16_t low, uint16_t high) const { return uint32_t{high} << 16 | low; }
};
struct Nanoseconds {
  uint64_t operator()() const {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
  }
};

// The first operand goes to the upper byte. A number beyond the format becomes the format's largest number, and a NaN
// becomes the NaN without a sign.
template <const fsdp::test::Float8Format &format>
struct Narrow {
  static uint16_t code(float value) {
    return std::isnan(value) ? 0x7f : fsdp::test::nearest_code(double{value}, format);
  }
  uint16_t operator()(float a, float b) const { return static_cast<uint16_t>(code(a) << 8 | code(b)); }
};

// The first operand goes to the upper half. Rounds to the nearest bf16 number, and to the even one of two that are
// equally near. A NaN becomes 0x7fff.
struct NarrowBf16 {
  static double value(uint32_t magnitude) {
    return magnitude == 0x7f80 ? 0x1p128 : double{std::bit_cast<float>(magnitude << 16)};
  }
  static uint32_t half(float number) {
    if (std::isnan(number)) return 0x7fff;
    const uint32_t sign = std::signbit(number) ? 0x8000 : 0;
    if (std::isinf(number)) return sign | 0x7f80;
    const uint32_t below = std::bit_cast<uint32_t>(std::fabs(number)) >> 16;
    const double size = std::fabs(double{number}), down = size - value(below), up = value(below + 1) - size;
    return sign | (up < down || (up == down && below % 2 == 1) ? below + 1 : below);
  }
  uint32_t operator()(float a, float b) const { return half(a) << 16 | half(b); }
};

struct Equal {
  template <class T>
  bool operator()(T a, T b) const {
    return a == b;
  }
};
// Is false if one operand is NaN, unlike the opposite of Equal.
struct OrderedUnequal {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b || a > b;
  }
};
struct Below {
  template <class T>
  bool operator()(T a, T b) const {
    return a < b;
  }
};
struct AtMost {
  template <class T>
  bool operator()(T a, T b) const {
    return a <= b;
  }
};
// These variants swap the operands or give the opposite result.
template <class Op>
struct Swapped {
  template <class T>
  bool operator()(T a, T b) const {
    return Op()(b, a);
  }
};
template <class Op>
struct Opposite {
  template <class T>
  bool operator()(T a, T b) const {
    return !Op()(a, b);
  }
};

}  // namespace ptx
