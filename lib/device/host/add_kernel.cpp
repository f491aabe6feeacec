// SPDX-License-Identifier: Apache-2.0
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/add_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

template <class To, class From>
struct Add {
  void *to;
  const void *from;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    store<To>(d, hn::Add(load<To>(d, to, i), load<From>(d, from, i)), to, i);
  }
};

template <class To>
void add_from(void *to, const void *from, fsdp_dtype from_dtype, size_t count) {
  switch (from_dtype) {
    case FSDP_FLOAT32: return for_each_vector(0, count, Add<To, F32>{to, from});
    case FSDP_BFLOAT16: return for_each_vector(0, count, Add<To, BF16>{to, from});
    case FSDP_FLOAT16: return for_each_vector(0, count, Add<To, F16>{to, from});
  }
}

void add_any(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, size_t count) {
  switch (to_dtype) {
    case FSDP_FLOAT32: return add_from<F32>(to, from, from_dtype, count);
    case FSDP_BFLOAT16: return add_from<BF16>(to, from, from_dtype, count);
    case FSDP_FLOAT16: return add_from<F16>(to, from, from_dtype, count);
  }
}

struct Scale {
  float *values;
  float factor;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    store<F32>(d, hn::Mul(load<F32>(d, values, i), hn::Set(d, factor)), values, i);
  }
};

void scale_values(float *values, float factor, size_t count) { for_each_vector(0, count, Scale{values, factor}); }

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(add_any);
HWY_EXPORT(scale_values);

void add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(add_any)(to, to_dtype, from, from_dtype, count);
}

void scale(float *values, float factor, uint64_t count) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(scale_values)(values, factor, count);
}

}  // namespace fsdp::device::kernels
#endif
