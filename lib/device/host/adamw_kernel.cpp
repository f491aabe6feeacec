// SPDX-License-Identifier: Apache-2.0
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/adamw_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// AdamW by Loshchilov and Hutter 2019, algorithm 2, in fp32. This is the definition; each operation is rounded
// separately:
//   decay = lr * weight_decay
//   m = (keep1 * m) + ((rest1 * grad) - (less1 * m))                see Average in device/work.h
//   v = (keep2 * v) + (((rest2 * grad) * grad) - (less2 * v))
//   w = (w - decay * w) - (lr * (m / correction1)) / (sqrt(v / correction2) + epsilon)
//   compute = round(w)
// Published is the type of the compute weights; void means that none are written.
template <class Published>
struct AdamWUpdate {
  const AdamWSpan &span;
  Average first, second;
  float lr, decay, correction1, correction2, epsilon;

  HWY_INLINE AdamWUpdate(const AdamW &step, const AdamWSpan &span)
      : span(span),
        first(step.first),
        second(step.second),
        lr(step.lr),
        decay(step.lr * step.weight_decay),
        correction1(step.correction1),
        correction2(step.correction2),
        epsilon(step.epsilon) {}

  // `weighted` is rest times the value.
  template <class D, class V>
  static HWY_INLINE V take(D d, const Average &by, V average, V weighted) {
    using hn::Add, hn::Mul, hn::Set, hn::Sub;
    return Add(Mul(Set(d, by.keep), average), Sub(weighted, Mul(Set(d, by.less), average)));
  }

  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    using hn::Add, hn::Mul, hn::Div, hn::Sub, hn::Set;
    const auto g = load<F32>(d, span.grad, i);
    const auto m = take(d, first, load<F32>(d, span.exp_avg, i), Mul(Set(d, first.rest), g));
    const auto v = take(d, second, load<F32>(d, span.exp_avg_sq, i), Mul(Mul(Set(d, second.rest), g), g));
    const auto before = load<F32>(d, span.weight, i);
    const auto decayed = Sub(before, Mul(Set(d, decay), before));
    const auto denominator = Add(hn::Sqrt(Div(v, Set(d, correction2))), Set(d, epsilon));
    const auto w = Sub(decayed, Div(Mul(Set(d, lr), Div(m, Set(d, correction1))), denominator));
    store<F32>(d, m, span.exp_avg, i);
    store<F32>(d, v, span.exp_avg_sq, i);
    store<F32>(d, w, span.weight, i);
    if constexpr (!std::is_void_v<Published>) store<Published>(d, w, span.compute, i);
  }
};

template <class Published>
void update(const AdamW &step, const AdamWSpan &span) {
  for_each_vector(0, span.count, AdamWUpdate<Published>(step, span));
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
