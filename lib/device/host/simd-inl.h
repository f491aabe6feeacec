// SPDX-License-Identifier: Apache-2.0
// Included once per SIMD target by the kernels: fp32, bf16 and fp16 elements as vectors of fp32. The conversions are
// bit arithmetic on integers, so that they are the same on every target. The hardware's bf16 instruction flushes
// subnormals, and not every processor has an fp16 instruction.
#include "device/host/simd_targets.h"
// (The guard below flips with each target; see hwy/foreach_target.h.)
#if defined(FSDP_DEVICE_HOST_SIMD_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FSDP_DEVICE_HOST_SIMD_INL_H
#undef FSDP_DEVICE_HOST_SIMD_INL_H
#else
#define FSDP_DEVICE_HOST_SIMD_INL_H
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Element types. bits() and value() convert between a vector of fp32 and its rounded bits in 32-bit lanes.
template <class D>
using Bits = hn::Vec<hn::RebindToUnsigned<D>>;

struct F32 {
  using Stored = float;
};

struct BF16 {
  using Stored = uint16_t;

  template <class D>
  static HWY_INLINE hn::Vec<D> value(D d, Bits<D> bits) {
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  }

  // The upper 16 bits of the result are the value rounded to bf16, unless it is NaN.
  template <class D>
  static HWY_INLINE Bits<D> rounded_upper(D, hn::Vec<D> value) {
    const hn::RebindToUnsigned<D> du;
    const auto u = hn::BitCast(du, value);
    const auto odd = hn::And(hn::ShiftRight<16>(u), hn::Set(du, 1));
    return hn::Add(u, hn::Add(odd, hn::Set(du, 0x7fff)));
  }

  // Rounds values of which none is NaN.
  template <class D>
  static HWY_INLINE hn::Vec<D> round_numbers(D d, hn::Vec<D> value) {
    return hn::BitCast(d, hn::And(rounded_upper(d, value), hn::Set(hn::RebindToUnsigned<D>(), 0xffff0000u)));
  }

  template <class D>
  static HWY_INLINE Bits<D> bits(D d, hn::Vec<D> value) {
    const hn::RebindToUnsigned<D> du;
    const auto high = hn::ShiftRight<16>(hn::BitCast(du, value));
    const auto rounded = hn::ShiftRight<16>(rounded_upper(d, value));
    const auto quiet = hn::Or(high, hn::Set(du, 0x0040));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), quiet, rounded);
  }
};

// After F. Giesen, "Half to float done quickly" and "float->half variants" (public domain).
struct F16 {
  using Stored = uint16_t;

  template <class D>
  static HWY_INLINE hn::Vec<D> value(D d, Bits<D> bits) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto rebias = hn::Set(du, 112u << 23);
    const auto lowest = hn::Set(du, 113u << 23);  // 2^-14, the lowest normal number
    const auto shifted = hn::ShiftLeft<13>(hn::And(bits, hn::Set(du, 0x7fff)));
    const auto order = hn::BitCast(di, shifted);  // never negative, and signed comparisons are cheap
    const auto normal = hn::Add(shifted, rebias);
    const auto special = hn::Add(normal, rebias);
    const auto subnormal =
        hn::BitCast(du, hn::Sub(hn::BitCast(d, hn::Add(shifted, lowest)), hn::BitCast(d, lowest)));  // exact
    auto magnitude = hn::IfThenElse(hn::RebindMask(du, hn::Gt(order, hn::Set(di, 0x0f7fffff))), special, normal);
    magnitude = hn::IfThenElse(hn::RebindMask(du, hn::Lt(order, hn::Set(di, 0x00800000))), subnormal, magnitude);
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)));
    return hn::BitCast(d, hn::Or(magnitude, sign));
  }

  template <class D>
  static HWY_INLINE Bits<D> bits(D d, hn::Vec<D> value) {
    const hn::RebindToUnsigned<D> du;
    const hn::RebindToSigned<D> di;
    const auto u = hn::BitCast(du, value);
    const auto magnitude = hn::And(u, hn::Set(du, 0x7fffffff));
    const auto order = hn::BitCast(di, magnitude);  // never negative, and signed comparisons are cheap everywhere
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const auto normal = hn::ShiftRight<13>(hn::Add(magnitude, hn::Add(odd, hn::Set(du, 0xc8000fffu))));
    // Adding 0.5 leaves a subnormal's bits at the bottom of the sum, rounded by the addition itself.
    const auto half = hn::Set(du, 126u << 23);
    const auto subnormal = hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(d, magnitude), hn::BitCast(d, half))), half);
    const auto nan = hn::Or(hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 0x03ff)), hn::Set(du, 0x7e00));
    auto result = hn::IfThenElse(hn::RebindMask(du, hn::Lt(order, hn::Set(di, 113 << 23))), subnormal, normal);
    result =
        hn::IfThenElse(hn::RebindMask(du, hn::Gt(order, hn::Set(di, (143 << 23) - 1))), hn::Set(du, 0x7c00), result);
    result = hn::IfThenElse(hn::RebindMask(du, hn::Gt(order, hn::Set(di, 255 << 23))), nan, result);
    return hn::Or(result, hn::ShiftRight<16>(hn::And(u, hn::Set(du, 0x80000000u))));
  }
};

// Rounds the value to Type and converts it back.
template <class Type, class D>
HWY_INLINE hn::Vec<D> round_to([[maybe_unused]] D d, hn::Vec<D> value) {
  if constexpr (std::is_same_v<Type, F32>) {
    return value;
  } else {
    return Type::value(d, Type::bits(d, value));
  }
}

template <class Type, class D>
HWY_INLINE hn::Vec<D> load(D d, const void *from, size_t index) {
  const auto *const elements = static_cast<const typename Type::Stored *>(from) + index;
  if constexpr (std::is_same_v<Type, F32>) {
    return hn::LoadU(d, elements);
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> du;
    return Type::value(d, hn::PromoteTo(du, hn::LoadU(d16, elements)));
  }
}

// A streaming store bypasses the caches. `to` must then be aligned to whole vectors, and a fence must follow.
template <bool streaming, class D, class T>
HWY_INLINE void store_lanes(D d, hn::Vec<D> value, T *to) {
  // Highway's Stream writes 16 bytes even if the vector is shorter.
  if constexpr (streaming && hn::MaxLanes(D()) * sizeof(T) >= 16) {
    hn::Stream(value, d, to);
  } else {
    hn::StoreU(value, d, to);
  }
}

template <class Type, bool streaming = false, class D>
HWY_INLINE void store(D d, hn::Vec<D> value, void *to, size_t index) {
  auto *const elements = static_cast<typename Type::Stored *>(to) + index;
  if constexpr (std::is_same_v<Type, F32>) {
    store_lanes<streaming>(d, value, elements);
  } else {
    const hn::Rebind<uint16_t, D> d16;
    store_lanes<streaming>(d16, hn::TruncateTo(d16, Type::bits(d, value)), elements);
  }
}

// Calls kernel(d, i) for whole vectors, and then the same code for the remaining elements, one at a time.
template <class Kernel>
HWY_INLINE void for_each_vector(size_t begin, size_t end, const Kernel &kernel) {
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const size_t lanes = hn::Lanes(d);
  size_t i = begin;
  for (; i + lanes <= end; i += lanes) kernel(d, i);
  for (; i < end; ++i) kernel(one, i);
}

constexpr size_t run_elements = 64, page_bytes = 4096;

// Calls visit(i) for each run of 64 elements of T, and returns the end of the last run. Four ranges of 4 KiB are read
// in turn, because prefetchers stop at the end of a page of 4 KiB. So less time is lost at the starts of pages.
template <class T, class Visit>
HWY_INLINE size_t visit_pages(size_t begin, size_t end, const Visit &visit) {
  constexpr size_t pages = 4, page_elements = page_bytes / sizeof(T);
  for (; begin + pages * page_elements <= end; begin += pages * page_elements)
    for (size_t at = 0; at < page_elements; at += run_elements)
      for (size_t page = 0; page < pages; ++page) visit(begin + page * page_elements + at);
  for (; begin + run_elements <= end; begin += run_elements) visit(begin);
  return begin;
}

// Calls the kernel as for_each_vector does, but takes four pages of fp32 side by side.
template <class Kernel>
HWY_INLINE void for_each_vector_of_pages(size_t end, const Kernel &kernel) {
  const hn::ScalableTag<float> d;
  static_assert(run_elements % hn::MaxLanes(d) == 0);
  const auto run = [&](size_t first) HWY_ATTR {
    for (size_t at = 0; at < run_elements; at += hn::Lanes(d)) kernel(d, first + at);
  };
  for_each_vector(visit_pages<float>(0, end, run), end, kernel);
}

// The number of elements before the first address that is aligned for streaming.
template <class T>
HWY_INLINE size_t misaligned_head(const T *to, size_t count) {
  const size_t beyond = reinterpret_cast<uintptr_t>(to) % 64 / sizeof(T);
  const size_t head = beyond == 0 ? 0 : 64 / sizeof(T) - beyond;
  return head < count ? head : count;
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
