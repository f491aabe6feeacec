// SPDX-License-Identifier: Apache-2.0
// Computes AdamW by its definition, one rounded operation at a time.
#pragma once

#include "kernel_reference.h"

namespace fsdp::test {

inline device::AdamW make_step(int number, float weight_decay = 0.1f) {
  return {1e-3f,
          device::average_of(0.9),
          device::average_of(0.999),
          1e-8f,
          weight_decay,
          static_cast<float>(1 - std::pow(0.9, number)),
          static_cast<float>(1 - std::pow(0.999, number)),
          static_cast<uint32_t>(number),
          0};
}

// Follows the definition in adamw-inl.h.
inline void update_one(const device::AdamW &s, float grad, float &weight, float &exp_avg, float &exp_avg_sq) {
  const float decay = s.lr * s.weight_decay;
  const float m1 = s.first.rest * grad, m2 = s.first.less * exp_avg;
  const float m3 = m1 - m2, m4 = s.first.keep * exp_avg;
  exp_avg = m4 + m3;
  const float v1 = s.second.rest * grad, v2 = s.second.less * exp_avg_sq;
  const float v3 = v1 * grad;
  const float v4 = v3 - v2, v5 = s.second.keep * exp_avg_sq;
  exp_avg_sq = v5 + v4;
  const float decayed = weight - decay * weight;
  const float numerator = s.lr * (exp_avg / s.correction1);
  const float root = std::sqrt(exp_avg_sq / s.correction2);
  const float denominator = root + s.epsilon;
  weight = decayed - numerator / denominator;
}

}  // namespace fsdp::test
