// SPDX-License-Identifier: Apache-2.0
// Included once per SIMD target by the kernels that quantize. Makes the E4M3 codes of four vectors of fp32 at a time;
// the codes are one vector of bytes.
#include "device/host/float8_simd-inl.h"
// (The guard below flips with each target; see hwy/foreach_target.h.)
#if defined(FSDP_DEVICE_HOST_FLOAT8_BYTES_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FSDP_DEVICE_HOST_FLOAT8_BYTES_INL_H
#undef FSDP_DEVICE_HOST_FLOAT8_BYTES_INL_H
#else
#define FSDP_DEVICE_HOST_FLOAT8_BYTES_INL_H
#endif

#include <array>
#include <cstring>
#include <type_traits>

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

constexpr int code_at = E4M3::Layout::cut;  // lowest bit of a code in fp32 bits that have its exponent

template <class D>
struct Four {
  Bits<D> v0, v1, v2, v3;
};

template <class D, class Each>
HWY_INLINE Four<D> map_four(D, const Four<D> &from, const Each &each) {
  return {each(from.v0), each(from.v1), each(from.v2), each(from.v3)};
}

// Combines one byte of each of four vectors in one lane. The byte begins at bit `begin` of the vectors' lanes, and
// `mask` selects its bits.
template <int begin, uint32_t mask, class D>
HWY_INLINE Bits<D> combine(D, const Four<D> &bits) {
  const hn::RebindToUnsigned<D> du;
  const auto moved = [](Bits<D> from, auto by) HWY_ATTR {
    if constexpr (by < 0) return hn::ShiftLeft<-by>(from);
    if constexpr (by > 0) return hn::ShiftRight<by>(from);
    if constexpr (by == 0) return from;
  };
  const auto at = [&](Bits<D> from, auto byte)
                      HWY_ATTR { return moved(from, std::integral_constant<int, begin - 8 * byte>()); };
  auto bytes = hn::And(at(bits.v0, std::integral_constant<int, 0>()), hn::Set(du, mask));
  bytes = hn::OrAnd(bytes, at(bits.v1, std::integral_constant<int, 1>()), hn::Set(du, mask << 8));
  bytes = hn::OrAnd(bytes, at(bits.v2, std::integral_constant<int, 2>()), hn::Set(du, mask << 16));
  return hn::OrAnd(bytes, at(bits.v3, std::integral_constant<int, 3>()), hn::Set(du, mask << 24));
}

#if HWY_TARGET == HWY_SCALAR

template <class D>
struct InOrder {
  explicit InOrder(D) {}
  template <bool streaming>
  void put(D, Bits<D> bytes, uint8_t *to) const {
    const uint32_t four = hn::GetLane(bytes);
    std::memcpy(to, &four, sizeof four);
  }
};

#else

// Restores the order of the bytes of four vectors: first within each 16 bytes, then in whole groups of four.
template <class D>
class InOrder {
 public:
  explicit HWY_INLINE InOrder(D) : groups_(hn::SetTableIndices(du(), group_indices())) {}
  template <bool streaming>
  HWY_INLINE void put(D, Bits<D> bytes, uint8_t *to) const {
    const hn::Repartition<uint8_t, D> d8;
    alignas(16) static constexpr uint8_t transposed[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const auto grouped = hn::TableLookupBytes(hn::BitCast(d8, bytes), hn::LoadDup128(d8, transposed));
    store_lanes<streaming>(d8, hn::BitCast(d8, hn::TableLookupLanes(hn::BitCast(du(), grouped), groups_)), to);
  }

 private:
  static HWY_INLINE hn::RebindToUnsigned<D> du() { return {}; }
  static HWY_INLINE const int32_t *group_indices() {
    static const auto indices = [] {
      std::array<int32_t, hn::MaxLanes(D())> made{};
      const size_t n = hn::Lanes(D());
      for (size_t i = 0; i < n; ++i) made[i % 4 * (n / 4) + i / 4] = static_cast<int32_t>(i);
      return made;
    }();
    return indices.data();
  }
  decltype(hn::SetTableIndices(hn::RebindToUnsigned<D>(), static_cast<const int32_t *>(nullptr))) groups_;
};

#endif

// Rounds any numbers. A part of the number is added to the power of two below the number, or to the lowest power whose
// codes are normal. The part makes the last place of the sum the last place of the code. It counts eighths and rounds
// to the nearest, ties to even.
template <class D>
HWY_INLINE Bits<D> round_any(D d, Bits<D> bits, Bits<D> lowest) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto magnitude = hn::BitCast(d, hn::And(bits, hn::Set(du, fp32_magnitude)));
  const auto power = hn::BitCast(di, hn::And(bits, hn::Set(du, fp32_infinity)));
  const auto sum = hn::BitCast(
      du, hn::MulAdd(magnitude, hn::Set(d, 0x1p-20F), hn::BitCast(d, hn::Max(power, hn::BitCast(di, lowest)))));
  return hn::Add(sum, hn::ShiftRight<code_at>(sum));
}

// Makes codes from bytes: subtracts the offsets of their exponents, limits them to the largest code if `saturate`, and
// adds the signs.
template <bool saturate, class D>
HWY_INLINE Bits<D> finish(D, Bits<D> bytes, Bits<D> offsets, Bits<D> signs) {
  const hn::RebindToUnsigned<D> du;
#if HWY_TARGET == HWY_SCALAR
  uint32_t codes = 0;
  for (int at = 0; at < 32; at += 8) {
    const uint32_t code = ((hn::GetLane(bytes) >> at) - (hn::GetLane(offsets) >> at)) & 0xff;
    codes |= (saturate && code > E4M3::Layout::largest ? E4M3::Layout::largest : code) << at;
  }
  return hn::Or(hn::Set(du, codes), signs);
#else
  const hn::Repartition<uint8_t, D> d8;
  auto codes = hn::Sub(hn::BitCast(d8, bytes), hn::BitCast(d8, offsets));
  if constexpr (saturate) codes = hn::Min(codes, hn::Set(d8, E4M3::Layout::largest));
  return hn::Or(hn::BitCast(du, codes), signs);
#endif
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
