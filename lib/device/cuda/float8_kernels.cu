// SPDX-License-Identifier: Apache-2.0
// Casts to and from numbers of 8 bits. Least traffic per element: the wider type's bytes and one.
#include "device/cuda/cast.h"
#include "device/cuda/float8_elements.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

template <class Number>
int narrow(kernels::Stream stream, uint8_t *to, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  using To = Float8Element<Number>;
  switch (from_dtype) {
    case FSDP_BFLOAT16: return apply<Cast, To, BF16>(stream, to, from, count);
    case FSDP_FLOAT16: return apply<Cast, To, F16>(stream, to, from, count);
    default: return apply<Cast, To, F32>(stream, to, from, count);
  }
}

template <class Number>
int widen(kernels::Stream stream, void *to, fsdp_dtype to_dtype, const uint8_t *from, uint64_t count) {
  using From = Float8Element<Number>;
  switch (to_dtype) {
    case FSDP_BFLOAT16: return apply<Cast, BF16, From>(stream, to, from, count);
    case FSDP_FLOAT16: return apply<Cast, F16, From>(stream, to, from, count);
    default: return apply<Cast, F32, From>(stream, to, from, count);
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
