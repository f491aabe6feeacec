// SPDX-License-Identifier: Apache-2.0
// FP8 with one fp32 scale, for a whole tensor or for blocks of 128 x 128.
#include <algorithm>

#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/fp8_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/float8_bytes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

template <bool via_bf16, class D>
HWY_INLINE hn::Vec<D> load_number(D d, const float *from) {
  const auto value = hn::LoadU(d, from);
  if constexpr (via_bf16) return round_to<BF16>(d, value);
  return value;
}

// Magnitudes are compared as integers, so that NaN is the largest on every processor.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D>> load_magnitude(D d, const float *from) {
  const hn::RebindToSigned<D> di;
  return hn::And(hn::BitCast(di, hn::LoadU(d, from)), hn::Set(di, int32_t{fp32_magnitude}));
}

// Finds the largest magnitude of rows of numbers. It is rounded once at the end, because rounding keeps the order.
class Amax {
 public:
  HWY_INLINE Amax() : first_(hn::Zero(D())), second_(hn::Zero(D())) {}
  HWY_INLINE void add_64(const float *values) {
    const hn::CappedTag<float, 16> d;
    const size_t n = hn::Lanes(d);
    for (size_t i = 0; i < 64; i += 2 * n) {
      first_ = hn::Max(first_, load_magnitude(d, values + i));
      second_ = hn::Max(second_, load_magnitude(d, values + i + n));
    }
  }
  HWY_INLINE void add_one(const float *value) {
    const hn::CappedTag<float, 1> one;
    rest_ = std::max(rest_, hn::GetLane(load_magnitude(one, value)));
  }
  HWY_INLINE float found(bool via_bf16) const {
    const hn::CappedTag<float, 1> one;
    const int32_t most = std::max(rest_, hn::GetLane(hn::MaxOfLanes(D(), hn::Max(first_, second_))));
    const float amax = fp32_of(static_cast<uint32_t>(most));
    return via_bf16 ? hn::GetLane(load_number<true>(one, &amax)) : amax;
  }

 private:
  using D = hn::RebindToSigned<hn::CappedTag<float, 16>>;
  hn::Vec<D> first_, second_;
  int32_t rest_ = 0;
};

float find_amax_of(const float *values, size_t count, bool via_bf16) {
  Amax amax;
  const size_t done = visit_pages<float>(0, count, [&](size_t i) HWY_ATTR { amax.add_64(values + i); });
  for (size_t i = done; i < count; ++i) amax.add_one(values + i);
  return amax.found(via_bf16);
}

// The code has the sign of the number, because a product that is NaN need not keep the sign.
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

#if HWY_TARGET == HWY_SCALAR

template <bool via_bf16, class D>
struct QuantizeFour {
  static constexpr size_t numbers = 1;
  explicit HWY_INLINE QuantizeFour(const QuantizeFp8<via_bf16> &one) : one_(one) {}
  template <bool checked, bool streaming>
  HWY_INLINE void four(size_t i) const {
    one_(D(), i);
  }
  QuantizeFp8<via_bf16> one_;
};

#else

// Quantizes four vectors of numbers at a time.
template <bool via_bf16, class D>
class QuantizeFour {
 public:
  static constexpr size_t numbers = 4 * hn::MaxLanes(D());

  explicit HWY_INLINE QuantizeFour(const QuantizeFp8<via_bf16> &one)
      : one_(one),
        encoder_(D()),
        scale_(hn::Set(D(), one.scale)),
        lowest_(hn::Set(du(), made_once(E4M3::Layout::lowest))),
        offset_(hn::BitCast(d16(), hn::Set(du(), made_once((E4M3::Layout::lowest >> 16) * 0x10001)))),
        largest_(hn::BitCast(d8(), hn::Set(du(), made_once(E4M3::Layout::largest * 0x1010101)))) {}

  // If `checked`, vectors with NaN are quantized one number at a time; otherwise there must be none, and the scale must
  // be finite.
  template <bool checked, bool streaming>
  HWY_INLINE void four(size_t i) const {
    const size_t n = hn::Lanes(D());
    const Four<D> bits{number<checked>(i), number<checked>(i + n), number<checked>(i + 2 * n),
                       number<checked>(i + 3 * n)};
    const auto scaled = [&](Bits<D> from) HWY_ATTR {
      return encoder_.magnitude(hn::BitCast(du(), hn::Mul(hn::BitCast(D(), from), scale_)));
    };
    const Four<D> magnitudes = map_four(D(), bits, scaled);
    if (checked && has_nan(magnitudes)) return quantize_each(one_, i, i + 4 * n);
    const auto codes = hn::Or(codes_of(magnitudes), encoder_.signs_of(pack_lanes(D(), bits)));
    encoder_.template put<streaming>(codes, one_.codes + i);
  }

 private:
  static HWY_INLINE hn::RebindToUnsigned<D> du() { return {}; }
  static HWY_INLINE hn::RebindToSigned<D> di() { return {}; }
  static HWY_INLINE hn::Repartition<int16_t, D> d16() { return {}; }
  static HWY_INLINE hn::Repartition<uint8_t, D> d8() { return {}; }

  template <bool checked>
  HWY_INLINE Bits<D> number(size_t i) const {
    if constexpr (checked) return hn::BitCast(du(), load_number<via_bf16>(D(), one_.from + i));
    return rounded_from<via_bf16>(D(), hn::BitCast(du(), hn::LoadU(D(), one_.from + i)));
  }

  static HWY_INLINE bool has_nan(const Four<D> &magnitudes) {
    const auto larger = [](Bits<D> a, Bits<D> b)
                            HWY_ATTR { return hn::Max(hn::BitCast(di(), a), hn::BitCast(di(), b)); };
    const auto largest = hn::Max(larger(magnitudes.v0, magnitudes.v1), larger(magnitudes.v2, magnitudes.v3));
    return !hn::AllFalse(di(), hn::Gt(largest, hn::Set(di(), int32_t{fp32_infinity})));
  }

  // Not inlined, so that the constants of the other vectors stay in registers.
  static HWY_NOINLINE void quantize_each(QuantizeFp8<via_bf16> one, size_t begin, size_t end) {
    for_each_vector(begin, end, one);
  }

  // Makes codes of magnitudes, which may be Inf but not NaN.
  HWY_INLINE Lanes8<D> codes_of(const Four<D> &magnitudes) const {
    const auto round = [&](Bits<D> magnitude) HWY_ATTR { return encoder_.round_any(magnitude, lowest_); };
    const FourWords<D> words = pack_lanes(D(), map_four(D(), magnitudes, round));
    const auto low = hn::ShiftRight<4>(hn::Sub(words.low, offset_));
    const auto high = hn::ShiftRight<4>(hn::Sub(words.high, offset_));
    return hn::Min(pack_unsigned(low, high), largest_);
  }

  QuantizeFp8<via_bf16> one_;
  Encoder<D> encoder_;
  hn::Vec<D> scale_;
  Bits<D> lowest_;
  Lanes16<D> offset_;
  Lanes8<D> largest_;
};

#endif

template <bool checked, bool streaming, class Fours>
HWY_INLINE void quantize_64(const Fours &fours, size_t i) {
  for (size_t at = 0; at < 64; at += Fours::numbers) fours.template four<checked, streaming>(i + at);
}

template <bool via_bf16, bool streaming>
void quantize_span(const QuantizeFp8<via_bf16> &one, size_t count) {
  const QuantizeFour<via_bf16, hn::CappedTag<float, 16>> fours(one);
  const size_t head = misaligned_head(one.codes, count);
  for_each_vector(0, head, one);
  const auto visit = [&](size_t i) HWY_ATTR { quantize_64<true, streaming>(fours, i); };
  for_each_vector(visit_pages<float>(head, count, visit), count, one);
  if (streaming) hwy::FlushStream();
}

template <bool via_bf16>
void quantize_as(const Fp8Quantize &work) {
  const QuantizeFp8<via_bf16> one{work.from, work.codes, *work.scale};
  if (is_streamed(work)) return quantize_span<via_bf16, true>(one, work.count);
  quantize_span<via_bf16, false>(one, work.count);
}

void quantize_all(const Fp8Quantize &work) { work.via_bf16 ? quantize_as<true>(work) : quantize_as<false>(work); }

struct Fp8Block {
  size_t row, column, end_row, width;
};

HWY_INLINE float block_amax(const Fp8BlockQuantize &work, const Fp8Block &block) {
  Amax amax;
  for (size_t r = block.row; r < block.end_row; ++r) {
    const float *const from = work.from + r * work.columns + block.column;
    size_t c = 0;
    for (; c + 64 <= block.width; c += 64) amax.add_64(from + c);
    for (; c < block.width; ++c) amax.add_one(from + c);
  }
  return amax.found(work.via_bf16);
}

// Each row also prefetches the numbers that follow it, which usually belong to the next block.
template <bool checked, bool streaming, bool via_bf16>
HWY_INLINE void write_block(const Fp8BlockQuantize &work, const Fp8Block &block, const QuantizeFp8<via_bf16> &one) {
  const QuantizeFour<via_bf16, hn::CappedTag<float, 16>> fours(one);
  for (size_t r = block.row; r < block.end_row; ++r) {
    size_t c = r * work.columns + block.column;
    const size_t end = c + block.width;
    for (size_t ahead = 0; ahead < block.width; ahead += 16) prefetch_beyond(work.from, end + ahead);
    for (; c + 64 <= end; c += 64) quantize_64<checked, streaming>(fours, c);
    for_each_vector(c, end, one);
  }
}

template <bool via_bf16, bool streaming>
HWY_INLINE void quantize_block(const Fp8BlockQuantize &work, size_t row, size_t column) {
  const size_t end_row = row + fp8_block < work.rows ? row + fp8_block : work.rows;
  const size_t width = column + fp8_block < work.columns ? fp8_block : work.columns - column;
  const Fp8Block block{row, column, end_row, width};
  const float amax = block_amax(work, block), scale = fp8_scale(amax, work.power_of_two);
  work.scale_inv[row / fp8_block * fp8_blocks(work.columns) + column / fp8_block] = 1 / scale;
  const QuantizeFp8<via_bf16> one{work.from, work.codes, scale};
  if (fp32_bits(amax) > fp32_infinity) return write_block<true, streaming>(work, block, one);
  write_block<false, streaming>(work, block, one);
}

template <bool via_bf16, bool streaming>
void quantize_blocks_by(const Fp8BlockQuantize &work) {
  for (size_t r = 0; r < work.rows; r += fp8_block)
    for (size_t c = 0; c < work.columns; c += fp8_block) quantize_block<via_bf16, streaming>(work, r, c);
  if (streaming) hwy::FlushStream();
}

template <bool via_bf16>
void quantize_blocks_of(const Fp8BlockQuantize &work) {
  if (is_streamed(work)) return quantize_blocks_by<via_bf16, true>(work);
  quantize_blocks_by<via_bf16, false>(work);
}

void quantize_blocks(const Fp8BlockQuantize &work) {
  work.via_bf16 ? quantize_blocks_of<true>(work) : quantize_blocks_of<false>(work);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(find_amax_of);
HWY_EXPORT(quantize_all);
HWY_EXPORT(quantize_blocks);

float find_amax(const float *values, uint64_t count, bool via_bf16) {
  const FloatEnvironment standard;
  const uint32_t bits = fp32_bits(HWY_DYNAMIC_DISPATCH(find_amax_of)(values, count, via_bf16));
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

uint64_t count_nonfinite_blocks(const Fp8BlockQuantize &work) {
  uint64_t found = 0;
  for (uint64_t r = 0; r < work.rows; ++r)
    for (uint64_t c = 0; c < work.columns; c += fp8_block) {
      if (work.scale_inv[r / fp8_block * fp8_blocks(work.columns) + c / fp8_block] != 1) continue;
      const uint64_t width = c + fp8_block < work.columns ? fp8_block : work.columns - c;
      found += count_nonfinite(work.from + r * work.columns + c, width);
    }
  return found;
}

}  // namespace fsdp::device::kernels
#endif
