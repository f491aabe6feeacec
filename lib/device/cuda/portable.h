// SPDX-License-Identifier: Apache-2.0
// All functions that kernels may use in addition to plain C++ and the indices of threads and blocks. They exist under
// nvcc and in the simulation, which compiles the same kernels for the host. Each arithmetic operation is rounded once,
// to nearest even, and operations are never contracted, whatever the compiler's flags are. FSDP_TABLE declares
// constants in the memory of the device. FSDP_UNROLL unrolls the next loop completely, so that the elements of arrays
// are registers; FSDP_ROLLED does not unroll it.
#pragma once

#include <cstdint>
#include <cstring>

#include "device/both.h"

#if defined(__CUDACC__)
#ifdef __USE_FAST_MATH__
#error "the kernels promise exact bits: compile them without --use_fast_math"
#endif
#define FSDP_DEVICE __device__ __forceinline__
#define FSDP_TABLE __device__ constexpr
#define FSDP_UNROLL _Pragma("unroll")
#define FSDP_ROLLED _Pragma("unroll 1")
#else
#include <chrono>
#include <cmath>
#include <thread>
#define FSDP_DEVICE inline
#define FSDP_TABLE constexpr
#define FSDP_UNROLL
#define FSDP_ROLLED
#endif

namespace fsdp::device::cuda {

// n elements that are loaded and stored together.
template <class T, unsigned n>
struct alignas(n * sizeof(T)) Pack {
  T lane[n];
};

#if defined(__CUDACC__)

FSDP_DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
FSDP_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
FSDP_DEVICE float added(float a, float b) { return __fadd_rn(a, b); }
FSDP_DEVICE float subtracted(float a, float b) { return __fsub_rn(a, b); }
FSDP_DEVICE float multiplied(float a, float b) { return __fmul_rn(a, b); }
FSDP_DEVICE float divided(float a, float b) { return __fdiv_rn(a, b); }
FSDP_DEVICE float root(float value) { return __fsqrt_rn(value); }
FSDP_DEVICE double added(double a, double b) { return __dadd_rn(a, b); }
FSDP_DEVICE double multiplied(double a, double b) { return __dmul_rn(a, b); }
FSDP_DEVICE double divided(double a, double b) { return __ddiv_rn(a, b); }
FSDP_DEVICE double root(double value) { return __dsqrt_rn(value); }
FSDP_DEVICE float narrowed(double value) { return __double2float_rn(value); }

// The larger of two magnitudes; a NaN, of any payload, if one of the numbers is NaN.
FSDP_DEVICE float larger_magnitude(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
  return larger;
}

// The upper half of the result is b, rounded to bf16. A NaN has neither sign nor payload.
FSDP_DEVICE uint32_t rounded_to_bf16(float a, float b) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}

// Packs the highest byte of each number; the first number's byte is the lowest.
FSDP_DEVICE uint32_t top_bytes(float a, float b, float c, float d) {
  const uint32_t lower = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0073);
  const uint32_t upper = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x7300);
  return __byte_perm(lower, upper, 0x7610);
}

template <unsigned n, class T>
FSDP_DEVICE Pack<T, n> load_pack(const T *from) {
  return *reinterpret_cast<const Pack<T, n> *>(from);
}

// The type that one memory access moves.
template <unsigned bytes>
struct Vector;
template <>
struct Vector<1> {
  using Type = unsigned char;
};
template <>
struct Vector<2> {
  using Type = unsigned short;
};
template <>
struct Vector<4> {
  using Type = unsigned int;
};
template <>
struct Vector<8> {
  using Type = uint2;
};
template <>
struct Vector<16> {
  using Type = uint4;
};

// Stores a pack to global memory in one access. If a pack is assigned, it is stored element by element, and the
// compiler joins these stores only in some places.
template <unsigned n, class T>
FSDP_DEVICE void store_pack(T *to, const Pack<T, n> &pack) {
  using Type = typename Vector<n * sizeof(T)>::Type;
  Type vector;
  memcpy(&vector, &pack, sizeof vector);
  __stwb(reinterpret_cast<Type *>(to), vector);
}

FSDP_DEVICE void add_atomically(uint64_t *to, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long *>(to), static_cast<unsigned long long>(value));
}

FSDP_DEVICE void raise_atomically(uint32_t *to, uint32_t value) { atomicMax(to, value); }

// Prefetches into the L2 cache, which all multiprocessors share.
FSDP_DEVICE void prefetch(const void *address) { asm volatile("prefetch.L2 [%0];" ::"l"(address)); }

FSDP_DEVICE uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
FSDP_DEVICE void spend(uint32_t microseconds) {
  for (const uint64_t start = nanoseconds(); nanoseconds() - start < microseconds * uint64_t{1000};) __nanosleep(500);
}

#else

FSDP_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
FSDP_DEVICE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// The simulation is compiled with -ffp-contract=off.
FSDP_DEVICE float added(float a, float b) { return a + b; }
FSDP_DEVICE float subtracted(float a, float b) { return a - b; }
FSDP_DEVICE float multiplied(float a, float b) { return a * b; }
FSDP_DEVICE float divided(float a, float b) { return a / b; }
FSDP_DEVICE float root(float value) { return std::sqrt(value); }
FSDP_DEVICE double added(double a, double b) { return a + b; }
FSDP_DEVICE double multiplied(double a, double b) { return a * b; }
FSDP_DEVICE double divided(double a, double b) { return a / b; }
FSDP_DEVICE double root(double value) { return std::sqrt(value); }
FSDP_DEVICE float narrowed(double value) { return static_cast<float>(value); }

FSDP_DEVICE float larger_magnitude(float a, float b) {
  const uint32_t of_a = bits_of(a) & 0x7fffffff, of_b = bits_of(b) & 0x7fffffff;
  return float_of(of_a > of_b ? of_a : of_b);
}
FSDP_DEVICE uint32_t rounded_to_bf16(float a, float b) {
  const auto rounded = [](float value) {
    const uint32_t bits = bits_of(value);
    return value == value ? (bits + (bits >> 16 & 1) + 0x7fff) >> 16 : 0x7fff;
  };
  return rounded(b) << 16 | rounded(a);
}
FSDP_DEVICE uint32_t top_bytes(float a, float b, float c, float d) {
  return bits_of(a) >> 24 | bits_of(b) >> 24 << 8 | bits_of(c) >> 24 << 16 | bits_of(d) >> 24 << 24;
}

template <unsigned n, class T>
FSDP_DEVICE Pack<T, n> load_pack(const T *from) {
  Pack<T, n> pack;
  std::memcpy(&pack, from, sizeof pack);
  return pack;
}
template <unsigned n, class T>
FSDP_DEVICE void store_pack(T *to, const Pack<T, n> &pack) {
  std::memcpy(to, &pack, sizeof pack);
}

// A plain addition, because the simulation runs the threads of a kernel one after the other.
FSDP_DEVICE void add_atomically(uint64_t *to, uint64_t value) { *to += value; }
FSDP_DEVICE void raise_atomically(uint32_t *to, uint32_t value) {
  if (value > *to) *to = value;
}

FSDP_DEVICE void prefetch(const void *) {}

FSDP_DEVICE void spend(uint32_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

#endif

}  // namespace fsdp::device::cuda
