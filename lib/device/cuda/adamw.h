// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one step of AdamW, with the operations of host/adamw-inl.h in the same order.
#pragma once

#include "device/cuda/elements.h"
#include "device/work.h"

namespace fsdp::device::cuda {

struct AdamWFormula {
  Average first, second;
  float lr, decay, correction1, correction2, epsilon;

  FSDP_DEVICE explicit AdamWFormula(const AdamW &step)
      : first(step.first),
        second(step.second),
        lr(step.lr),
        decay(multiplied(step.lr, step.weight_decay)),
        correction1(step.correction1),
        correction2(step.correction2),
        epsilon(step.epsilon) {}

  // `weighted` is `rest` times the value.
  FSDP_DEVICE static float take(const Average &by, float average, float weighted) {
    return added(multiplied(by.keep, average), subtracted(weighted, multiplied(by.less, average)));
  }

  FSDP_DEVICE void update(float &weight, float grad, float &m, float &v) const {
    m = take(first, m, multiplied(first.rest, grad));
    v = take(second, v, multiplied(multiplied(second.rest, grad), grad));
    const float decayed = subtracted(weight, multiplied(decay, weight));
    const float denominator = added(root(divided(v, correction2)), epsilon);
    weight = subtracted(decayed, divided(multiplied(lr, divided(m, correction1)), denominator));
  }
};

}  // namespace fsdp::device::cuda
