/* SPDX-License-Identifier: Apache-2.0 */
/* gpt.h's blocks on a GPU: the same operations in the same order as train_gpt's block.c. */
#include "gpu.h"

#define TWO_ROOT_TWO_OVER_PI 1.5957691216f
#define CUBIC 0.044715f

__device__ static float sigmoid_2u(float x) {
  return 1.0f / (1.0f + expf(-TWO_ROOT_TWO_OVER_PI * (x + CUBIC * x * x * x)));
}

__global__ void gelu(float *out, const float *in, size_t count) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) out[i] = in[i] * sigmoid_2u(in[i]);
}

__global__ void gelu_backward(float *d, const float *in, size_t count) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float x = in[i], s = sigmoid_2u(x);
  d[i] *= s + x * s * (1.0f - s) * TWO_ROOT_TWO_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
}

void gpu_gelu_forward(device *gpu, float *out, const float *in, size_t count) {
  LAUNCH(gelu, blocks_for(count), THREADS, gpu->stream, out, in, count);
  CUDA(cudaPeekAtLastError());
}

void gpu_gelu_backward(device *gpu, float *d, const float *in, size_t count) {
  LAUNCH(gelu_backward, blocks_for(count), THREADS, gpu->stream, d, in, count);
  CUDA(cudaPeekAtLastError());
}

void gpu_copy(device *gpu, float *to, const float *from, size_t count) {
  CUDA(cudaMemcpyAsync(to, from, count * sizeof *to, cudaMemcpyDeviceToDevice, gpu->stream));
}

static void attention_half_forward(const float *x, const gpt_weights *weights, block_activations *kept,
                                   const gpt_shape *shape) {
  device *gpu = shape->device;
  const float *const *w = weights->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  gpu_norm_forward(gpu, kept->norm1, x, w[NORM1_WEIGHT], w[NORM1_BIAS], rows, width);
  gpu_linear_forward(gpu, kept->qkv, kept->norm1, w[QKV_WEIGHT], rows, width, 3 * width, 0.0f);
  gpu_bias_forward(gpu, kept->qkv, w[QUERY_BIAS], rows, width, 3 * width);
  gpu_bias_forward(gpu, kept->qkv + 2 * width, w[VALUE_BIAS], rows, width, 3 * width);
  gpu_attention_forward(kept->attention, kept->probabilities, kept->qkv, shape);
  gpu_copy(gpu, kept->middle, x, rows * width);
  gpu_linear_forward(gpu, kept->middle, kept->attention, w[PROJECTION_WEIGHT], rows, width, width, 1.0f);
  gpu_bias_forward(gpu, kept->middle, w[PROJECTION_BIAS], rows, width, width);
}

void block_forward(float *y, const float *x, const gpt_weights *weights, block_activations *kept,
                   const gpt_shape *shape) {
  device *gpu = shape->device;
  const float *const *w = weights->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  attention_half_forward(x, weights, kept, shape);
  gpu_norm_forward(gpu, kept->norm2, kept->middle, w[NORM2_WEIGHT], w[NORM2_BIAS], rows, width);
  gpu_linear_forward(gpu, kept->up, kept->norm2, w[UP_WEIGHT], rows, width, 4 * width, 0.0f);
  gpu_bias_forward(gpu, kept->up, w[UP_BIAS], rows, 4 * width, 4 * width);
  gpu_gelu_forward(gpu, kept->gelu, kept->up, rows * 4 * width);
  gpu_copy(gpu, y, kept->middle, rows * width);
  gpu_linear_forward(gpu, y, kept->gelu, w[DOWN_WEIGHT], rows, 4 * width, width, 1.0f);
  gpu_bias_forward(gpu, y, w[DOWN_BIAS], rows, width, width);
}

static float *statistics_of(const gpt_scratch *scratch) { return reinterpret_cast<float *>(scratch->sums); }

/* d is the residual stream's gradient: what comes through the MLP is added to what passes by it. */
static void mlp_half_backward(float *d, const gpt_weights *weights, gpt_gradients *gradients,
                              const block_activations *kept, gpt_scratch *scratch, const gpt_shape *shape) {
  device *gpu = shape->device;
  const float *const *w = weights->of;
  const gradient *g = gradients->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  gpu_linear_backward_weight(gpu, g[DOWN_WEIGHT], d, kept->gelu, rows, 4 * width, width);
  gpu_bias_backward(gpu, g[DOWN_BIAS], d, rows, width, width);
  gpu_linear_backward_input(gpu, scratch->hidden, d, w[DOWN_WEIGHT], rows, 4 * width, width);
  gpu_gelu_backward(gpu, scratch->hidden, kept->up, rows * 4 * width);
  gpu_linear_backward_weight(gpu, g[UP_WEIGHT], scratch->hidden, kept->norm2, rows, width, 4 * width);
  gpu_bias_backward(gpu, g[UP_BIAS], scratch->hidden, rows, 4 * width, 4 * width);
  gpu_linear_backward_input(gpu, scratch->narrow, scratch->hidden, w[UP_WEIGHT], rows, width, 4 * width);
  gpu_norm_backward(gpu, d, g[NORM2_WEIGHT], g[NORM2_BIAS], scratch->narrow, kept->middle, w[NORM2_WEIGHT],
                    statistics_of(scratch), rows, width);
}

static void attention_half_backward(float *d, const float *x, const gpt_weights *weights, gpt_gradients *gradients,
                                    const block_activations *kept, gpt_scratch *scratch, const gpt_shape *shape) {
  device *gpu = shape->device;
  const float *const *w = weights->of;
  const gradient *g = gradients->of;
  const size_t rows = shape->sequences * shape->tokens, width = shape->width;
  gpu_linear_backward_weight(gpu, g[PROJECTION_WEIGHT], d, kept->attention, rows, width, width);
  gpu_bias_backward(gpu, g[PROJECTION_BIAS], d, rows, width, width);
  gpu_linear_backward_input(gpu, scratch->narrow, d, w[PROJECTION_WEIGHT], rows, width, width);
  gpu_attention_backward(scratch->qkv, scratch->narrow, kept->probabilities, kept->qkv, scratch->square, shape);
  gpu_linear_backward_weight(gpu, g[QKV_WEIGHT], scratch->qkv, kept->norm1, rows, width, 3 * width);
  gpu_bias_backward(gpu, g[QUERY_BIAS], scratch->qkv, rows, width, 3 * width);
  gpu_bias_backward(gpu, g[VALUE_BIAS], scratch->qkv + 2 * width, rows, width, 3 * width);
  gpu_linear_backward_input(gpu, scratch->narrow, scratch->qkv, w[QKV_WEIGHT], rows, width, 3 * width);
  gpu_norm_backward(gpu, d, g[NORM1_WEIGHT], g[NORM1_BIAS], scratch->narrow, x, w[NORM1_WEIGHT], statistics_of(scratch),
                    rows, width);
}

void block_backward(float *d, const float *x, const gpt_weights *weights, gpt_gradients *gradients,
                    const block_activations *kept, gpt_scratch *scratch, const gpt_shape *shape) {
  mlp_half_backward(d, weights, gradients, kept, scratch, shape);
  attention_half_backward(d, x, weights, gradients, kept, scratch, shape);
}
