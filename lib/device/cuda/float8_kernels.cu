// SPDX-License-Identifier: Apache-2.0
// Casts to and from numbers of 8 bits. Least traffic per element: the wider type's bytes and one.
#include "device/cuda/float8_elements.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

template <class To, class From>
struct CastFloat8 {
  static constexpr unsigned batch = 4;
  void *to;
  const void *from;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<typename From::Stored, n> stored[m];
    for (unsigned k = 0; k < m; ++k) stored[k] = load<From, n>(from, first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      Pack<float, n> values;
      for (unsigned j = 0; j < n; ++j) values.lane[j] = From::value(stored[k].lane[j]);
      store<To, n>(to, first + k * step, values);
    }
  }
};

template <class To, class From>
int cast_float8(kernels::Stream stream, void *to, const void *from, uint64_t count) {
  const unsigned at = misfit(to, sizeof(typename To::Stored));
  const bool alike = misfit(from, sizeof(typename From::Stored)) == at;
  return for_each(CastFloat8<To, From>{to, from}, divide(count, at, alike), stream);
}

template <class Number>
int narrow(kernels::Stream stream, uint8_t *to, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  using To = Float8Element<Number>;
  switch (from_dtype) {
    case FSDP_BFLOAT16: return cast_float8<To, BF16>(stream, to, from, count);
    case FSDP_FLOAT16: return cast_float8<To, F16>(stream, to, from, count);
    default: return cast_float8<To, F32>(stream, to, from, count);
  }
}

template <class Number>
int widen(kernels::Stream stream, void *to, fsdp_dtype to_dtype, const uint8_t *from, uint64_t count) {
  using From = Float8Element<Number>;
  switch (to_dtype) {
    case FSDP_BFLOAT16: return cast_float8<BF16, From>(stream, to, from, count);
    case FSDP_FLOAT16: return cast_float8<F16, From>(stream, to, from, count);
    default: return cast_float8<F32, From>(stream, to, from, count);
  }
}

}  // namespace

namespace kernels {

int cast_to_float8(Stream stream, uint8_t *to, Float8 format, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  return format == Float8::e4m3 ? narrow<E4M3>(stream, to, from, from_dtype, count)
                                : narrow<E5M2>(stream, to, from, from_dtype, count);
}

int cast_from_float8(Stream stream, void *to, fsdp_dtype to_dtype, const uint8_t *from, Float8 format, uint64_t count) {
  return format == Float8::e4m3 ? widen<E4M3>(stream, to, to_dtype, from, count)
                                : widen<E5M2>(stream, to, to_dtype, from, count);
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
