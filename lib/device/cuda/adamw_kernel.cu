// SPDX-License-Identifier: Apache-2.0
// AdamW on many pieces at once, with the copy for the math; the step may be in device memory. adamw.h defines the
// operations and their order. Least traffic per element: 16 bytes read (weight, gradient, two averages), 12 written,
// and 2 or 4 for the copy. Each thread has two packs of each of the four arrays under way: 128 bytes.
#include "device/cuda/adamw.h"
#include "device/cuda/for_each.h"
#include "device/cuda/kernels.h"

namespace fsdp::device::cuda {
namespace {

constexpr unsigned packs_per_thread = 2;

struct Updates {
  Batch<AdamWSpan, 64> batch;
  AdamW step;
  const AdamW *step_in_memory;  // used in place of step, if not NULL
};
static_assert(sizeof(Updates) <= max_argument_bytes);

// The output type for spans of which nothing is published.
struct Nothing {};
template <unsigned n>
FSDP_DEVICE void publish(Nothing, void *, uint64_t, const Pack<float, n> &) {}
template <unsigned n, class Published>
FSDP_DEVICE void publish(Published, void *to, uint64_t index, const Pack<float, n> &values) {
  store<Published, n>(to, index, values);
}

template <class Published>
struct Update {
  const AdamWSpan &span;
  AdamWFormula formula;

  FSDP_DEVICE Update(const AdamW &step, const AdamWSpan &span) : span(span), formula(step) {}

  template <unsigned n, unsigned m>
  FSDP_DEVICE void run(uint64_t first, uint64_t step) const {
    Pack<float, n> weight[m], grad[m], average[m], square[m];
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t i = first + k * step;
      grad[k] = load_pack<n>(span.grad + i);
      average[k] = load_pack<n>(span.exp_avg + i);
      square[k] = load_pack<n>(span.exp_avg_sq + i);
      weight[k] = load_pack<n>(static_cast<const float *>(span.weight) + i);
    }
    for (unsigned k = 0; k < m; ++k) {
      const uint64_t i = first + k * step;
      for (unsigned j = 0; j < n; ++j)
        formula.update(weight[k].lane[j], grad[k].lane[j], average[k].lane[j], square[k].lane[j]);
      store_pack<n>(span.exp_avg + i, average[k]);
      store_pack<n>(span.exp_avg_sq + i, square[k]);
      store_pack<n>(span.weight + i, weight[k]);
      publish<n>(Published(), span.compute, i, weight[k]);
    }
  }
};

FSDP_BOTH bool publishes(const AdamWSpan &span) { return span.compute && span.compute != span.weight; }

FSDP_BOTH Division divide_span(const AdamWSpan &span) {
  const unsigned at = misfit(span.weight, sizeof(float));
  bool alike = misfit(span.grad, sizeof(float)) == at && misfit(span.exp_avg, sizeof(float)) == at &&
               misfit(span.exp_avg_sq, sizeof(float)) == at;
  if (publishes(span)) alike = alike && misfit(span.compute, span.compute_dtype == FSDP_FLOAT32 ? 4 : 2) == at;
  return divide(span.count, at, alike);
}

template <class Published>
FSDP_DEVICE void update_span(const AdamW &step, const AdamWSpan &span, uint64_t block, unsigned thread) {
  run_block<packs_per_thread>(Update<Published>(step, span), divide_span(span), block, thread);
}

__global__ void __launch_bounds__(threads) update_spans(const __grid_constant__ Updates updates) {
  const unsigned which = updates.batch.span_of(blockIdx.x);
  const AdamWSpan span = updates.batch.spans[which];
  const AdamW step = updates.step_in_memory ? *updates.step_in_memory : updates.step;
  const uint64_t block = blockIdx.x - updates.batch.first_block[which];
  if (!publishes(span)) return update_span<Nothing>(step, span, block, threadIdx.x);
  switch (span.compute_dtype) {
    case FSDP_BFLOAT16: return update_span<BF16>(step, span, block, threadIdx.x);
    case FSDP_FLOAT16: return update_span<F16>(step, span, block, threadIdx.x);
    default: return update_span<F32>(step, span, block, threadIdx.x);
  }
}

__global__ void write_step(AdamW *to, const __grid_constant__ AdamW step) { *to = step; }

int update_all(kernels::Stream stream, const AdamW &step, const AdamW *step_in_memory,
               std::span<const AdamWSpan> spans) {
  Updates updates = {};
  updates.step = step;
  updates.step_in_memory = step_in_memory;
  const auto blocks = [](const AdamWSpan &span) { return blocks_of<packs_per_thread>(divide_span(span)); };
  return launch_all(updates.batch, spans, blocks,
                    [&](unsigned count) { return FSDP_LAUNCH(update_spans, count, threads, stream, updates); });
}

}  // namespace

namespace kernels {

int adamw(Stream stream, const AdamW &step, std::span<const AdamWSpan> spans) {
  return update_all(stream, step, nullptr, spans);
}

int adamw_from(Stream stream, const AdamW *step, std::span<const AdamWSpan> spans) {
  return update_all(stream, AdamW{}, step, spans);
}

int store_step(Stream stream, AdamW *to, const AdamW &step) { return FSDP_LAUNCH(write_step, 1, 1, stream, to, step); }

}  // namespace kernels
}  // namespace fsdp::device::cuda
