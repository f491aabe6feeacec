// SPDX-License-Identifier: Apache-2.0
// MXFP8: makes both planes in one pass over the weights, in tiles of 32 rows that stay in the nearest cache. Scaling by
// a power of two changes no bit of a significand, so a number is rounded once for both planes. The codes of the planes
// differ only in the number that is subtracted from the exponent, which is done on bytes. If a tile has numbers that
// become subnormal, each plane is rounded by a multiply-add whose result has the same last place as the code. Other
// tiles (with NaN, Inf, or scales at the ends of E8M0's range) are quantized by the definition.
#include <cstring>

#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/mxfp8_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/float8_bytes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

constexpr size_t block = mxfp8_block, widest = line_bytes;

struct Tile {
  alignas(64) uint32_t values[block][widest];
  alignas(64) int32_t column_amax[widest];
  alignas(64) int32_t row_amax[widest * 16];   // [block][row]; each element is a vector until it is folded
  alignas(64) uint32_t column_lowest[widest];  // the powers of two from which numbers are normal
  alignas(64) uint32_t row_lowest[widest];
  alignas(64) uint32_t row_offsets[widest];    // 8 times the exponents of row_lowest, in each byte
  alignas(64) uint8_t column_offsets[widest];  // 8 times the exponents of column_lowest, as from low_bytes()
  alignas(64) uint8_t row_scales[widest];
  int32_t least;  // the smallest magnitude
};

// The place of a tile of `width` columns.
struct TilePlace {
  const Mxfp8Quantize &work;
  size_t row, column, width;

  HWY_INLINE size_t element(size_t r) const { return (row + r) * work.columns + column; }
  HWY_INLINE uint8_t *row_scale(size_t r, size_t b) const { return work.row_scales + element(r) / block + b; }
  HWY_INLINE uint8_t *column_scale() const { return work.column_scales + row / block * work.columns + column; }
};

template <class D>
using Ints = hn::Vec<hn::RebindToSigned<D>>;

template <class D>
HWY_INLINE Ints<D> read_vector(D d, const float *from, uint32_t *to, Ints<D> &column_amax) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  const auto bits = hn::BitCast(du, hn::LoadU(d, from));
  hn::Store(bits, du, to);
  const auto magnitude = hn::BitCast(di, hn::And(bits, hn::Set(du, fp32_magnitude)));
  column_amax = hn::Max(column_amax, magnitude);
  return magnitude;
}

// Reads four vectors of each row, starting at `column` of the tile: one or two blocks of 32, or half of a block.
template <class D>
HWY_INLINE void read_panel(D d, const TilePlace &place, Tile &tile, size_t column) {
  const hn::RebindToSigned<D> di;
  const size_t n = hn::Lanes(d);
  const bool two = n * 2 == block, second_half = column % block != 0;
  int32_t *const part = tile.row_amax + column / block * block * n;
  auto c0 = hn::Zero(di), c1 = c0, c2 = c0, c3 = c0, least = hn::Set(di, tile.least);
  for (size_t r = 0; r < block; ++r) {
    const float *const from = place.work.from + place.element(r) + column;
    uint32_t *const to = tile.values[r] + column;
    const auto m0 = read_vector(d, from, to, c0), m1 = read_vector(d, from + n, to + n, c1);
    const auto m2 = read_vector(d, from + 2 * n, to + 2 * n, c2);
    const auto m3 = read_vector(d, from + 3 * n, to + 3 * n, c3);
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

// Reduces each vector to its largest lane; the results are in the order of the vectors.
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

template <bool via_bf16>
float number(uint32_t bits) {
  const hn::CappedTag<float, 1> one;
  return via_bf16 ? hn::GetLane(round_to<BF16>(one, hn::Set(one, fp32_of(bits)))) : fp32_of(bits);
}

template <bool via_bf16>
void write_by_definition(const TilePlace &place, const Tile &tile) {
  const auto scale_of = [&](int32_t amax) {
    return mxfp8_scale(fp32_bits(number<via_bf16>(static_cast<uint32_t>(amax))), place.work.rule);
  };
  uint8_t column_scales[widest];
  for (size_t c = 0; c < place.width; ++c) column_scales[c] = scale_of(tile.column_amax[c]);
  std::memcpy(place.column_scale(), column_scales, place.width);
  for (size_t r = 0; r < block; ++r)
    for (size_t c = 0; c < place.width; ++c) {
      const uint8_t scale = scale_of(tile.row_amax[c / block * block + r]);
      const float value = number<via_bf16>(tile.values[r][c]);
      *place.row_scale(r, c / block) = scale;
      place.work.row[place.element(r) + c] = mxfp8_code(value, scale);
      place.work.column[place.element(r) + c] = mxfp8_code(value, column_scales[c]);
    }
}

#if HWY_TARGET != HWY_SCALAR

// The scales with which the fast way rounds numbers. In this range a product that becomes subnormal is less than half
// of the last place, even if the target has no fused multiply-add. With scales from 246 on, rounding could carry into
// the sign of a code.
constexpr int least_plain = 32, max_plain = 240, plain_of_zeros = 127;
// Under a scale, numbers are normal from the exponent `scale - normal_from` on. Codes are too large by 8 times that
// exponent.
constexpr int normal_from = 6;

// Makes scales from unrounded amaxes, which is allowed because rounding keeps their order. Returns the largest scale,
// or 0 if a scale is outside of the plain range.
template <ScaleRule rule, bool via_bf16, class D>
HWY_INLINE int make_scales(D d, const int32_t *amax, size_t count, uint8_t *scales, uint32_t *lowest) {
  const hn::RebindToUnsigned<D> du;
  const hn::RebindToSigned<D> di;
  auto least = hn::Set(di, max_plain), most = hn::Set(di, least_plain);
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto bits = hn::BitCast(di, rounded_from<via_bf16>(d, hn::BitCast(du, hn::Load(di, amax + i))));
    auto scale = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(di, 8));
    if constexpr (rule == ScaleRule::round_up) {
      const auto v = hn::Mul(hn::BitCast(d, bits), hn::Set(d, fp32_of(one_448th)));
      scale = hn::BitCast(di, hn::ShiftRight<23>(hn::Add(hn::BitCast(du, v), hn::Set(du, 0x7fffff))));
    }
    const auto zero = hn::Eq(bits, hn::Zero(di));
    const auto plain = hn::IfThenElse(zero, hn::Set(di, plain_of_zeros), scale);
    least = hn::Min(least, plain), most = hn::Max(most, plain);
    store_codes(d, hn::BitCast(du, hn::IfThenZeroElse(zero, scale)), scales + i);
    hn::Store(hn::ShiftLeft<23>(hn::BitCast(du, hn::Sub(plain, hn::Set(di, normal_from)))), du, lowest + i);
  }
  const int largest = hn::GetLane(hn::MaxOfLanes(di, most));
  return hn::GetLane(hn::MinOfLanes(di, least)) >= least_plain && largest <= max_plain ? largest : 0;
}

template <class D>
HWY_INLINE Four<D> load_four(D, const uint32_t *from) {
  const hn::RebindToUnsigned<D> du;
  const size_t n = hn::Lanes(du);
  return {hn::Load(du, from), hn::Load(du, from + n), hn::Load(du, from + 2 * n), hn::Load(du, from + 3 * n)};
}

// The codes of four vectors before their exponents are reduced, and their signs.
template <class D>
struct Rounded {
  // On some targets vectors are classes. A constructor that GCC makes would lack the attribute of the target.
  HWY_INLINE Rounded() {}
  HWY_INLINE Rounded(Lanes8<D> of_row, Lanes8<D> of_column, Lanes8<D> of_both)
      : row(of_row), column(of_column), signs(of_both) {}
  Lanes8<D> row, column, signs;
};

// Rounds numbers that are normal under both scales.
template <class D>
HWY_INLINE Rounded<D> round_normal(D d, const Encoder<D> &encoder, const Four<D> &bits) {
  const auto round = [&](Bits<D> number) HWY_ATTR { return encoder.round_normal(number); };
  const FourWords<D> words = pack_lanes(d, map_four(d, bits, round));
  const auto bytes = encoder.low_bytes(words);
  return {bytes, bytes, encoder.signs_of(words)};
}

template <class D>
HWY_INLINE Lanes8<D> round_magnitudes(D d, const Encoder<D> &encoder, const Four<D> &from, const Four<D> &lowest) {
  const Four<D> rounded{encoder.round_any(from.v0, lowest.v0), encoder.round_any(from.v1, lowest.v1),
                        encoder.round_any(from.v2, lowest.v2), encoder.round_any(from.v3, lowest.v3)};
  return encoder.low_bytes(pack_lanes(d, rounded));
}

template <class D>
HWY_INLINE Rounded<D> round_four(D d, const Encoder<D> &encoder, const Four<D> &bits, const Four<D> &row_lowest,
                                 const Four<D> &column_lowest) {
  const Four<D> magnitudes = map_four(d, bits, [&](Bits<D> number) HWY_ATTR { return encoder.magnitude(number); });
  return {round_magnitudes(d, encoder, magnitudes, row_lowest), round_magnitudes(d, encoder, magnitudes, column_lowest),
          encoder.signs_of(pack_lanes(d, bits))};
}

// Subtracts the offsets of the exponents, limits codes to the largest one if `saturate`, and adds the signs.
template <bool saturate, class D>
HWY_INLINE Lanes8<D> finish(D, Lanes8<D> bytes, Lanes8<D> offsets, Lanes8<D> signs) {
  const hn::Repartition<uint8_t, D> d8;
  auto codes = hn::Sub(bytes, offsets);
  if constexpr (saturate) codes = hn::Min(codes, hn::Set(d8, E4M3::Layout::largest));
  return hn::Or(codes, signs);
}

// The offsets of a row in four vectors, which are one or two blocks, or a part of a block.
template <class D>
HWY_INLINE Lanes8<D> row_offsets(D d, const Tile &tile, size_t r, size_t c) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint8_t, D> d8;
  const hn::Repartition<uint64_t, D> d64;
  const auto left = hn::Set(du, tile.row_offsets[c / block * block + r]);
  if (hn::Lanes(d) * 2 != block) return hn::BitCast(d8, left);
  const auto right = hn::Set(du, tile.row_offsets[(c / block + 1) * block + r]);
  return hn::BitCast(d8, hn::OddEven(hn::BitCast(d64, right), hn::BitCast(d64, left)));
}

// Writes four vectors of a row.
template <ScaleRule rule, bool via_bf16, bool normal, bool streaming, class D>
HWY_INLINE void write_four(D d, const TilePlace &place, const Tile &tile, size_t r, size_t c,
                           const Encoder<D> &encoder) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint8_t, D> d8;
  const auto from_bf16 = [&](Bits<D> value) HWY_ATTR { return rounded_from<via_bf16>(d, value); };
  const Four<D> bits = map_four(d, load_four(d, tile.values[r] + c), from_bf16);
  Rounded<D> rounded;
  if constexpr (normal) {
    rounded = round_normal(d, encoder, bits);
  } else {
    const auto left = hn::Set(du, tile.row_lowest[c / block * block + r]);
    const auto right = hn::Set(du, tile.row_lowest[(c + 2 * hn::Lanes(d)) / block * block + r]);
    rounded = round_four(d, encoder, bits, {left, left, right, right}, load_four(d, tile.column_lowest + c));
  }
  constexpr bool saturate = rule == ScaleRule::floor;
  const size_t element = place.element(r) + c;
  const auto row = finish<saturate>(d, rounded.row, row_offsets(d, tile, r, c), rounded.signs);
  encoder.template put<streaming>(row, place.work.row + element);
  const auto column_offsets = hn::Load(d8, tile.column_offsets + c);
  const auto column = finish<saturate>(d, rounded.column, column_offsets, rounded.signs);
  encoder.template put<streaming>(column, place.work.column + element);
}

template <ScaleRule rule, bool via_bf16, bool normal, bool streaming, class D>
HWY_INLINE void write_tile(D d, const TilePlace &place, const Tile &tile) {
  const Encoder<D> encoder(d);
  for (size_t r = 0; r < block; ++r) {
    const size_t next = place.element(r) + place.width;
    for (size_t ahead = 0; ahead < place.width; ahead += 16) prefetch_beyond(place.work.from, next + ahead);
    for (size_t c = 0; c < place.width; c += 4 * hn::Lanes(d))
      write_four<rule, via_bf16, normal, streaming>(d, place, tile, r, c, encoder);
  }
}

template <size_t width, class D>
HWY_INLINE void make_offsets(D d, Tile &tile) {
  const hn::RebindToUnsigned<D> du;
  const hn::Repartition<uint8_t, D> d8;
  const auto word = [](Bits<D> lowest) HWY_ATTR { return hn::ShiftRight<16>(lowest); };
  const Encoder<D> encoder(d);
  for (size_t c = 0; c < width; c += 4 * hn::Lanes(d)) {
    const Four<D> words = map_four(d, load_four(d, tile.column_lowest + c), word);
    hn::Store(encoder.low_bytes(pack_lanes(d, words)), d8, tile.column_offsets + c);
  }
  for (size_t r = 0; r < width; r += hn::Lanes(d)) {
    const auto byte = hn::And(hn::ShiftRight<code_at>(hn::Load(du, tile.row_lowest + r)), hn::Set(du, 0xff));
    hn::Store(hn::Mul(byte, hn::Set(du, 0x01010101)), du, tile.row_offsets + r);
  }
}

// Returns whether the tile has been quantized.
template <ScaleRule rule, bool via_bf16, bool streaming, size_t width, class D>
HWY_INLINE bool quantize_fast(D d, const TilePlace &place, Tile &tile) {
  // The largest scale of the rows is the same, unless the tile has zeros, which make its numbers subnormal codes.
  const int largest = make_scales<rule, via_bf16>(d, tile.column_amax, width, place.column_scale(), tile.column_lowest);
  if (largest == 0 || !make_scales<rule, via_bf16>(d, tile.row_amax, width, tile.row_scales, tile.row_lowest))
    return false;
  for (size_t b = 0; b < width / block; ++b)
    for (size_t r = 0; r < block; ++r) *place.row_scale(r, b) = tile.row_scales[b * block + r];
  make_offsets<width>(d, tile);
  if (tile.least >= (largest - normal_from) << 23) {
    write_tile<rule, via_bf16, true, streaming>(d, place, tile);
  } else {
    write_tile<rule, via_bf16, false, streaming>(d, place, tile);
  }
  return true;
}

#endif

template <ScaleRule rule, bool via_bf16, bool streaming, size_t width>
HWY_INLINE void quantize_tile(const TilePlace &place, Tile &tile) {
  const hn::CappedTag<float, width / 4> d;
  const hn::RebindToSigned<decltype(d)> di;
  tile.least = fp32_magnitude;
  for (size_t c = 0; c < width; c += 4 * hn::Lanes(d)) read_panel(d, place, tile, c);
  fold_vectors(di, tile.row_amax, width);
#if HWY_TARGET != HWY_SCALAR
  if (quantize_fast<rule, via_bf16, streaming, width>(d, place, tile)) return;
#endif
  write_by_definition<via_bf16>(place, tile);
}

template <ScaleRule rule, bool via_bf16, bool streaming>
void quantize_tiles(const Mxfp8Quantize &work) {
  Tile tile;
  for (size_t r = 0; r < work.rows; r += block) {
    size_t c = 0;
    for (; c + widest <= work.columns; c += widest)
      quantize_tile<rule, via_bf16, streaming, widest>({work, r, c, widest}, tile);
    for (; c < work.columns; c += block) quantize_tile<rule, via_bf16, false, block>({work, r, c, block}, tile);
  }
  if (streaming) hwy::FlushStream();
}

template <ScaleRule rule, bool via_bf16>
void quantize_rule(const Mxfp8Quantize &work) {
  if (is_streamed(work)) return quantize_tiles<rule, via_bf16, true>(work);
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
  const bool row = work.form == Mxfp8Form::row;
  std::memset(work.to, 0, work.bytes());
  for (uint64_t matrix = 0; matrix < work.matrices; ++matrix) {
    const uint8_t *const scales = work.scales + matrix * work.rows * work.columns;
    uint8_t *const to = work.to + matrix * work.matrix_bytes();
    for (uint64_t outer = 0; outer < work.outer(); ++outer)
      for (uint64_t inner = 0; inner < work.inner(); ++inner) {
        const uint64_t tile = outer / 128 * work.tiles_across() + inner / 4;
        to[tile * 512 + outer % 32 * 16 + outer % 128 / 32 * 4 + inner % 4] =
            scales[row ? outer * work.columns + inner : inner * work.columns + outer];
      }
  }
}

}  // namespace fsdp::device::kernels
#endif
