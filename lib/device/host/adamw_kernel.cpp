// SPDX-License-Identifier: Apache-2.0
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/adamw_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/adamw-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// Published is the type of the compute weights, which are the rounded weights; void means that none are written.
template <class Published>
struct AdamWUpdate {
  AdamWSpan span;  // by value, like the formula
  AdamWFormula formula;

  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    auto m = load<F32>(d, span.exp_avg, i), v = load<F32>(d, span.exp_avg_sq, i), w = load<F32>(d, span.weight, i);
    formula(d, load<F32>(d, span.grad, i), m, v, w);
    store<F32>(d, m, span.exp_avg, i);
    store<F32>(d, v, span.exp_avg_sq, i);
    store<F32>(d, w, span.weight, i);
    if constexpr (!std::is_void_v<Published>) store<Published>(d, w, span.compute, i);
  }
};

template <class Published>
void update(const AdamW &step, const AdamWSpan &span) {
  const AdamWUpdate<Published> kernel{span, AdamWFormula(step)};
  if (span.count * sizeof(float) >= streaming_bytes) return for_each_vector_of_pages(span.count, kernel);
  for_each_vector(0, span.count, kernel);
}

void update_any(const AdamW &step, const AdamWSpan &span) {
  if (!span.compute || span.compute == span.weight) return update<void>(step, span);
  switch (span.compute_dtype) {
    case FSDP_FLOAT32: return update<F32>(step, span);
    case FSDP_BFLOAT16: return update<BF16>(step, span);
    case FSDP_FLOAT16: return update<F16>(step, span);
  }
}

void update_all(const AdamW &step, std::span<const AdamWSpan> spans) {
  for (const AdamWSpan &span : spans) update_any(step, span);
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(update_all);

void adamw(const AdamW &step, std::span<const AdamWSpan> spans) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(update_all)(step, spans);
}

}  // namespace fsdp::device::kernels
#endif
