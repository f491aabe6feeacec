/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "attention.h"
#include "gelu.h"
#include "gpt.h"
#include "norm.h"

static struct attention_shape attend(const struct gpt_shape *shape) {
  return (struct attention_shape){shape->sequences, shape->tokens, shape->heads, shape->width};
}

static void attention_half_forward(const float *x, const struct gpt_weights *weights, struct block_activations *kept,
                                   const struct gpt_shape *shape) {
  const float *const *w = weights->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  const struct attention_shape attention = attend(shape);
  norm_forward(kept->norm1, x, w[NORM1_WEIGHT], w[NORM1_BIAS], rows, width);
  linear_forward(kept->qkv, kept->norm1, w[QKV_WEIGHT], rows, width, 3 * width, 0.0f);
  bias_forward(kept->qkv, w[QUERY_BIAS], rows, width, 3 * width);
  bias_forward(kept->qkv + 2 * width, w[VALUE_BIAS], rows, width, 3 * width);
  attention_forward(kept->attention, kept->probabilities, kept->qkv, &attention);
  memcpy(kept->middle, x, rows * width * sizeof *x);
  linear_forward(kept->middle, kept->attention, w[PROJECTION_WEIGHT], rows, width, width, 1.0f);
  bias_forward(kept->middle, w[PROJECTION_BIAS], rows, width, width);
}

void block_forward(float *y, const float *x, const struct gpt_weights *weights, struct block_activations *kept,
                   const struct gpt_shape *shape) {
  const float *const *w = weights->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  attention_half_forward(x, weights, kept, shape);
  norm_forward(kept->norm2, kept->middle, w[NORM2_WEIGHT], w[NORM2_BIAS], rows, width);
  linear_forward(kept->up, kept->norm2, w[UP_WEIGHT], rows, width, 4 * width, 0.0f);
  bias_forward(kept->up, w[UP_BIAS], rows, 4 * width, 4 * width);
  gelu_forward(kept->gelu, kept->up, rows * 4 * width);
  memcpy(y, kept->middle, rows * width * sizeof *y);
  linear_forward(y, kept->gelu, w[DOWN_WEIGHT], rows, 4 * width, width, 1.0f);
  bias_forward(y, w[DOWN_BIAS], rows, width, width);
}

/* d is the residual stream's gradient: what comes through the MLP is added to what passes by it. */
static void mlp_half_backward(float *d, const struct gpt_weights *weights, struct gpt_gradients *gradients,
                              const struct block_activations *kept, struct gpt_scratch *scratch,
                              const struct gpt_shape *shape) {
  const float *const *w = weights->of;
  const struct gradient *g = gradients->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  linear_backward_weight(g[DOWN_WEIGHT], d, kept->gelu, rows, 4 * width, width);
  bias_backward(g[DOWN_BIAS], d, rows, width, width);
  linear_backward_input(scratch->hidden, d, w[DOWN_WEIGHT], rows, 4 * width, width);
  gelu_backward(scratch->hidden, kept->up, rows * 4 * width);
  linear_backward_weight(g[UP_WEIGHT], scratch->hidden, kept->norm2, rows, width, 4 * width);
  bias_backward(g[UP_BIAS], scratch->hidden, rows, 4 * width, 4 * width);
  linear_backward_input(scratch->narrow, scratch->hidden, w[UP_WEIGHT], rows, width, 4 * width);
  norm_backward(d, g[NORM2_WEIGHT], g[NORM2_BIAS], scratch->narrow, kept->middle, w[NORM2_WEIGHT], rows, width);
}

static void attention_half_backward(float *d, const float *x, const struct gpt_weights *weights,
                                    struct gpt_gradients *gradients, const struct block_activations *kept,
                                    struct gpt_scratch *scratch, const struct gpt_shape *shape) {
  const float *const *w = weights->of;
  const struct gradient *g = gradients->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  const struct attention_shape attention = attend(shape);
  linear_backward_weight(g[PROJECTION_WEIGHT], d, kept->attention, rows, width, width);
  bias_backward(g[PROJECTION_BIAS], d, rows, width, width);
  linear_backward_input(scratch->narrow, d, w[PROJECTION_WEIGHT], rows, width, width);
  attention_backward(scratch->qkv, scratch->narrow, kept->probabilities, kept->qkv, scratch->square, &attention);
  linear_backward_weight(g[QKV_WEIGHT], scratch->qkv, kept->norm1, rows, width, 3 * width);
  bias_backward(g[QUERY_BIAS], scratch->qkv, rows, width, 3 * width);
  bias_backward(g[VALUE_BIAS], scratch->qkv + 2 * width, rows, width, 3 * width);
  linear_backward_input(scratch->narrow, scratch->qkv, w[QKV_WEIGHT], rows, width, 3 * width);
  norm_backward(d, g[NORM1_WEIGHT], g[NORM1_BIAS], scratch->narrow, x, w[NORM1_WEIGHT], rows, width);
}

void block_backward(float *d, const float *x, const struct gpt_weights *weights, struct gpt_gradients *gradients,
                    const struct block_activations *kept, struct gpt_scratch *scratch, const struct gpt_shape *shape) {
  mlp_half_backward(d, weights, gradients, kept, scratch, shape);
  attention_half_backward(d, x, weights, gradients, kept, scratch, shape);
}
