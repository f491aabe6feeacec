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

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// Rounds to the nearest bf16. Not valid for NaN.
template <bool via_bf16, class D>
HWY_INLINE Bits<D> rounded_from(D, Bits<D> bits) {
  if constexpr (!via_bf16) return bits;
  const D d;
  return hn::BitCast(hn::RebindToUnsigned<D>(), BF16::round_numbers(d, hn::BitCast(d, bits)));
}

// Prefetches the cache line of an index that may be past the end of the array.
HWY_INLINE void prefetch_beyond(const float *from, size_t numbers) {
  hwy::Prefetch(reinterpret_cast<const float *>(reinterpret_cast<uintptr_t>(from) + numbers * sizeof(float)));
}

// With one lane, the kernels quantize by the definition.
#if HWY_TARGET != HWY_SCALAR

constexpr int code_at = E4M3::Layout::cut;  // lowest bit of a code in fp32 bits that have its exponent

template <class D>
struct Four {
  Bits<D> v0, v1, v2, v3;
};

template <class D, class Each>
HWY_INLINE Four<D> map_four(D, const Four<D> &from, const Each &each) {
  return {each(from.v0), each(from.v1), each(from.v2), each(from.v3)};
}

// Vectors of D's size whose lanes are 16 or 8 bits.
template <class D>
using Lanes16 = hn::Vec<hn::Repartition<int16_t, D>>;
template <class D>
using Lanes8 = hn::Vec<hn::Repartition<uint8_t, D>>;

// Words made of the lanes of four vectors. Within each 16 bytes there are words of four numbers of one vector, then of
// four numbers of the next vector. Bytes that are made of the words have the same order.
template <class D>
struct FourWords {
  Lanes16<D> low, high;
};

// Makes words of signed lanes, limited to the range of words.
template <class D>
HWY_INLINE FourWords<D> pack_lanes(D, const Four<D> &lanes) {
  const hn::RebindToSigned<D> di;
  const hn::Repartition<int16_t, D> d16;
  return {hn::ReorderDemote2To(d16, hn::BitCast(di, lanes.v0), hn::BitCast(di, lanes.v1)),
          hn::ReorderDemote2To(d16, hn::BitCast(di, lanes.v2), hn::BitCast(di, lanes.v3))};
}

// Make signed or unsigned bytes of signed words, limited to the range of bytes.
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
HWY_INLINE hn::Vec128<int8_t> pack_signed(hn::Vec128<int16_t> a, hn::Vec128<int16_t> b) {
  return hn::Vec128<int8_t>{_mm_packs_epi16(a.raw, b.raw)};
}
HWY_INLINE hn::Vec128<uint8_t> pack_unsigned(hn::Vec128<int16_t> a, hn::Vec128<int16_t> b) {
  return hn::Vec128<uint8_t>{_mm_packus_epi16(a.raw, b.raw)};
}
#if HWY_TARGET <= HWY_AVX2
HWY_INLINE hn::Vec256<int8_t> pack_signed(hn::Vec256<int16_t> a, hn::Vec256<int16_t> b) {
  return hn::Vec256<int8_t>{_mm256_packs_epi16(a.raw, b.raw)};
}
HWY_INLINE hn::Vec256<uint8_t> pack_unsigned(hn::Vec256<int16_t> a, hn::Vec256<int16_t> b) {
  return hn::Vec256<uint8_t>{_mm256_packus_epi16(a.raw, b.raw)};
}
#endif
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE hn::Vec512<int8_t> pack_signed(hn::Vec512<int16_t> a, hn::Vec512<int16_t> b) {
  return hn::Vec512<int8_t>{_mm512_packs_epi16(a.raw, b.raw)};
}
HWY_INLINE hn::Vec512<uint8_t> pack_unsigned(hn::Vec512<int16_t> a, hn::Vec512<int16_t> b) {
  return hn::Vec512<uint8_t>{_mm512_packus_epi16(a.raw, b.raw)};
}
#endif
#else
template <class Byte, class V>
HWY_INLINE auto pack_words(V a, V b) {
  const hn::Repartition<Byte, hn::DFromV<V>> d8;
  const hn::Half<decltype(d8)> half;
  return hn::Combine(d8, hn::DemoteTo(half, b), hn::DemoteTo(half, a));
}
template <class V>
HWY_INLINE auto pack_signed(V a, V b) {
  return pack_words<int8_t>(a, b);
}
template <class V>
HWY_INLINE auto pack_unsigned(V a, V b) {
  return pack_words<uint8_t>(a, b);
}
#endif

// A constant that is made once. The compiler would otherwise make constants in every loop that has too few registers.
HWY_INLINE uint32_t made_once(uint32_t constant) {
  __asm__("" : "+r"(constant));
  return constant;
}

// Makes the codes of four vectors. Words and bytes have groups of four numbers in the order of pack_lanes, until put()
// restores the order of the numbers.
template <class D>
class Encoder {
 public:
  explicit HWY_INLINE Encoder(D)
      : magnitude_(hn::Set(du(), made_once(fp32_magnitude))),
        infinity_(hn::Set(du(), made_once(fp32_infinity))),
        part_(hn::BitCast(D(), hn::Set(du(), made_once(fp32_bits(0x1p-20F))))),
        sixteen_and_one_(hn::Set(du(), made_once(0x10010))),
        low_byte_(hn::BitCast(Signed(), hn::Set(du(), made_once(0xff00ff)))),
        sign_(hn::BitCast(Byte(), hn::Set(du(), made_once(0x80808080)))),
        groups_(hn::SetTableIndices(du(), group_indices())) {}

  HWY_INLINE Bits<D> magnitude(Bits<D> number) const { return hn::And(number, magnitude_); }

  // Rounds magnitudes. The power is the one below the magnitude, or the lowest power whose codes are normal.
  HWY_INLINE Bits<D> round_any(Bits<D> magnitude, Bits<D> lowest) const {
    const hn::RebindToSigned<D> di;
    const auto power = hn::BitCast(di, hn::And(magnitude, infinity_));
    return round_to_power(magnitude, hn::BitCast(du(), hn::Max(power, hn::BitCast(di, lowest))));
  }

  // Rounds numbers, with signs, that are above the lowest power.
  HWY_INLINE Bits<D> round_normal(Bits<D> number) const {
    return round_to_power(number, hn::AndNot(hn::Xor(magnitude_, infinity_), number));
  }

  // The signs of words, as signs of codes.
  HWY_INLINE Lanes8<D> signs_of(const FourWords<D> &words) const {
    return hn::And(hn::BitCast(Byte(), pack_signed(words.low, words.high)), sign_);
  }

  // The low bytes of words that are 16 times a code.
  HWY_INLINE Lanes8<D> low_bytes(const FourWords<D> &words) const {
    const auto byte = [&](Lanes16<D> word) HWY_ATTR { return hn::And(hn::ShiftRight<4>(word), low_byte_); };
    return pack_unsigned(byte(words.low), byte(words.high));
  }

  template <bool streaming>
  HWY_INLINE void put(Lanes8<D> codes, uint8_t *to) const {
    if constexpr (hn::MaxLanes(D()) > 4)
      codes = hn::BitCast(Byte(), hn::TableLookupLanes(hn::BitCast(du(), codes), groups_));
    store_lanes<streaming>(Byte(), codes, to);
  }

 private:
  using Byte = hn::Repartition<uint8_t, D>;
  using Signed = hn::Repartition<int16_t, D>;

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

  // Adds a part of each number to a power of two. The last place of the sum is the last place of the code: the sum's
  // low bits count eighths of the power, rounded to the nearest, ties to even. Returns 16 times the code, whose
  // exponent is not yet reduced, in the low 16 bits; the sign of the power becomes the sign of the 32 bits.
  HWY_INLINE Bits<D> round_to_power(Bits<D> number, Bits<D> power) const {
    const D d;
    const hn::RebindToSigned<D> di;
    const auto sum = hn::BitCast(di, hn::MulAdd(hn::BitCast(d, number), part_, hn::BitCast(d, power)));
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
    auto unused = hn::Zero(di);
    return hn::BitCast(du(), hn::ReorderWidenMulAccumulate(di, hn::BitCast(Signed(), sum),
                                                           hn::BitCast(Signed(), sixteen_and_one_), unused, unused));
#else
    const auto eighths = hn::And(hn::ShiftLeft<4>(sum), hn::Set(di, 0xffff));
    return hn::BitCast(du(), hn::Add(hn::ShiftRight<16>(sum), eighths));
#endif
  }

  Bits<D> magnitude_, infinity_;
  hn::Vec<D> part_;
  Bits<D> sixteen_and_one_;
  Lanes16<D> low_byte_;
  Lanes8<D> sign_;
  decltype(hn::SetTableIndices(hn::RebindToUnsigned<D>(), static_cast<const int32_t *>(nullptr))) groups_;
};

#endif

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
