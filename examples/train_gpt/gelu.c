/* SPDX-License-Identifier: Apache-2.0 */
#include "gelu.h"

#include "clones.h"
#include "exp.h"

#define TWO_ROOT_TWO_OVER_PI 1.5957691216f
#define CUBIC 0.044715f

static inline float sigmoid_2u(float x) {
  return 1.0f / (1.0f + exp_fast(-TWO_ROOT_TWO_OVER_PI * (x + CUBIC * x * x * x)));
}

CLONES void gelu_forward(float *out, const float *in, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = in[i] * sigmoid_2u(in[i]);
}

CLONES void gelu_backward(float *d, const float *in, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float x = in[i];
    const float s = sigmoid_2u(x);
    d[i] *= s + x * s * (1.0f - s) * TWO_ROOT_TWO_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
  }
}
