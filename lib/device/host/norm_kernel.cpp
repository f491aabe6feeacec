// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <cstring>

#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/norm_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

constexpr size_t sums = norm_sums;  // partial sums of a piece, for any width of vectors

#if HWY_HAVE_SCALABLE || !HWY_HAVE_FLOAT64

// Plain numbers, because vectors without a fixed size cannot be in an array.
struct PartialSums {
  double lane[sums] = {};
  HWY_INLINE void add(const float *values) {
    for (size_t j = 0; j < sums; ++j) lane[j] += static_cast<double>(values[j]) * static_cast<double>(values[j]);
  }
  HWY_INLINE void get(double *to) const { std::memcpy(to, lane, sizeof lane); }
};

#else

struct PartialSums {
  using D = hn::CappedTag<double, 8>;
  static constexpr size_t lanes = hn::MaxLanes(D());
  hn::Vec<D> vector[sums / lanes];

  HWY_INLINE PartialSums() {
    for (auto &v : vector) v = hn::Zero(D());
  }
  HWY_INLINE void add(const float *values) {
    const hn::Rebind<float, D> narrow;
    for (size_t j = 0; j < sums / lanes; ++j) {
      const auto x = hn::PromoteTo(D(), hn::LoadU(narrow, values + j * lanes));
      vector[j] = hn::Add(vector[j], hn::Mul(x, x));
    }
  }
  HWY_INLINE void get(double *to) const {
    for (size_t j = 0; j < sums / lanes; ++j) hn::StoreU(vector[j], D(), to + j * lanes);
  }
};

#endif

HWY_INLINE double fold(double *lane) {
  for (size_t half = sums / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

// A reader returns up to norm_piece of the numbers at a time, as fp32.
struct PlainReader {
  const float *values;
  HWY_INLINE const float *get(size_t first, size_t) { return values + first; }
};

struct CompactReader {
  const CompactSquaresSpan &span;
  float piece[norm_piece];

  const float *get(size_t first, size_t count) {
    if (span.rest)
      for (size_t i = 0; i < count; ++i)
        piece[i] = std::bit_cast<float>(join_weight(span.values[first + i], span.rest[first + i]));
    else
      cast(piece, FSDP_FLOAT32, span.values + first, span.dtype, count);
    return piece;
  }
};

// Missing elements count as zeros, which do not change a sum of squares.
HWY_INLINE void add_numbers(PartialSums &partial, const float *values, size_t count) {
  size_t i = 0;
  for (; i + sums <= count; i += sums) partial.add(values + i);
  if (i == count) return;
  float last[sums] = {};
  std::memcpy(last, values + i, (count - i) * sizeof(float));
  partial.add(last);
}

template <class Numbers>
HWY_INLINE double sum_piece(Numbers &numbers, size_t first, size_t count) {
  PartialSums partial;
  for (size_t i = 0; i < count; i += norm_piece) {
    const size_t some = norm_piece < count - i ? norm_piece : count - i;
    add_numbers(partial, numbers.get(first + i, some), some);
  }
  double lane[sums];
  partial.get(lane);
  return fold(lane);
}

template <class Numbers>
HWY_INLINE double sum_all_granules(Numbers &numbers, size_t count, size_t granule) {
  if (granule == 1) return sum_piece(numbers, 0, count);  // every element is a piece
  double lane[sums] = {};
  size_t pieces = 0;
  for (size_t begin = 0; begin < count; begin += granule) {
    const size_t end = granule < count - begin ? begin + granule : count;
    for (size_t i = begin; i < end; i += norm_piece)
      lane[pieces++ % sums] += sum_piece(numbers, i, norm_piece < end - i ? norm_piece : end - i);
  }
  return fold(lane);
}

double sum_granules(const float *values, size_t count, size_t granule) {
  PlainReader numbers{values};
  return sum_all_granules(numbers, count, granule);
}

double sum_compact_granules(const CompactSquaresSpan &span, size_t granule) {
  CompactReader numbers{span, {}};
  return sum_all_granules(numbers, span.count, granule);
}

// For each lane: -1 if the number counts, else 0.
struct Nonfinite {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D di, hn::Vec<D> bits) const {
    const auto exponent = hn::Set(di, 0x7f800000);
    return hn::VecFromMask(di, hn::Eq(hn::And(bits, exponent), exponent));
  }
};
struct Zero {
  template <class D>
  HWY_INLINE hn::Vec<D> operator()(D di, hn::Vec<D> bits) const {
    return hn::VecFromMask(di, hn::Eq(hn::And(bits, hn::Set(di, 0x7fffffff)), hn::Zero(di)));
  }
};

template <class D>
HWY_INLINE hn::Vec<D> load_bits(D di, const float *values) {
  return hn::BitCast(di, hn::LoadU(hn::Rebind<float, D>(), values));
}

template <class Counts>
HWY_INLINE size_t count_values(Counts counts, const float *values, size_t count) {
  const hn::ScalableTag<int32_t> di;
  const hn::CappedTag<int32_t, 1> one;
  const size_t lanes = hn::Lanes(di);
  constexpr size_t vectors = size_t{1} << 16;  // limit of a block, so that the counters do not overflow
  size_t found = 0, i = 0;
  while (i + lanes <= count) {
    const size_t whole = (count - i) / lanes;
    const size_t end = i + (whole < vectors ? whole : vectors) * lanes;
    auto counters = hn::Zero(di);
    for (; i < end; i += lanes) counters = hn::Sub(counters, counts(di, load_bits(di, values + i)));
    found += static_cast<size_t>(hn::GetLane(hn::SumOfLanes(di, counters)));
  }
  for (; i < count; ++i) found += hn::GetLane(counts(one, load_bits(one, values + i))) != 0;
  return found;
}

size_t count_nonfinite_values(const float *values, size_t count) { return count_values(Nonfinite(), values, count); }
size_t count_zero_values(const float *values, size_t count) { return count_values(Zero(), values, count); }

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(sum_granules);
HWY_EXPORT(sum_compact_granules);
HWY_EXPORT(count_nonfinite_values);
HWY_EXPORT(count_zero_values);

double sum_squares(const float *values, uint64_t count, uint64_t granule) {
  const FloatEnvironment standard;
  return HWY_DYNAMIC_DISPATCH(sum_granules)(values, count, granule ? granule : count);
}

double sum_compact_squares(const CompactSquaresSpan &span) {
  const FloatEnvironment standard;
  return HWY_DYNAMIC_DISPATCH(sum_compact_granules)(span, span.granule ? span.granule : span.count);
}

double sum_values(const double *values, uint64_t count) {
  const FloatEnvironment standard;
  double sum = 0;
  for (uint64_t i = 0; i < count; ++i) sum += values[i];
  return sum;
}

Norm find_norm(const NormShares &shares) {
  const FloatEnvironment standard;
  Norm norm{0, 0, 1};
  for (uint32_t s = 0; s < shares.slots; ++s)
    norm.squares += shares.shares[s % shares.slices * shares.inner + s / shares.slices];
  norm.norm = std::sqrt(norm.squares);
  if (shares.max_norm > 0 && std::isfinite(norm.norm) && norm.norm > shares.max_norm)
    norm.factor = static_cast<float>(shares.max_norm / norm.norm);
  return norm;
}

uint64_t count_nonfinite(const float *values, uint64_t count) {
  return HWY_DYNAMIC_DISPATCH(count_nonfinite_values)(values, count);
}

uint64_t count_zeros(const float *values, uint64_t count) {
  return HWY_DYNAMIC_DISPATCH(count_zero_values)(values, count);
}

}  // namespace fsdp::device::kernels
#endif
