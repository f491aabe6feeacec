/* SPDX-License-Identifier: Apache-2.0 */
#include "layers.h"

#include <math.h>
#include <string.h>

#include "moe.h"

enum { MOST_WEIGHTS = VOCABULARY * WIDTH };

void linear_forward(float *y, const float *w, const float *x, int rows, int out, int in) {
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < out; ++o) {
      float sum = 0.0f;
      for (int i = 0; i < in; ++i) sum += w[o * in + i] * x[r * in + i];
      y[r * out + o] = sum;
    }
}

void linear_backward(float *dx, const float *w, const float *dy, int rows, int out, int in) {
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < out; ++o)
      for (int i = 0; i < in; ++i) dx[r * in + i] += dy[r * out + o] * w[o * in + i];
}

static void add_rows(float *dw, const float *dy, const float *x, int rows, int out, int in) {
  for (int r = 0; r < rows; ++r)
    for (int o = 0; o < out; ++o)
      for (int i = 0; i < in; ++i) dw[o * in + i] += dy[r * out + o] * x[r * in + i];
}

void linear_weight_grad(float *dw, const float *dy, const float *x, const int *row_count, int parts, int out, int in) {
  float sums[PARTS][MOST_WEIGHTS];
  const int count = out * in;
  for (int p = 0, row = 0; p < parts; row += row_count[p++]) {
    memset(sums[p], 0, (size_t)count * sizeof(float));
    add_rows(sums[p], dy + row * out, x + row * in, row_count[p], out, in);
  }
  for (int p = 1; p < parts; ++p)
    for (int i = 0; i < count; ++i) sums[0][i] += sums[p][i];
  memcpy(dw, sums[0], (size_t)count * sizeof(float));
}

void dense_forward(float *y, float *tanh_kept, const float *w, const float *b, const float *x, int rows) {
  linear_forward(tanh_kept, w, x, rows, WIDTH, WIDTH);
  for (int i = 0; i < rows * WIDTH; ++i) {
    tanh_kept[i] = tanhf(tanh_kept[i] + b[i % WIDTH]);
    y[i] = x[i] + tanh_kept[i];
  }
}

void dense_backward(float *d, float *du, const float *tanh_kept, const float *w, int rows) {
  for (int i = 0; i < rows * WIDTH; ++i) du[i] = d[i] * (1.0f - tanh_kept[i] * tanh_kept[i]);
  linear_backward(d, w, du, rows, WIDTH, WIDTH);
}

/* Turns logits into probabilities; returns the largest one's index. */
static int softmax(float *values, int count) {
  int top = 0;
  float sum = 0.0f;
  for (int i = 1; i < count; ++i) top = values[i] > values[top] ? i : top;
  const float largest = values[top];
  for (int i = 0; i < count; ++i) sum += values[i] = expf(values[i] - largest);
  for (int i = 0; i < count; ++i) values[i] /= sum;
  return top;
}

void router_forward(int32_t *expert, float *probability, const float *router, const float *x, int rows) {
  linear_forward(probability, router, x, rows, EXPERTS, WIDTH);
  for (int r = 0; r < rows; ++r) expert[r] = softmax(probability + r * EXPERTS, EXPERTS);
}

void router_backward(float *du, const float *dgate, const int32_t *expert, const float *probability, int rows) {
  for (int r = 0; r < rows; ++r) {
    const float *p = probability + r * EXPERTS;
    for (int e = 0; e < EXPERTS; ++e)
      du[r * EXPERTS + e] = dgate[r] * p[expert[r]] * ((e == expert[r] ? 1.0f : 0.0f) - p[e]);
  }
}

void expert_forward(float *y, float *relu_kept, const float *up, const float *down, const float *x, int rows) {
  linear_forward(relu_kept, up, x, rows, HIDDEN, WIDTH);
  for (int i = 0; i < rows * HIDDEN; ++i) relu_kept[i] = relu_kept[i] > 0.0f ? relu_kept[i] : 0.0f;
  linear_forward(y, down, relu_kept, rows, WIDTH, HIDDEN);
}

void expert_backward(float *dx, float *du, const float *relu_kept, const float *up, const float *down, const float *dy,
                     int rows) {
  memset(du, 0, (size_t)(rows * HIDDEN) * sizeof(float));
  memset(dx, 0, (size_t)(rows * WIDTH) * sizeof(float));
  linear_backward(du, down, dy, rows, WIDTH, HIDDEN);
  for (int i = 0; i < rows * HIDDEN; ++i) du[i] = relu_kept[i] > 0.0f ? du[i] : 0.0f;
  linear_backward(dx, up, du, rows, HIDDEN, WIDTH);
}

double cross_entropy(float *logits, const int32_t *targets, int rows) {
  double loss = 0.0;
  for (int r = 0; r < rows; ++r) {
    float *p = logits + r * VOCABULARY;
    softmax(p, VOCABULARY);
    loss -= log(p[targets[r]]);
    p[targets[r]] -= 1.0f;
    for (int i = 0; i < VOCABULARY; ++i) p[i] /= PART_TOKENS;
  }
  return loss;
}
