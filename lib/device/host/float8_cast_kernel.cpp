// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.h"
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/float8_cast_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/float8_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

template <class Number, class From>
struct NarrowToFloat8 {
  uint8_t *to;
  const void *from;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    store_codes(d, Float8Lanes<Number>::bits(d, load<From>(d, from, i)), to + i);
  }
};

template <class To, class Number>
struct WidenFloat8 {
  void *to;
  const uint8_t *from;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    store<To>(d, load_float8<Number>(d, from, i), to, i);
  }
};

template <class Number>
void narrow_from(uint8_t *to, const void *from, fsdp_dtype from_dtype, size_t count) {
  switch (from_dtype) {
    case FSDP_FLOAT32: return for_each_vector(0, count, NarrowToFloat8<Number, F32>{to, from});
    case FSDP_BFLOAT16: return for_each_vector(0, count, NarrowToFloat8<Number, BF16>{to, from});
    case FSDP_FLOAT16: return for_each_vector(0, count, NarrowToFloat8<Number, F16>{to, from});
  }
}

void narrow_any(uint8_t *to, Float8 format, const void *from, fsdp_dtype from_dtype, size_t count) {
  if (format == Float8::e4m3) return narrow_from<E4M3>(to, from, from_dtype, count);
  narrow_from<E5M2>(to, from, from_dtype, count);
}

template <class Number>
void widen_to(void *to, fsdp_dtype to_dtype, const uint8_t *from, size_t count) {
  switch (to_dtype) {
    case FSDP_FLOAT32: return for_each_vector(0, count, WidenFloat8<F32, Number>{to, from});
    case FSDP_BFLOAT16: return for_each_vector(0, count, WidenFloat8<BF16, Number>{to, from});
    case FSDP_FLOAT16: return for_each_vector(0, count, WidenFloat8<F16, Number>{to, from});
  }
}

void widen_any(void *to, fsdp_dtype to_dtype, const uint8_t *from, Float8 format, size_t count) {
  if (format == Float8::e4m3) return widen_to<E4M3>(to, to_dtype, from, count);
  widen_to<E5M2>(to, to_dtype, from, count);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(narrow_any);
HWY_EXPORT(widen_any);

void cast_to_float8(uint8_t *to, Float8 format, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(narrow_any)(to, format, from, from_dtype, count);
}

void cast_from_float8(void *to, fsdp_dtype to_dtype, const uint8_t *from, Float8 format, uint64_t count) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(widen_any)(to, to_dtype, from, format, count);
}

}  // namespace fsdp::device::kernels
#endif
