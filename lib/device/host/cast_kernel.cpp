// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.h"
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/cast_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

template <class To, class From, bool streaming>
struct Cast {
  void *to;
  const void *from;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    store<To, streaming>(d, load<From>(d, from, i), to, i);
  }
};

template <class To, class From>
void cast_elements(void *to, const void *from, size_t count) {
  using Stored = typename To::Stored;
  if (count * sizeof(Stored) < streaming_bytes) {
    for_each_vector(0, count, Cast<To, From, false>{to, from});
    return;
  }
  const size_t head = misaligned_head(static_cast<const Stored *>(to), count);
  for_each_vector(0, head, Cast<To, From, false>{to, from});
  for_each_vector(head, count, Cast<To, From, true>{to, from});
  hwy::FlushStream();
}

template <class To>
void cast_from(void *to, const void *from, fsdp_dtype from_dtype, size_t count) {
  switch (from_dtype) {
    case FSDP_FLOAT32: return cast_elements<To, F32>(to, from, count);
    case FSDP_BFLOAT16: return cast_elements<To, BF16>(to, from, count);
    case FSDP_FLOAT16: return cast_elements<To, F16>(to, from, count);
  }
}

void cast_any(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, size_t count) {
  switch (to_dtype) {
    case FSDP_FLOAT32: return cast_from<F32>(to, from, from_dtype, count);
    case FSDP_BFLOAT16: return cast_from<BF16>(to, from, from_dtype, count);
    case FSDP_FLOAT16: return cast_from<F16>(to, from, from_dtype, count);
  }
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(cast_any);

void cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  if (to_dtype == from_dtype) return copy_bytes(to, from, count * dtype_size(to_dtype));
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(cast_any)(to, to_dtype, from, from_dtype, count);
}

}  // namespace fsdp::device::kernels
#endif
