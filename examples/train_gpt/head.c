/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "clones.h"
#include "exp.h"
#include "gpt.h"
#include "norm.h"

void head_forward(float *norm, float *logits, const float *x, const struct gpt_weights *weights,
                  const struct gpt_shape *shape) {
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  norm_forward(norm, x, weights->of[FINAL_NORM_WEIGHT], weights->of[FINAL_NORM_BIAS], rows, width);
  linear_forward(logits, norm, weights->of[HEAD_WEIGHT], rows, width, VOCABULARY, 0.0f);
}

/* -log softmax(row)[target]; the row becomes softmax(row) - one_hot(target). */
CLONES static double row_loss(float *row, uint8_t target) {
  float maximum = row[0];
  for (int j = 1; j < VOCABULARY; ++j) maximum = row[j] > maximum ? row[j] : maximum;
  const float target_logit = row[target] - maximum;
  for (int j = 0; j < VOCABULARY; ++j) row[j] = exp_fast(row[j] - maximum);
  float total = 0.0f;
  for (int j = 0; j < VOCABULARY; ++j) total += row[j];
  const float factor = 1.0f / total;
  for (int j = 0; j < VOCABULARY; ++j) row[j] *= factor;
  row[target] -= 1.0f;
  return log((double)total) - (double)target_logit;
}

void head_loss(double *loss, float *logits, const uint8_t *targets, struct gpt_scratch *scratch,
               const struct gpt_shape *shape) {
  (void)scratch;
  const size_t rows = shape->sequences * shape->tokens;
  double total = 0.0;
  for (size_t row = 0; row < rows; ++row) total += row_loss(logits + row * VOCABULARY, targets[row]);
  const float mean = 1.0f / (float)rows;
  for (size_t i = 0; i < rows * VOCABULARY; ++i) logits[i] *= mean;
  *loss += total / (double)rows;
}

void head_backward(float *d, const float *x, const float *norm, const float *d_logits,
                   const struct gpt_weights *weights, struct gpt_gradients *gradients, struct gpt_scratch *scratch,
                   const struct gpt_shape *shape) {
  const struct gradient *g = gradients->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  linear_backward_weight(g[HEAD_WEIGHT], d_logits, norm, rows, width, VOCABULARY);
  linear_backward_input(scratch->narrow, d_logits, weights->of[HEAD_WEIGHT], rows, width, VOCABULARY);
  memset(d, 0, rows * width * sizeof *d);
  norm_backward(d, g[FINAL_NORM_WEIGHT], g[FINAL_NORM_BIAS], scratch->narrow, x, weights->of[FINAL_NORM_WEIGHT], rows,
                width);
}
