// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one step of AdamW. The kernels of AdamW include this file once per SIMD target.
#include "device/host/simd-inl.h"
// (The guard below flips with each target; see hwy/foreach_target.h.)
#if defined(FSDP_DEVICE_HOST_ADAMW_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef FSDP_DEVICE_HOST_ADAMW_INL_H
#undef FSDP_DEVICE_HOST_ADAMW_INL_H
#else
#define FSDP_DEVICE_HOST_ADAMW_INL_H
#endif

#include "device/work.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

// AdamW by Loshchilov and Hutter 2019, algorithm 2, in fp32. This is the definition; each operation is rounded
// separately:
//   decay = lr * weight_decay
//   m = (keep1 * m) + ((rest1 * grad) - (less1 * m))                see Average in device/work.h
//   v = (keep2 * v) + (((rest2 * grad) * grad) - (less2 * v))
//   w = (w - decay * w) - (lr * (m / correction1)) / (sqrt(v / correction2) + epsilon)
// A kernel holds this struct by value. If it held a reference, the compiler would read the numbers again after each
// store.
struct AdamWFormula {
  Average first, second;
  float lr, decay, correction1, correction2, epsilon;

  HWY_INLINE explicit AdamWFormula(const AdamW &step)
      : first(step.first),
        second(step.second),
        lr(step.lr),
        decay(step.lr * step.weight_decay),
        correction1(step.correction1),
        correction2(step.correction2),
        epsilon(step.epsilon) {}

  // `weighted` is `rest` times the value.
  template <class D, class V>
  static HWY_INLINE V take(D d, const Average &by, V average, V weighted) {
    using hn::Add, hn::Mul, hn::Set, hn::Sub;
    return Add(Mul(Set(d, by.keep), average), Sub(weighted, Mul(Set(d, by.less), average)));
  }

  // Updates the averages m and v and the weight w.
  template <class D, class V>
  HWY_INLINE void operator()(D d, V grad, V &m, V &v, V &w) const {
    using hn::Add, hn::Mul, hn::Div, hn::Sub, hn::Set;
    m = take(d, first, m, Mul(Set(d, first.rest), grad));
    v = take(d, second, v, Mul(Mul(Set(d, second.rest), grad), grad));
    const auto decayed = Sub(w, Mul(Set(d, decay), w));
    const auto denominator = Add(hn::Sqrt(Div(v, Set(d, correction2))), Set(d, epsilon));
    w = Sub(decayed, Div(Mul(Set(d, lr), Div(m, Set(d, correction1))), denominator));
  }
};

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
