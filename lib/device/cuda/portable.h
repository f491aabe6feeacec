// SPDX-License-Identifier: Apache-2.0
// All functions that kernels may use besides plain C++ and the indices of threads and blocks. They exist under nvcc and
// in the simulation, which compiles the same kernels for the host. Each arithmetic operation is rounded once, to
// nearest even, and operations are never contracted, whatever the flags say. FSDP_TABLE declares constants in the
// memory of the device.
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
#else
#include <chrono>
#include <cmath>
#include <thread>
#define FSDP_DEVICE inline
#define FSDP_TABLE constexpr
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

// Stores a pack to global memory in one access. An assigned pack would be stored element by element, and the compiler
// joins these stores only in some places.
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

// The simulation runs the threads of a kernel one after the other.
FSDP_DEVICE void add_atomically(uint64_t *to, uint64_t value) { *to += value; }
FSDP_DEVICE void raise_atomically(uint32_t *to, uint32_t value) {
  if (value > *to) *to = value;
}

FSDP_DEVICE void prefetch(const void *) {}

FSDP_DEVICE void spend(uint32_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

#endif

}  // namespace fsdp::device::cuda
