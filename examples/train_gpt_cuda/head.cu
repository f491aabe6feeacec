/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu.h"

static_assert(VOCABULARY == THREADS, "a thread for each logit of a row");

void head_forward(float *norm, float *logits, const float *x, const gpt_weights *weights, const gpt_shape *shape) {
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  gpu_norm_forward(shape->device, norm, x, weights->of[FINAL_NORM_WEIGHT], weights->of[FINAL_NORM_BIAS], rows, width);
  gpu_linear_forward(shape->device, logits, norm, weights->of[HEAD_WEIGHT], rows, width, VOCABULARY, 0.0f);
}

/* -log softmax(row)[target]; the row becomes (softmax(row) - one_hot(target)) * mean. A block for each row. */
__global__ void cross_entropy(double *row_losses, float *logits, const uint8_t *targets, float mean) {
  __shared__ lanes shared;
  const size_t row = blockIdx.x;
  float *const own = logits + row * VOCABULARY + threadIdx.x;
  const float shifted = *own - find_largest(*own, shared);
  const float power = expf(shifted);
  const float total = add_threads(power, shared);
  const bool is_target = threadIdx.x == targets[row];
  *own = (power / total - (is_target ? 1.0f : 0.0f)) * mean;
  if (is_target) row_losses[row] = log((double)total) - (double)shifted;
}

/* One thread: rows are few, and in order the sum is always the same. */
__global__ void add_losses(double *loss, const double *row_losses, size_t rows) {
  double total = 0.0;
  for (size_t row = 0; row < rows; ++row) total += row_losses[row];
  *loss += total / (double)rows;
}

void head_loss(double *loss, float *logits, const uint8_t *targets, gpt_scratch *scratch, const gpt_shape *shape) {
  const size_t rows = shape->sequences * shape->tokens;
  LAUNCH(cross_entropy, (unsigned)rows, THREADS, shape->device->stream, scratch->sums, logits, targets,
         1.0f / (float)rows);
  LAUNCH(add_losses, 1, 1, shape->device->stream, loss, (const double *)scratch->sums, rows);
  CUDA(cudaPeekAtLastError());
}

void head_backward(float *d, const float *x, const float *norm, const float *d_logits, const gpt_weights *weights,
                   gpt_gradients *gradients, gpt_scratch *scratch, const gpt_shape *shape) {
  const gradient *g = gradients->of;
  device *gpu = shape->device;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  gpu_linear_backward_weight(gpu, g[HEAD_WEIGHT], d_logits, norm, rows, width, VOCABULARY);
  gpu_linear_backward_input(gpu, scratch->narrow, d_logits, weights->of[HEAD_WEIGHT], rows, width, VOCABULARY);
  device_zero(gpu, d, rows * width * sizeof *d);
  gpu_norm_backward(gpu, d, g[FINAL_NORM_WEIGHT], g[FINAL_NORM_BIAS], scratch->narrow, x,
                    weights->of[FINAL_NORM_WEIGHT], reinterpret_cast<float *>(scratch->sums), rows, width);
}
