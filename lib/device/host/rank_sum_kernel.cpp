// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.h"
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/rank_sum_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// If fixed_ranks is 0, there are sum.ranks ranks. The number of instances is kept low, because this code compiles
// slowly under sanitizers. Therefore whether to stream is decided at run time, by a branch that is always predicted.
// The sum is stored by value, because the compiler would read a reference's fields again after each store.
template <class Source, class Wire, uint32_t fixed_ranks>
struct Summand {
  RankSum sum;
  bool streaming;

  HWY_INLINE uint32_t ranks() const { return fixed_ranks ? fixed_ranks : sum.ranks; }

  template <class D>
  HWY_INLINE hn::Vec<D> addend(D d, uint32_t rank, size_t i) const {
    return round_to<Wire>(d, load<Source>(d, sum.base + rank * sum.stride, i));
  }

  template <class D>
  HWY_INLINE void finish(D d, hn::Vec<D> total, size_t i) const {
    if (sum.factor != 1.0f) total = hn::Mul(total, hn::Set(d, sum.factor));
    if (sum.accumulate) total = hn::Add(load<F32>(d, sum.out, i), total);
    if (streaming) {
      store<F32, true>(d, total, sum.out, i);
    } else {
      store<F32>(d, total, sum.out, i);
    }
  }

  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    auto total = addend(d, 0, i);
    for (uint32_t rank = 1; rank < ranks(); ++rank) total = hn::Add(total, addend(d, rank, i));
    finish(d, total, i);
  }

  // Adds four vectors at once: whole cache lines of each rank, and four additions at a time.
  template <class D>
  HWY_INLINE void four(D d, size_t i) const {
    const size_t n = hn::Lanes(d);
    auto a = addend(d, 0, i), b = addend(d, 0, i + n), c = addend(d, 0, i + 2 * n), e = addend(d, 0, i + 3 * n);
    for (uint32_t rank = 1; rank < ranks(); ++rank) {
      a = hn::Add(a, addend(d, rank, i));
      b = hn::Add(b, addend(d, rank, i + n));
      c = hn::Add(c, addend(d, rank, i + 2 * n));
      e = hn::Add(e, addend(d, rank, i + 3 * n));
    }
    finish(d, a, i), finish(d, b, i + n), finish(d, c, i + 2 * n), finish(d, e, i + 3 * n);
  }

  // Adds an addend to `all`, and returns it rounded to bf16. The result is wrong if the addend is NaN.
  template <class D>
  HWY_INLINE hn::Vec<D> take_number(D d, uint32_t rank, size_t i, hn::Vec<D> &all) const {
    const auto value = load<Source>(d, sum.base + rank * sum.stride, i);
    all = hn::Add(all, value);
    return BF16::round_numbers(d, value);
  }

  // Adds two vectors at once with addends rounded to bf16. If the sum of all addends is NaN, one of them may be NaN.
  // Then the function stores nothing and returns false.
  template <class D>
  HWY_INLINE bool two(D d, size_t i) const {
    const size_t n = hn::Lanes(d);
    auto all = hn::Zero(d), a = take_number(d, 0, i, all), b = take_number(d, 0, i + n, all);
    for (uint32_t rank = 1; rank < ranks(); ++rank) {
      a = hn::Add(a, take_number(d, rank, i, all));
      b = hn::Add(b, take_number(d, rank, i + n, all));
    }
    if (HWY_UNLIKELY(!hn::AllFalse(d, hn::IsNaN(all)))) return false;
    finish(d, a, i), finish(d, b, i + n);
    return true;
  }

  // Adds `several` vectors at once, the number that was fastest when it was measured.
  static constexpr size_t several = std::is_same_v<Wire, F32> ? 4 : std::is_same_v<Wire, BF16> ? 2 : 1;
  template <class D>
  HWY_INLINE void add_several(D d, size_t i) const {
    if constexpr (several == 4) return four(d, i);
    if constexpr (several == 2)
      if (two(d, i)) return;
    for (size_t v = 0; v < several; ++v) (*this)(d, i + v * hn::Lanes(d));
  }
};

template <class Source, class Wire, uint32_t fixed_ranks>
void sum_ranks(const RankSum &sum) {
  Summand<Source, Wire, fixed_ranks> summand{sum, false};
  const hn::ScalableTag<float> d;
  const hn::CappedTag<float, 1> one;
  const uint64_t bytes = sum.count * sizeof(float);
  const bool is_large = bytes >= streaming_bytes;
  // Shorter results than a page are mostly heads and ends, which are stored through the caches.
  const bool is_late = bytes >= page_bytes && sum.results_bytes >= late_bytes;
  const bool streaming = (is_large || is_late) && !sum.accumulate && !sum.in_place;
  size_t i = 0;
  if (streaming)
    for (const size_t head = misaligned_head(sum.out, sum.count); i < head; ++i) summand(one, i);
  summand.streaming = streaming;
  const size_t step = summand.several * hn::Lanes(d);
  // With 4 ranks, four pages of each were not faster.
  if ((is_large || streaming) && sum.ranks <= 2) {
    static_assert(run_elements % (summand.several * hn::MaxLanes(d)) == 0);
    const auto add_run = [&](size_t run) HWY_ATTR {
      for (size_t at = 0; at < run_elements; at += step) summand.add_several(d, run + at);
    };
    i = visit_pages<typename Source::Stored>(i, sum.count, add_run);
  }
  for (; i + step <= sum.count; i += step) summand.add_several(d, i);
  for_each_vector(i, sum.count, summand);
  if (streaming) hwy::FlushStream();
}

template <class Source>
void sum_unrounded(const RankSum &sum) {
  if (sum.ranks == 2) return sum_ranks<Source, F32, 2>(sum);
  sum_ranks<Source, F32, 0>(sum);
}

template <class Source>
void sum_source(const RankSum &sum) {
  if (sum.wire_dtype == sum.source_dtype || sum.wire_dtype == FSDP_FLOAT32) return sum_unrounded<Source>(sum);
  if constexpr (!std::is_same_v<Source, BF16>)
    if (sum.wire_dtype == FSDP_BFLOAT16) return sum_ranks<Source, BF16, 0>(sum);
  if constexpr (!std::is_same_v<Source, F16>)
    if (sum.wire_dtype == FSDP_FLOAT16) return sum_ranks<Source, F16, 0>(sum);
}

void sum_any(const RankSum &sum) {
  switch (sum.source_dtype) {
    case FSDP_FLOAT32: return sum_source<F32>(sum);
    case FSDP_BFLOAT16: return sum_source<BF16>(sum);
    case FSDP_FLOAT16: return sum_source<F16>(sum);
  }
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(sum_any);

void rank_sum(const RankSum &sum) {
  if (sum.ranks == 0 || sum.count == 0) return;
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(sum_any)(sum);
}

}  // namespace fsdp::device::kernels
#endif
