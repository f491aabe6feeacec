// SPDX-License-Identifier: Apache-2.0
// Converts codes and scales back to numbers: one multiplication in fp32, and one rounding for bf16.
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/dequantize_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/float8_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

template <class To>
struct TimesOne {
  void *to;
  const uint8_t *codes;
  float factor;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    store<To>(d, hn::Mul(load_float8<E4M3>(d, codes, i), hn::Set(d, factor)), to, i);
  }
};

// Loads adjacent E8M0 scales as fp32. Scale 0 is a subnormal number, and 255 is NaN.
template <class D>
HWY_INLINE hn::Vec<D> load_scales(D d, const uint8_t *scales) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint8_t, D> d8;
  const auto codes = hn::PromoteTo(du, hn::LoadU(d8, scales));
  const auto least = hn::IfThenElse(hn::Eq(codes, hn::Zero(du)), hn::Set(du, 0x00400000), hn::ShiftLeft<23>(codes));
  const auto is_nan = hn::Eq(codes, hn::Set(du, E8M0::nan));
  return hn::BitCast(d, hn::IfThenElse(is_nan, hn::Set(du, fp32_magnitude), least));
}

template <class To>
struct TimesColumns {
  void *to;
  const uint8_t *codes, *scales;
  size_t row;  // index at which the row of codes begins
  template <class D>
  HWY_INLINE void operator()(D d, size_t c) const {
    store<To>(d, hn::Mul(load_float8<E4M3>(d, codes, row + c), load_scales(d, scales + c)), to, row + c);
  }
};

template <class To>
void dequantize_rows(void *to, const Mxfp8Dequantize &work) {
  for (size_t i = 0; i < work.rows * work.columns; i += mxfp8_block)
    for_each_vector(i, i + mxfp8_block, TimesOne<To>{to, work.codes, E8M0::value(work.scales[i / mxfp8_block])});
}

template <class To>
void dequantize_columns(void *to, const Mxfp8Dequantize &work) {
  for (size_t r = 0; r < work.rows; ++r) {
    const uint8_t *const scales = work.scales + r / mxfp8_block * work.columns;
    for_each_vector(0, work.columns, TimesColumns<To>{to, work.codes, scales, r * work.columns});
  }
}

template <class To>
void dequantize_blocks_to(void *to, const Fp8BlockDequantize &work) {
  for (size_t r = 0; r < work.rows; ++r) {
    const float *const scales = work.scale_inv + r / fp8_block * fp8_blocks(work.columns);
    for (size_t c = 0; c < work.columns; c += fp8_block) {
      const size_t end = c + fp8_block < work.columns ? c + fp8_block : work.columns, row = r * work.columns;
      for_each_vector(row + c, row + end, TimesOne<To>{to, work.codes, scales[c / fp8_block]});
    }
  }
}

void dequantize_mxfp8_any(void *to, fsdp_dtype to_dtype, const Mxfp8Dequantize &work) {
  const bool bf16 = to_dtype == FSDP_BFLOAT16;
  if (work.form == Mxfp8Form::row) return bf16 ? dequantize_rows<BF16>(to, work) : dequantize_rows<F32>(to, work);
  bf16 ? dequantize_columns<BF16>(to, work) : dequantize_columns<F32>(to, work);
}

void dequantize_blocks_any(void *to, fsdp_dtype to_dtype, const Fp8BlockDequantize &work) {
  to_dtype == FSDP_BFLOAT16 ? dequantize_blocks_to<BF16>(to, work) : dequantize_blocks_to<F32>(to, work);
}

void dequantize_any(void *to, fsdp_dtype to_dtype, const Fp8Dequantize &work) {
  if (to_dtype == FSDP_BFLOAT16) return for_each_vector(0, work.count, TimesOne<BF16>{to, work.codes, *work.scale_inv});
  for_each_vector(0, work.count, TimesOne<F32>{to, work.codes, *work.scale_inv});
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(dequantize_mxfp8_any);
HWY_EXPORT(dequantize_blocks_any);
HWY_EXPORT(dequantize_any);

void dequantize_mxfp8(void *to, fsdp_dtype to_dtype, const Mxfp8Dequantize &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(dequantize_mxfp8_any)(to, to_dtype, work);
}

void dequantize_fp8_blocks(void *to, fsdp_dtype to_dtype, const Fp8BlockDequantize &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(dequantize_blocks_any)(to, to_dtype, work);
}

void dequantize_fp8(void *to, fsdp_dtype to_dtype, const Fp8Dequantize &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(dequantize_any)(to, to_dtype, work);
}

}  // namespace fsdp::device::kernels
#endif
