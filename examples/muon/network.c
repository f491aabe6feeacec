/* SPDX-License-Identifier: Apache-2.0 */
#include "network.h"

#include <math.h>
#include <stdint.h>

const int network_counts[PARAMS] = {HIDDEN * INPUTS, HIDDEN, OUTPUTS *HIDDEN, OUTPUTS};

/* A number in [-1, 1) that depends on the seed alone. */
static float random_number(uint64_t seed) {
  seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9u;
  seed = (seed ^ seed >> 27) * 0x94D049BB133111EBu;
  return (float)(int32_t)((seed ^ seed >> 31) >> 32) / 2147483648.0f;
}

static float on_grid(float value) { return rintf(value * 4194304.0f) / 4194304.0f; }

void network_initial(int param, int teacher, float *weights) {
  const float scale = param == W1 ? 0.4f : param == W2 ? 0.25f : 0.0f;
  for (int i = 0; i < network_counts[param]; ++i)
    weights[i] = scale * random_number((uint64_t)(param + PARAMS * teacher + 1) << 32 | (uint64_t)i);
}

static void forward(const float *const weights[PARAMS], const float *x, float *hidden, float *y) {
  for (int h = 0; h < HIDDEN; ++h) {
    float sum = weights[B1][h];
    for (int i = 0; i < INPUTS; ++i) sum += weights[W1][h * INPUTS + i] * x[i];
    hidden[h] = tanhf(sum);
  }
  for (int o = 0; o < OUTPUTS; ++o) {
    y[o] = weights[B2][o];
    for (int h = 0; h < HIDDEN; ++h) y[o] += weights[W2][o * HIDDEN + h] * hidden[h];
  }
}

static void backward(const float *w2, const float *x, const float *hidden, const float *error,
                     float *const grads[PARAMS]) {
  for (int h = 0; h < HIDDEN; ++h) {
    float sum = 0.0f;
    for (int o = 0; o < OUTPUTS; ++o) {
      grads[W2][o * HIDDEN + h] += on_grid(error[o] * hidden[h]);
      sum += error[o] * w2[o * HIDDEN + h];
    }
    const float slope = sum * (1.0f - hidden[h] * hidden[h]);
    grads[B1][h] += on_grid(slope);
    for (int i = 0; i < INPUTS; ++i) grads[W1][h * INPUTS + i] += on_grid(slope * x[i]);
  }
  for (int o = 0; o < OUTPUTS; ++o) grads[B2][o] += on_grid(error[o]);
}

double network_sample(const float *const weights[PARAMS], const float *const teacher[PARAMS],
                      float *const grads[PARAMS], int step, int sample) {
  float x[INPUTS], hidden[HIDDEN], y[OUTPUTS], wanted[OUTPUTS], error[OUTPUTS], loss = 0.0f;
  for (int i = 0; i < INPUTS; ++i)
    x[i] = random_number((uint64_t)(step + 1) << 40 | (uint64_t)sample << 16 | (uint64_t)i);
  forward(teacher, x, hidden, wanted);
  forward(weights, x, hidden, y);
  for (int o = 0; o < OUTPUTS; ++o) {
    error[o] = (y[o] - wanted[o]) / 64.0f;
    loss += 32.0f * error[o] * error[o];
  }
  backward(weights[W2], x, hidden, error, grads);
  return (double)on_grid(loss);
}
