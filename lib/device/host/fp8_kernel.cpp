// SPDX-License-Identifier: Apache-2.0
// FP8 with one fp32 scale, for a whole tensor or for blocks of 128 x 128.
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/fp8_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/float8_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

template <bool via_bf16, class D>
HWY_INLINE hn::Vec<D> load_number(D d, const float *from) {
  const auto value = hn::LoadU(d, from);
  if constexpr (via_bf16) return round_to<BF16>(d, value);
  return value;
}

// As integers order them: NaN is the largest of all, whatever the processor makes of it.
template <bool via_bf16, class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> load_magnitude(D d, const float *from) {
  const hn::RebindToSigned<D> di;
  return hn::And(hn::BitCast(di, load_number<via_bf16>(d, from)), hn::Set(di, int32_t{fp32_magnitude}));
}

template <bool via_bf16>
HWY_INLINE int32_t amax_of(const float *values, size_t count, int32_t before) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const hn::RebindToSigned<decltype(d)> di;
  const size_t n = hn::Lanes(d);
  auto amax = hn::Set(di, before), other = amax;
  size_t i = 0;
  for (; i + 2 * n <= count; i += 2 * n) {
    amax = hn::Max(amax, load_magnitude<via_bf16>(d, values + i));
    other = hn::Max(other, load_magnitude<via_bf16>(d, values + i + n));
  }
  int32_t found = hn::GetLane(hn::MaxOfLanes(di, hn::Max(amax, other)));
  for (; i < count; ++i) {
    const int32_t magnitude = hn::GetLane(load_magnitude<via_bf16>(one, values + i));
    found = magnitude > found ? magnitude : found;
  }
  return found;
}

int32_t find_amax_bits(const float *values, size_t count, bool via_bf16) {
  return via_bf16 ? amax_of<true>(values, count, 0) : amax_of<false>(values, count, 0);
}

// The sign is the number's own: a product that is NaN need not keep it.
template <bool via_bf16>
struct QuantizeFp8 {
  const float *from;
  uint8_t *codes;
  float scale;
  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    const hn::RebindToUnsigned<D> du;
    const auto value = load_number<via_bf16>(d, from + i);
    const auto magnitude = hn::And(hn::BitCast(du, hn::Mul(value, hn::Set(d, scale))), hn::Set(du, fp32_magnitude));
    const auto finite = float8_magnitude<E4M3::Layout>(d, magnitude);
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    const auto code = hn::IfThenElse(is_nan, hn::Set(du, E4M3::nan), finite);
    const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, value)), hn::Set(du, 0x80));
    store_codes(d, hn::Or(code, sign), codes + i);
  }
};

void quantize_all(const Fp8Quantize &work) {
  if (work.via_bf16) return for_each_vector(0, work.count, QuantizeFp8<true>{work.from, work.codes, *work.scale});
  for_each_vector(0, work.count, QuantizeFp8<false>{work.from, work.codes, *work.scale});
}

template <bool via_bf16>
HWY_INLINE void quantize_block(const Fp8BlockQuantize &work, size_t row, size_t column) {
  const size_t end_row = row + fp8_block < work.rows ? row + fp8_block : work.rows;
  const size_t width = column + fp8_block < work.columns ? fp8_block : work.columns - column;
  int32_t amax = 0;
  for (size_t r = row; r < end_row; ++r) amax = amax_of<via_bf16>(work.from + r * work.columns + column, width, amax);
  const float scale = fp8_scale(fp32_of(static_cast<uint32_t>(amax)), work.power_of_two);
  work.scale_inv[row / fp8_block * fp8_blocks(work.columns) + column / fp8_block] = 1 / scale;
  for (size_t r = row; r < end_row; ++r) {
    const size_t begin = r * work.columns + column;
    for_each_vector(begin, begin + width, QuantizeFp8<via_bf16>{work.from, work.codes, scale});
  }
}

template <bool via_bf16>
void quantize_blocks_of(const Fp8BlockQuantize &work) {
  for (size_t r = 0; r < work.rows; r += fp8_block)
    for (size_t c = 0; c < work.columns; c += fp8_block) quantize_block<via_bf16>(work, r, c);
}

void quantize_blocks(const Fp8BlockQuantize &work) {
  work.via_bf16 ? quantize_blocks_of<true>(work) : quantize_blocks_of<false>(work);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(find_amax_bits);
HWY_EXPORT(quantize_all);
HWY_EXPORT(quantize_blocks);

float find_amax(const float *values, uint64_t count, bool via_bf16) {
  const FloatEnvironment standard;
  const auto bits = static_cast<uint32_t>(HWY_DYNAMIC_DISPATCH(find_amax_bits)(values, count, via_bf16));
  return fp32_of(bits < fp32_infinity ? bits : fp32_infinity);
}

void find_fp8_scales(const Fp8Scales &work) {
  const FloatEnvironment standard;
  for (uint64_t i = 0; i < work.count; ++i) {
    work.scales[i] = fp8_scale(largest_amax(work, i), work.power_of_two);
    work.scale_inv[i] = 1 / work.scales[i];
  }
}

void quantize_fp8(const Fp8Quantize &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(quantize_all)(work);
}

void quantize_fp8_blocks(const Fp8BlockQuantize &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(quantize_blocks)(work);
}

}  // namespace fsdp::device::kernels
#endif
