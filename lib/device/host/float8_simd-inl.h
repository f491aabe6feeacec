// SPDX-License-Identifier: Apache-2.0
// Included once per SIMD target by the kernels: E4M3 and E5M2 as vectors of fp32, with the bits that device/float8.h
// defines.
#include "device/host/simd-inl.h"
// (The guard below flips with each target; see hwy/foreach_target.h.)
#if defined(FSDP_DEVICE_HOST_FLOAT8_SIMD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FSDP_DEVICE_HOST_FLOAT8_SIMD_INL_H
#undef FSDP_DEVICE_HOST_FLOAT8_SIMD_INL_H
#else
#define FSDP_DEVICE_HOST_FLOAT8_SIMD_INL_H
#endif

#include "device/float8.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// Converts magnitudes to codes, in 32-bit lanes; NaN becomes the largest code. Adding the aligner leaves a subnormal's
// bits at the bottom of the sum, rounded by the addition itself.
template <class Layout, class D>
HWY_INLINE Bits<D> float8_magnitude(D d, Bits<D> magnitude) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto order = hn::BitCast(di, magnitude);  // never negative, and signed comparisons are cheap everywhere
  const auto aligner = hn::Set(du, Layout::aligner);
  const auto odd = hn::And(hn::ShiftRight<Layout::cut>(magnitude), hn::Set(du, 1));
  const auto normal =
      hn::ShiftRight<Layout::cut>(hn::Add(magnitude, hn::Add(odd, hn::Set(du, Layout::half - Layout::rebias))));
  const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, aligner))), aligner);
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(order, hn::Set(di, static_cast<int32_t>(Layout::lowest))));
  const auto code = hn::IfThenElse(is_subnormal, subnormal, normal);
  return hn::BitCast(du, hn::Min(hn::BitCast(di, code), hn::Set(di, static_cast<int32_t>(Layout::largest))));
}

template <class Number>
struct Float8Lanes {
  using Layout = typename Number::Layout;
  using Stored = uint8_t;

  template <class D>
  static HWY_INLINE Bits<D> bits(D d, hn::Vec<D> value) {
    const hn::RebindToUnsigned<D> du;
    const auto u = hn::BitCast(du, value);
    const auto magnitude = hn::And(u, hn::Set(du, fp32_magnitude));
    const auto payload = hn::And(hn::ShiftRight<Layout::cut>(magnitude), hn::Set(du, Layout::top_mask));
    const auto nan = hn::Or(payload, hn::Set(du, Layout::quiet));
    const auto is_nan = hn::RebindMask(du, hn::IsNaN(value));
    const auto code = hn::IfThenElse(is_nan, nan, float8_magnitude<Layout>(d, magnitude));
    return hn::Or(code, hn::And(hn::ShiftRight<24>(u), hn::Set(du, 0x80)));
  }

  template <class D>
  static HWY_INLINE hn::Vec<D> value(D d, Bits<D> bits) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto code = hn::And(bits, hn::Set(du, 0x7f));
    const auto order = hn::BitCast(di, code);
    const auto shifted = hn::ShiftLeft<Layout::cut>(code);
    const auto normal = hn::Add(shifted, hn::Set(du, Layout::rebias));
    const auto lowest = hn::Set(du, Layout::lowest);
    const auto subnormal =
        hn::BitCast(du, hn::Sub(hn::BitCast(d, hn::Add(shifted, lowest)), hn::BitCast(d, lowest)));  // exact
    const auto special =
        hn::Or(hn::And(shifted, hn::Set(du, Layout::top_mask << Layout::cut)), hn::Set(du, fp32_infinity));
    const auto is_special = hn::RebindMask(du, hn::Gt(order, hn::Set(di, static_cast<int32_t>(Layout::largest))));
    const auto is_subnormal = hn::RebindMask(du, hn::Lt(order, hn::Set(di, 1 << Layout::mantissa_bits)));
    auto magnitude = hn::IfThenElse(is_special, special, normal);
    magnitude = hn::IfThenElse(is_subnormal, subnormal, magnitude);
    return hn::BitCast(d, hn::Or(magnitude, hn::ShiftLeft<24>(hn::And(bits, hn::Set(du, 0x80)))));
  }
};

template <class Number, class D>
HWY_INLINE hn::Vec<D> load_float8(D d, const uint8_t *from, size_t index) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::RebindToUnsigned<D> du;
  return Float8Lanes<Number>::value(d, hn::PromoteTo(du, hn::LoadU(d8, from + index)));
}

template <class D>
HWY_INLINE void store_codes(D, Bits<D> codes, uint8_t *to) {
  const hn::Rebind<uint8_t, D> d8;
  hn::StoreU(hn::TruncateTo(d8, codes), d8, to);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
