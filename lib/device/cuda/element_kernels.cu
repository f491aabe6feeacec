// SPDX-License-Identifier: Apache-2.0
// Casts, sums and products, element by element. Least traffic per element: a cast from fp32 to bf16 reads 4 and writes
// 2 bytes, the reverse cast 2 and 4, and casts between 16-bit types 2 and 2. add reads both operands and writes one;
// scale reads 4 and writes 4.
#include "device/cuda/cast.h"
#include "device/cuda/kernels.h"
#include "device/cuda/for_each.h"

namespace fsdp::device::cuda {
namespace {

// Copies between equal types, with any bits.
template <class Bits>
struct Copy {
  static constexpr unsigned batch = 4;
  Bits *to;
  const Bits *from;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<Bits, n> values[m];
    for (unsigned k = 0; k < m; ++k) values[k] = load_pack<n>(from + first + k * step);
    for (unsigned k = 0; k < m; ++k) store_pack<n>(to + first + k * step, values[k]);
  }
};

template <class To, class From>
struct Add {
  static constexpr unsigned batch = 4;
  void *to;
  const void *from;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<typename To::Stored, n> a[m];
    Pack<typename From::Stored, n> b[m];
    for (unsigned k = 0; k < m; ++k) a[k] = load<To, n>(to, first + k * step);
    for (unsigned k = 0; k < m; ++k) b[k] = load<From, n>(from, first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      Pack<float, n> sums;
      for (unsigned j = 0; j < n; ++j) sums.lane[j] = added(To::value(a[k].lane[j]), From::value(b[k].lane[j]));
      store<To, n>(to, first + k * step, sums);
    }
  }
};

struct Scale {
  using Factor = float;
  static constexpr unsigned batch = 4;
  float *values;
  Factor factor;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<float, n> products[m];
    for (unsigned k = 0; k < m; ++k) products[k] = load_pack<n>(values + first + k * step);
    for (unsigned k = 0; k < m; ++k) {
      for (unsigned j = 0; j < n; ++j) products[k].lane[j] = multiplied(products[k].lane[j], factor);
      store_pack<n>(values + first + k * step, products[k]);
    }
  }
};

// Scales by a factor that becomes known only when the kernel runs.
struct ScaleBy {
  using Factor = const float *;
  static constexpr unsigned batch = Scale::batch;
  float *values;
  Factor factor;

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    if (*factor != 1) Scale{values, *factor}.run<n, m>(first, step);
  }
};

template <class Work>
struct ScaleBatch {
  Batch<FloatSpan, 192> batch;
  typename Work::Factor factor;
};
static_assert(sizeof(ScaleBatch<ScaleBy>) <= max_argument_bytes);

FSDP_BOTH Division divide_span(const FloatSpan &span) {
  return divide(span.count, misfit(span.values, sizeof(float)), true);
}

template <class Work>
__global__ void __launch_bounds__(threads) scale_spans(const __grid_constant__ ScaleBatch<Work> scaled) {
  const unsigned which = scaled.batch.span_of(blockIdx.x);
  const FloatSpan span = scaled.batch.spans[which];
  run_block<Work::batch>(Work{span.values, scaled.factor}, divide_span(span),
                         blockIdx.x - scaled.batch.first_block[which], threadIdx.x);
}

template <class Work>
int scale_all(kernels::Stream stream, std::span<const FloatSpan> spans, typename Work::Factor factor) {
  ScaleBatch<Work> scaled = {};
  scaled.factor = factor;
  const auto blocks = [](const FloatSpan &span) { return blocks_of<Work::batch>(divide_span(span)); };
  return launch_all(scaled.batch, spans, blocks,
                    [&](unsigned count) { return FSDP_LAUNCH(scale_spans<Work>, count, threads, stream, scaled); });
}

template <template <class, class> class Work, class To>
int apply_from(kernels::Stream stream, void *to, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  switch (from_dtype) {
    case FSDP_BFLOAT16: return apply<Work, To, BF16>(stream, to, from, count);
    case FSDP_FLOAT16: return apply<Work, To, F16>(stream, to, from, count);
    default: return apply<Work, To, F32>(stream, to, from, count);
  }
}

template <class Stored>
int copy(kernels::Stream stream, void *to, const void *from, uint64_t count) {
  const unsigned at = misfit(to, sizeof(Stored));
  return for_each(Copy<Stored>{static_cast<Stored *>(to), static_cast<const Stored *>(from)},
                  divide(count, at, misfit(from, sizeof(Stored)) == at), stream);
}

}  // namespace

namespace kernels {

int cast(kernels::Stream stream, void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype,
         uint64_t count) {
  if (to_dtype == from_dtype)
    return to_dtype == FSDP_FLOAT32 ? copy<uint32_t>(stream, to, from, count) : copy<uint16_t>(stream, to, from, count);
  if (to_dtype == FSDP_FLOAT32)
    return from_dtype == FSDP_BFLOAT16 ? apply<Cast, F32, BF16>(stream, to, from, count)
                                       : apply<Cast, F32, F16>(stream, to, from, count);
  if (to_dtype == FSDP_BFLOAT16)
    return from_dtype == FSDP_FLOAT32 ? apply<Cast, BF16, F32>(stream, to, from, count)
                                      : apply<Cast, BF16, F16>(stream, to, from, count);
  return from_dtype == FSDP_FLOAT32 ? apply<Cast, F16, F32>(stream, to, from, count)
                                    : apply<Cast, F16, BF16>(stream, to, from, count);
}

int add(kernels::Stream stream, void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype,
        uint64_t count) {
  switch (to_dtype) {
    case FSDP_BFLOAT16: return apply_from<Add, BF16>(stream, to, from, from_dtype, count);
    case FSDP_FLOAT16: return apply_from<Add, F16>(stream, to, from, from_dtype, count);
    default: return apply_from<Add, F32>(stream, to, from, from_dtype, count);
  }
}

int scale_by(kernels::Stream stream, std::span<const FloatSpan> spans, const float *factor) {
  return scale_all<ScaleBy>(stream, spans, factor);
}

int scale(kernels::Stream stream, std::span<const FloatSpan> spans, float factor) {
  return scale_all<Scale>(stream, spans, factor);
}

}  // namespace kernels
}  // namespace fsdp::device::cuda
