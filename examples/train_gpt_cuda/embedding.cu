/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu.h"

__global__ void embed(float *x, const uint8_t *tokens, const float *token, const float *position, size_t rows,
                      size_t context, size_t width) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= rows * width) return;
  const size_t row = i / width, column = i % width;
  x[i] = token[tokens[row] * width + column] + position[row % context * width + column];
}

void embedding_forward(float *x, const uint8_t *tokens, const gpt_weights *weights, const gpt_shape *shape) {
  const size_t rows = shape->sequences * shape->tokens;
  LAUNCH(embed, blocks_for(rows * shape->width), THREADS, shape->device->stream, x, tokens,
         weights->of[TOKEN_EMBEDDING], weights->of[POSITION_EMBEDDING], rows, shape->tokens, shape->width);
  CUDA(cudaPeekAtLastError());
}

/* A thread for each element of the embedding adds up its token's rows in order: no atomic additions, the same bits
 * always. */
__global__ void add_token_rows(float *d_token, float beta, const float *d_x, const uint8_t *tokens, size_t rows,
                               size_t width) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= VOCABULARY * width) return;
  const size_t token = i / width, column = i % width;
  float sum = beta == 0.0f ? 0.0f : d_token[i];
  for (size_t row = 0; row < rows; ++row)
    if (tokens[row] == token) sum += d_x[row * width + column];
  d_token[i] = sum;
}

__global__ void add_position_rows(float *d_position, float beta, const float *d_x, size_t sequences, size_t context,
                                  size_t width) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= context * width) return;
  float sum = beta == 0.0f ? 0.0f : d_position[i];
  for (size_t s = 0; s < sequences; ++s) sum += d_x[s * context * width + i];
  d_position[i] = sum;
}

void embedding_backward(gpt_gradients *gradients, const float *d_x, const uint8_t *tokens, const gpt_shape *shape) {
  const gradient token = gradients->of[TOKEN_EMBEDDING], position = gradients->of[POSITION_EMBEDDING];
  const size_t width = shape->width, rows = shape->sequences * shape->tokens;
  LAUNCH(add_token_rows, blocks_for(VOCABULARY * width), THREADS, shape->device->stream, token.data, token.beta, d_x,
         tokens, rows, width);
  LAUNCH(add_position_rows, blocks_for(shape->tokens * width), THREADS, shape->device->stream, position.data,
         position.beta, d_x, shape->sequences, shape->tokens, width);
  CUDA(cudaPeekAtLastError());
}
