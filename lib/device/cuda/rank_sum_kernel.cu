// SPDX-License-Identifier: Apache-2.0
// The rank-order sum. Least traffic per element: ranks * the source's bytes + 4, and 4 more to accumulate. With one
// rank, as after an NCCL reduction, 4 + 4 or 4 + 4 + 4.
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

template <class Source, class Wire>
struct SumOfElement {
  static constexpr unsigned batch = 4;
  // False from one type of 16 bits to the other, because the compiler would then spill numbers that are loaded early.
  static constexpr bool loads_early = sizeof(typename Source::Stored) == 4 || sizeof(typename Wire::Stored) == 4;
  RankSum sum;

  template <unsigned n>
  FSDP_DEVICE Pack<typename Source::Stored, n> source(uint32_t rank, uint64_t index) const {
    return load<Source, n>(sum.base + rank * sum.stride, index);
  }

  FSDP_DEVICE static float addend(typename Source::Stored stored) {
    return Wire::value(Wire::stored(Source::value(stored)));
  }

  template <unsigned n, unsigned m>
  FSDP_DEVICE void add_ranks(Pack<float, n> (&totals)[m], uint64_t first, uint64_t step) const {
    Pack<typename Source::Stored, n> stored[m];
    for (unsigned k = 0; k < m; ++k) stored[k] = source<n>(0, first + k * step);
    for (unsigned k = 0; k < m; ++k)
      for (unsigned j = 0; j < n; ++j) totals[k].lane[j] = addend(stored[k].lane[j]);
    for (uint32_t rank = 1; rank < sum.ranks; ++rank) {
      for (unsigned k = 0; k < m; ++k) stored[k] = source<n>(rank, first + k * step);
      for (unsigned k = 0; k < m; ++k)
        for (unsigned j = 0; j < n; ++j) totals[k].lane[j] = added(totals[k].lane[j], addend(stored[k].lane[j]));
    }
  }

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<float, n> totals[m], before[m];
    if (loads_early && sum.accumulate)
      for (unsigned k = 0; k < m; ++k) before[k] = load_pack<n>(sum.out + first + k * step);
    add_ranks<n, m>(totals, first, step);
    if (!loads_early && sum.accumulate)
      for (unsigned k = 0; k < m; ++k) before[k] = load_pack<n>(sum.out + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      for (unsigned j = 0; j < n; ++j) {
        float &total = totals[k].lane[j];
        if (sum.factor != 1.0f) total = multiplied(total, sum.factor);
        if (sum.accumulate) total = added(before[k].lane[j], total);
      }
      store_pack<n>(sum.out + first + k * step, totals[k]);
    }
  }
};

template <class Source, class Wire>
int sum_ranks(kernels::Stream stream, const RankSum &sum) {
  constexpr unsigned bytes = sizeof(typename Source::Stored);
  const unsigned at = misfit(sum.out, sizeof(float));
  const bool alike = misfit(sum.base, bytes) == at && (sum.ranks == 1 || sum.stride % (pack * bytes) == 0);
  return for_each(SumOfElement<Source, Wire>{sum}, divide(sum.count, at, alike), stream);
}

}  // namespace

namespace kernels {

int rank_sum(Stream stream, const RankSum &sum) {
  if (sum.ranks == 0) return 0;
  const fsdp_dtype source = sum.source_dtype, wire = sum.wire_dtype;
  const bool unrounded = wire == source || wire == FSDP_FLOAT32;
  if (source == FSDP_BFLOAT16) return unrounded ? sum_ranks<BF16, F32>(stream, sum) : sum_ranks<BF16, F16>(stream, sum);
  if (source == FSDP_FLOAT16) return unrounded ? sum_ranks<F16, F32>(stream, sum) : sum_ranks<F16, BF16>(stream, sum);
  if (unrounded) return sum_ranks<F32, F32>(stream, sum);
  return wire == FSDP_BFLOAT16 ? sum_ranks<F32, BF16>(stream, sum) : sum_ranks<F32, F16>(stream, sum);
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
