/* SPDX-License-Identifier: Apache-2.0 */
#include "gpt.h"

void embedding_forward(float *x, const uint8_t *tokens, const struct gpt_weights *weights,
                       const struct gpt_shape *shape) {
  const size_t width = shape->width;
  for (size_t row = 0; row < shape->sequences * shape->tokens; ++row, x += width) {
    const float *token = weights->of[TOKEN_EMBEDDING] + tokens[row] * width;
    const float *position = weights->of[POSITION_EMBEDDING] + row % shape->tokens * width;
    for (size_t i = 0; i < width; ++i) x[i] = token[i] + position[i];
  }
}

void embedding_backward(struct gpt_gradients *gradients, const float *d_x, const uint8_t *tokens,
                        const struct gpt_shape *shape) {
  const size_t width = shape->width;
  gradient_begin(gradients->of[TOKEN_EMBEDDING], VOCABULARY * width);
  gradient_begin(gradients->of[POSITION_EMBEDDING], shape->tokens * width);
  for (size_t row = 0; row < shape->sequences * shape->tokens; ++row, d_x += width) {
    float *token = gradients->of[TOKEN_EMBEDDING].data + tokens[row] * width;
    float *position = gradients->of[POSITION_EMBEDDING].data + row % shape->tokens * width;
    for (size_t i = 0; i < width; ++i) {
      token[i] += d_x[i];
      position[i] += d_x[i];
    }
  }
}
