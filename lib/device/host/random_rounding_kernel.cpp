// SPDX-License-Identifier: Apache-2.0
#include "base/float_environment.h"
#include "device/host/kernels.h"
#include "device/host/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/host/random_rounding_kernel.cpp"
#include <hwy/foreach_target.h>

#include "device/host/random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fsdp::device::kernels::HWY_NAMESPACE {

struct RoundRun {
  const float *from;
  uint16_t *to;
  const uint16_t *halves;

  template <class D>
  HWY_INLINE void operator()(D d, size_t i) const {
    const hn::Rebind<uint16_t, D> d16;
    hn::StoreU(hn::TruncateTo(d16, randomly_rounded(d, hn::LoadU(d, from + i), halves + i)), d16, to + i);
  }
};

void round_all(const RandomRounding &work) {
  RandomHalves(work.key).for_each_run(work.numbers, 0, work.count,
                                      [&](size_t i, size_t n, const uint16_t *halves) HWY_ATTR {
                                        for_each_vector(0, n, RoundRun{work.from + i, work.to + i, halves});
                                      });
}

}  // namespace fsdp::device::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fsdp::device::kernels {

HWY_EXPORT(round_all);

void round_randomly(const RandomRounding &work) {
  const FloatEnvironment standard;
  HWY_DYNAMIC_DISPATCH(round_all)(work);
}

}  // namespace fsdp::device::kernels
#endif
