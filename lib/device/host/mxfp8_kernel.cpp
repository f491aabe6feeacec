// SPDX-License-Identifier: Apache-2.0
// MXFP8: both planes from one reading of the weights, in tiles of 32 rows that stay in the nearest cache. A power of
// two moves no bit of a significand, so a number is rounded once for both planes, and each subtracts its own exponent;
// in tiles with numbers that become subnormal, these are rounded by an addition. What this does not reach (NaN, Inf,
// scales at the ends of E8M0's range) goes by the definition, a tile at a time.
#include <array>
#include <cstring>

#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/mxfp8_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/float8_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

constexpr size_t block = mxfp8_block, widest = 64;

// Scales whose numbers the fast way rounds: an fp32 subnormal is a subnormal E4M3 or less, and the aligner is finite.
constexpr int least_plain = 7, most_plain = 240, plain_of_zeros = 127;
constexpr int code_at = E4M3::Layout::cut;  // where a code begins in fp32 bits that have its exponent
constexpr uint32_t offset_bias = 7;  // an offset is (scale - 7) << 23: what the exponents of fp32 and E4M3 differ by

struct Tile {
  alignas(64) uint32_t values[block][widest];
  alignas(64) int32_t column_amax[widest];
  alignas(64) int32_t row_amax[2 * block * 16];  // [block][row], of which each is a vector until it is folded
  alignas(64) uint32_t column_offset[widest];
  alignas(64) uint32_t row_offset[2 * block];
  alignas(64) uint8_t row_scales[2 * block];
  int32_t least;  // of the magnitudes
};

// Where a tile of `width` columns lies.
struct TilePlace {
  const Mxfp8Quantize &work;
  size_t row, column, width;

  HWY_INLINE size_t element(size_t r) const { return (row + r) * work.columns + column; }
  HWY_INLINE uint8_t *row_scale(size_t r, size_t b) const { return work.row_scales + element(r) / block + b; }
  HWY_INLINE uint8_t *column_scale() const { return work.column_scales + row / block * work.columns + column; }
};

template <bool via_bf16, class D>
HWY_INLINE Bits<D> load_bits(D d, const float *from) {
  const hn::RebindToUnsigned<D> du;
  const auto value = hn::LoadU(d, from);
  if constexpr (via_bf16) return hn::BitCast(du, round_to<BF16>(d, value));
  return hn::BitCast(du, value);
}

template <class D>
using Ints = hn::Vec<hn::RebindToSigned<D>>;

template <bool via_bf16, class D>
HWY_INLINE Ints<D> read_vector(D d, const float *from, uint32_t *to, Ints<D> &column_amax) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = load_bits<via_bf16>(d, from);
  hn::Store(bits, du, to);
  const auto magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, fp32_magnitude)));
  column_amax = hn::Max(column_amax, magnitude);
  return magnitude;
}

// Four vectors of all rows, from `column` of the tile on: one or two blocks of 32, or half of one.
template <bool via_bf16, class D>
HWY_INLINE void read_panel(D d, const TilePlace &place, Tile &tile, size_t column) {
  const hn::RebindToSigned<D> di;
  const size_t n = hn::Lanes(d);
  const bool two = n * 2 == block, second_half = column % block != 0;
  int32_t *const part = tile.row_amax + column / block * block * n;
  auto c0 = hn::Zero(di), c1 = c0, c2 = c0, c3 = c0, least = hn::Set(di, tile.least);
  for (size_t r = 0; r < block; ++r) {
    const float *const from = place.work.from + place.element(r) + column;
    uint32_t *const to = tile.values[r] + column;
    const auto m0 = read_vector<via_bf16>(d, from, to, c0), m1 = read_vector<via_bf16>(d, from + n, to + n, c1);
    const auto m2 = read_vector<via_bf16>(d, from + 2 * n, to + 2 * n, c2);
    const auto m3 = read_vector<via_bf16>(d, from + 3 * n, to + 3 * n, c3);
    const auto left = hn::Max(m0, m1), right = hn::Max(m2, m3);
    least = hn::Min(least, hn::Min(hn::Min(m0, m1), hn::Min(m2, m3)));
    if (two) {
      hn::Store(left, di, part + r * n);
      hn::Store(right, di, part + (block + r) * n);
    } else {
      const auto all = hn::Max(left, right);
      hn::Store(second_half ? hn::Max(all, hn::Load(di, part + r * n)) : all, di, part + r * n);
    }
  }
  tile.least = hn::GetLane(hn::MinOfLanes(di, least));
  hn::Store(c0, di, tile.column_amax + column);
  hn::Store(c1, di, tile.column_amax + column + n);
  hn::Store(c2, di, tile.column_amax + column + 2 * n);
  hn::Store(c3, di, tile.column_amax + column + 3 * n);
}

// Vectors to their largest lanes, in their order.
template <class DI>
HWY_INLINE void fold_vectors([[maybe_unused]] DI di, [[maybe_unused]] int32_t *vectors, [[maybe_unused]] size_t count) {
#if HWY_TARGET != HWY_SCALAR
  const size_t n = hn::Lanes(di);
  for (size_t left = n; left > 1; left /= 2) {
    count /= 2;
    for (size_t i = 0; i < count; ++i) {
      const auto a = hn::Load(di, vectors + 2 * i * n), b = hn::Load(di, vectors + (2 * i + 1) * n);
      hn::Store(hn::Max(hn::ConcatEven(di, b, a), hn::ConcatOdd(di, b, a)), di, vectors + i * n);
    }
  }
#endif
}

// The scales of `amax`. The largest of them as the offsets have it; 0 where one is not plain.
template <ScaleRule rule, class D>
HWY_INLINE int make_scales(D d, const int32_t *amax, size_t count, uint8_t *scales, uint32_t *offsets) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  auto least = hn::Set(di, most_plain), most = hn::Set(di, least_plain);
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto bits = hn::Load(di, amax + i);
    auto scale = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(di, 8));
    if constexpr (rule == ScaleRule::round_up) {
      const auto v = hn::Mul(hn::BitCast(d, bits), hn::Set(d, fp32_of(one_448th)));
      scale = hn::BitCast(di, hn::ShiftRight<23>(hn::Add(hn::BitCast(du, v), hn::Set(du, 0x7fffff))));
    }
    const auto zero = hn::Eq(bits, hn::Zero(di));
    const auto plain = hn::IfThenElse(zero, hn::Set(di, plain_of_zeros), scale);
    least = hn::Min(least, plain), most = hn::Max(most, plain);
    store_codes(d, hn::BitCast(du, hn::IfThenZeroElse(zero, scale)), scales + i);
    hn::Store(hn::ShiftLeft<23>(hn::Sub(hn::BitCast(du, plain), hn::Set(du, offset_bias))), du, offsets + i);
  }
  const int largest = hn::GetLane(hn::MaxOfLanes(di, most));
  return hn::GetLane(hn::MinOfLanes(di, least)) >= least_plain && largest <= most_plain ? largest : 0;
}

// Code bits in their place for combine(). With `normal` no number of the tile becomes subnormal.
template <ScaleRule rule, bool normal, class D>
HWY_INLINE Bits<D> scaled(D d, Bits<D> magnitude, Bits<D> rounded, Bits<D> offset) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  auto code = hn::BitCast(di, hn::Sub(rounded, offset));
  if constexpr (rule == ScaleRule::floor) code = hn::Min(code, hn::Set(di, int32_t{E4M3::Layout::largest} << code_at));
  if constexpr (!normal) {
    // A number whose last bit is the lowest subnormal, over the offset; the sum's last bits are the code.
    const auto aligner = hn::BitCast(d, hn::Add(offset, hn::Set(du, 21u << 23)));
    const auto sum = hn::BitCast(di, hn::Add(hn::BitCast(d, magnitude), aligner));
    code = hn::IfThenElse(hn::Lt(code, hn::Set(di, 1 << 23)), hn::ShiftLeft<code_at>(sum), code);
  }
  return hn::BitCast(du, code);
}

template <class D>
struct Four {
  Bits<D> v0, v1, v2, v3;
};

// A byte of each of four vectors in a lane: the codes over the signs.
template <class D>
HWY_INLINE Bits<D> combine(D, const Four<D> &codes, Bits<D> signs) {
  const hn::RebindToUnsigned<D> du;
  auto bytes = hn::OrAnd(signs, hn::ShiftRight<code_at>(codes.v0), hn::Set(du, 0x7f));
  bytes = hn::OrAnd(bytes, hn::ShiftRight<code_at - 8>(codes.v1), hn::Set(du, 0x7f00));
  bytes = hn::OrAnd(bytes, hn::ShiftRight<code_at - 16>(codes.v2), hn::Set(du, 0x7f0000));
  return hn::OrAnd(bytes, hn::ShiftLeft<24 - code_at>(codes.v3), hn::Set(du, 0x7f000000));
}

template <class D>
HWY_INLINE Bits<D> combine_signs(D, const Four<D> &bits) {
  const hn::RebindToUnsigned<D> du;
  auto bytes = hn::And(hn::ShiftRight<24>(bits.v0), hn::Set(du, 0x80));
  bytes = hn::OrAnd(bytes, hn::ShiftRight<16>(bits.v1), hn::Set(du, 0x8000));
  bytes = hn::OrAnd(bytes, hn::ShiftRight<8>(bits.v2), hn::Set(du, 0x800000));
  return hn::OrAnd(bytes, bits.v3, hn::Set(du, 0x80000000));
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

// Bytes of four vectors back into the order of the vectors: first in each 16 bytes, then whole groups of four.
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

// Four vectors of a row.
template <ScaleRule rule, bool normal, bool streaming, class D, class Order>
HWY_INLINE void write_four(D d, const TilePlace &place, const Tile &tile, size_t r, size_t c, const Order &order) {
  const hn::RebindToUnsigned<D> du;
  const size_t n = hn::Lanes(d);
  const uint32_t *const from = tile.values[r] + c, *const columns = tile.column_offset + c;
  const Four<D> bits{hn::Load(du, from), hn::Load(du, from + n), hn::Load(du, from + 2 * n),
                     hn::Load(du, from + 3 * n)};
  Four<D> row, column;
  const auto each = [&](Bits<D> value, size_t v, Bits<D> &row_code, Bits<D> &column_code) HWY_ATTR {
    const auto magnitude = hn::And(value, hn::Set(du, fp32_magnitude));
    const auto odd = hn::And(hn::ShiftRight<code_at>(magnitude), hn::Set(du, 1));
    const auto rounded = hn::Add(magnitude, hn::Add(odd, hn::Set(du, E4M3::Layout::half)));
    const auto row_offset = hn::Set(du, tile.row_offset[(c + v * n) / block * block + r]);
    row_code = scaled<rule, normal>(d, magnitude, rounded, row_offset);
    column_code = scaled<rule, normal>(d, magnitude, rounded, hn::Load(du, columns + v * n));
  };
  each(bits.v0, 0, row.v0, column.v0);
  each(bits.v1, 1, row.v1, column.v1);
  each(bits.v2, 2, row.v2, column.v2);
  each(bits.v3, 3, row.v3, column.v3);
  const auto signs = combine_signs(d, bits);
  const size_t element = place.element(r) + c;
  order.template put<streaming>(d, combine(d, row, signs), place.work.row + element);
  order.template put<streaming>(d, combine(d, column, signs), place.work.column + element);
}

template <ScaleRule rule, bool normal, bool streaming, class D>
HWY_INLINE void write_tile(D d, const TilePlace &place, const Tile &tile) {
  const InOrder order(d);
  for (size_t r = 0; r < block; ++r) {
    const float *const next = place.work.from + place.element(r) + place.width;
    for (size_t ahead = 0; ahead < place.width; ahead += 16) hwy::Prefetch(next + ahead);
    for (size_t c = 0; c < place.width; c += 4 * hn::Lanes(d))
      write_four<rule, normal, streaming>(d, place, tile, r, c, order);
  }
}

void write_by_definition(const TilePlace &place, const Tile &tile) {
  const ScaleRule rule = place.work.rule;
  uint8_t column_scales[widest];
  for (size_t c = 0; c < place.width; ++c)
    column_scales[c] = mxfp8_scale(static_cast<uint32_t>(tile.column_amax[c]), rule);
  std::memcpy(place.column_scale(), column_scales, place.width);
  for (size_t r = 0; r < block; ++r)
    for (size_t c = 0; c < place.width; ++c) {
      const uint8_t scale = mxfp8_scale(static_cast<uint32_t>(tile.row_amax[c / block * block + r]), rule);
      const float value = fp32_of(tile.values[r][c]);
      *place.row_scale(r, c / block) = scale;
      place.work.row[place.element(r) + c] = mxfp8_code(value, scale);
      place.work.column[place.element(r) + c] = mxfp8_code(value, column_scales[c]);
    }
}

template <ScaleRule rule, bool via_bf16, bool streaming, size_t width>
HWY_INLINE void quantize_tile(const TilePlace &place, Tile &tile) {
  const hn::CappedTag<float, width / 4> d;
  const hn::RebindToSigned<decltype(d)> di;
  tile.least = fp32_magnitude;
  for (size_t c = 0; c < width; c += 4 * hn::Lanes(d)) read_panel<via_bf16>(d, place, tile, c);
  fold_vectors(di, tile.row_amax, width);
  const int of_columns = make_scales<rule>(d, tile.column_amax, width, place.column_scale(), tile.column_offset);
  const int of_rows = make_scales<rule>(d, tile.row_amax, width, tile.row_scales, tile.row_offset);
  if (of_columns == 0 || of_rows == 0) return write_by_definition(place, tile);
  for (size_t b = 0; b < width / block; ++b)
    for (size_t r = 0; r < block; ++r) *place.row_scale(r, b) = tile.row_scales[b * block + r];
  const int largest = of_rows > of_columns ? of_rows : of_columns;
  const bool normal = tile.least >= (largest - 6) << 23;  // 2^-6 of the largest scale
  if (normal) return write_tile<rule, true, streaming>(d, place, tile);
  write_tile<rule, false, streaming>(d, place, tile);
}

template <ScaleRule rule, bool via_bf16, bool streaming>
void quantize_tiles(const Mxfp8Quantize &work) {
  Tile tile;
  for (size_t r = 0; r < work.rows; r += block) {
    size_t c = 0;
    for (; c + widest <= work.columns; c += widest)
      quantize_tile<rule, via_bf16, streaming, widest>({work, r, c, widest}, tile);
    if (c < work.columns) quantize_tile<rule, via_bf16, streaming, block>({work, r, c, block}, tile);
  }
  if (streaming) hwy::FlushStream();
}

template <ScaleRule rule, bool via_bf16>
void quantize_rule(const Mxfp8Quantize &work) {
  const auto misfit = (reinterpret_cast<uintptr_t>(work.row) | reinterpret_cast<uintptr_t>(work.column)) % widest;
  const bool whole_lines = misfit == 0 && work.columns % widest == 0;
  if (whole_lines && work.rows * work.columns >= streaming_bytes) return quantize_tiles<rule, via_bf16, true>(work);
  quantize_tiles<rule, via_bf16, false>(work);
}

void quantize_any(const Mxfp8Quantize &work) {
  if (work.rule == ScaleRule::floor)
    return work.via_bf16 ? quantize_rule<ScaleRule::floor, true>(work) : quantize_rule<ScaleRule::floor, false>(work);
  work.via_bf16 ? quantize_rule<ScaleRule::round_up, true>(work) : quantize_rule<ScaleRule::round_up, false>(work);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(quantize_any);

void quantize_mxfp8(const Mxfp8Quantize &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(quantize_any)(work);
}

uint64_t count_nonfinite_scales(const uint8_t *scales, uint64_t count) {
  uint64_t found = 0;
  for (uint64_t i = 0; i < count; ++i) found += scales[i] >= E8M0::largest;
  return found;
}

void swizzle_scales(const Mxfp8Swizzle &work) {
  for (uint64_t i = 0; i < work.bytes(); ++i) work.to[i] = swizzled_scale(work, i);
}

}  // namespace fsdp::device::kernels
#endif
