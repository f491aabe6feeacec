/* SPDX-License-Identifier: Apache-2.0 */
/* Causal attention: the products of all heads of a sequence at once, and a block for each row of scores. */
#include "gpu.h"

/* Row i of a head sees the tokens 0..i: their scores become probabilities, the rest becomes 0. */
__global__ void softmax(float *scores, size_t tokens) {
  __shared__ lanes shared;
  float *row = scores + size_t{blockIdx.x} * tokens;
  const size_t visible = blockIdx.x % tokens + 1;
  float largest = row[0], total = 0.0f;
  for (size_t j = threadIdx.x; j < visible; j += THREADS) largest = row[j] > largest ? row[j] : largest;
  largest = find_largest(largest, shared);
  for (size_t j = threadIdx.x; j < tokens; j += THREADS) {
    row[j] = j < visible ? expf(row[j] - largest) : 0.0f;
    total += row[j];
  }
  total = add_threads(total, shared);
  for (size_t j = threadIdx.x; j < visible; j += THREADS) row[j] /= total;
}

/* d_score = p (d_p - sum(p d_p)). p is 0 beyond the diagonal, and so is d_score. */
__global__ void softmax_backward(float *d_p, const float *p, size_t tokens) {
  __shared__ lanes shared;
  d_p += size_t{blockIdx.x} * tokens;
  p += size_t{blockIdx.x} * tokens;
  float total = 0.0f;
  for (size_t j = threadIdx.x; j < tokens; j += THREADS) total += p[j] * d_p[j];
  total = add_threads(total, shared);
  for (size_t j = threadIdx.x; j < tokens; j += THREADS) d_p[j] = p[j] * (d_p[j] - total);
}

/* Query, key and value are width apart; rows are 3 * width apart; heads are head_size apart. */
static void forward_sequence(float *out, float *p, const float *query, const gpt_shape *shape) {
  device *gpu = shape->device;
  const size_t tokens = shape->tokens, width = shape->width, heads = shape->heads, size = width / heads;
  const size_t square = tokens * tokens, stride = 3 * width;
  const float *key = query + width, *value = key + width;
  gpu_multiply_batch(
      gpu, {false, true, tokens, tokens, size, 1.0f / sqrtf((float)size), query, stride, key, stride, 0.0f, p, tokens},
      size, size, square, heads);
  LAUNCH(softmax, (unsigned)(heads * tokens), THREADS, gpu->stream, p, tokens);
  CUDA(cudaPeekAtLastError());
  gpu_multiply_batch(gpu, {false, false, tokens, size, tokens, 1.0f, p, tokens, value, stride, 0.0f, out, width},
                     square, size, size, heads);
}

void gpu_attention_forward(float *out, float *probabilities, const float *qkv, const gpt_shape *shape) {
  const size_t rows = shape->tokens * shape->width, squares = shape->heads * shape->tokens * shape->tokens;
  for (size_t s = 0; s < shape->sequences; ++s)
    forward_sequence(out + s * rows, probabilities + s * squares, qkv + s * 3 * rows, shape);
}

static void backward_sequence(float *d_query, const float *d_out, const float *p, const float *query, float *d_p,
                              const gpt_shape *shape) {
  device *gpu = shape->device;
  const size_t tokens = shape->tokens, width = shape->width, heads = shape->heads, size = width / heads;
  const size_t square = tokens * tokens, stride = 3 * width;
  const float scale = 1.0f / sqrtf((float)size);
  const float *key = query + width, *value = key + width;
  float *d_key = d_query + width, *d_value = d_key + width;
  gpu_multiply_batch(gpu, {true, false, tokens, size, tokens, 1.0f, p, tokens, d_out, width, 0.0f, d_value, stride},
                     square, size, size, heads);
  gpu_multiply_batch(gpu, {false, true, tokens, tokens, size, 1.0f, d_out, width, value, stride, 0.0f, d_p, tokens},
                     size, size, square, heads);
  LAUNCH(softmax_backward, (unsigned)(heads * tokens), THREADS, gpu->stream, d_p, p, tokens);
  CUDA(cudaPeekAtLastError());
  gpu_multiply_batch(gpu, {false, false, tokens, size, tokens, scale, d_p, tokens, key, stride, 0.0f, d_query, stride},
                     square, size, size, heads);
  gpu_multiply_batch(gpu, {true, false, tokens, size, tokens, scale, d_p, tokens, query, stride, 0.0f, d_key, stride},
                     square, size, size, heads);
}

void gpu_attention_backward(float *d_qkv, const float *d_out, const float *probabilities, const float *qkv,
                            float *scratch, const gpt_shape *shape) {
  const size_t rows = shape->tokens * shape->width, squares = shape->heads * shape->tokens * shape->tokens;
  for (size_t s = 0; s < shape->sequences; ++s)
    backward_sequence(d_qkv + s * 3 * rows, d_out + s * rows, probabilities + s * squares, qkv + s * 3 * rows, scratch,
                      shape);
}
