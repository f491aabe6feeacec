/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm, or RMSNorm where there is no bias: a block for each row. */
#include "gpu.h"

#define NORM_EPSILON 1e-5f

struct row_statistics {
  float mean;
  float rstd; /* 1 / standard deviation */
};

__device__ static row_statistics measure_row(const float *in, bool centered, size_t width, lanes &shared) {
  row_statistics row = {0.0f, 0.0f};
  float sum = 0.0f, squares = 0.0f;
  if (centered) {
    for (size_t i = threadIdx.x; i < width; i += THREADS) sum += in[i];
    row.mean = add_threads(sum, shared) / (float)width;
  }
  for (size_t i = threadIdx.x; i < width; i += THREADS) squares += (in[i] - row.mean) * (in[i] - row.mean);
  row.rstd = 1.0f / sqrtf(add_threads(squares, shared) / (float)width + NORM_EPSILON);
  return row;
}

__global__ void normalize(float *out, const float *in, const float *weight, const float *bias, size_t width) {
  __shared__ lanes shared;
  in += blockIdx.x * width;
  out += blockIdx.x * width;
  const row_statistics row = measure_row(in, bias != nullptr, width, shared);
  for (size_t i = threadIdx.x; i < width; i += THREADS) {
    const float value = (in[i] - row.mean) * row.rstd * weight[i];
    out[i] = bias ? value + bias[i] : value;
  }
}

void gpu_norm_forward(device *gpu, float *out, const float *in, const float *weight, const float *bias, size_t rows,
                      size_t width) {
  LAUNCH(normalize, (unsigned)rows, THREADS, gpu->stream, out, in, weight, bias, width);
  CUDA(cudaPeekAtLastError());
}

/* With n = (x - mean) rstd and g = d_out weight:  d_in += rstd (g - mean(g) - n mean(g n)); RMSNorm lacks mean(g). */
__global__ void normalize_backward(float *d_in, float *statistics, const float *d_out, const float *in,
                                   const float *weight, bool centered, size_t width) {
  __shared__ lanes shared;
  in += blockIdx.x * width;
  d_in += blockIdx.x * width;
  d_out += blockIdx.x * width;
  const row_statistics row = measure_row(in, centered, width, shared);
  float g_sum = 0.0f, gn_sum = 0.0f;
  for (size_t i = threadIdx.x; i < width; i += THREADS) {
    const float g = d_out[i] * weight[i];
    g_sum += g;
    gn_sum += g * (in[i] - row.mean) * row.rstd;
  }
  const float g_mean = add_threads(g_sum, shared) / (float)width;
  const float gn_mean = add_threads(gn_sum, shared) / (float)width;
  for (size_t i = threadIdx.x; i < width; i += THREADS) {
    const float n = (in[i] - row.mean) * row.rstd;
    d_in[i] += row.rstd * (d_out[i] * weight[i] - (centered ? g_mean : 0.0f) - n * gn_mean);
  }
  if (threadIdx.x == 0) {
    statistics[2 * blockIdx.x] = row.mean;
    statistics[2 * blockIdx.x + 1] = row.rstd;
  }
}

/* A block for each column: the sum over the rows of d_out n. */
__global__ void add_weight_columns(float *sums, float beta, const float *d_out, const float *in,
                                   const float *statistics, size_t rows, size_t width) {
  __shared__ lanes shared;
  float sum = 0.0f;
  for (size_t row = threadIdx.x; row < rows; row += THREADS) {
    const float n = (in[row * width + blockIdx.x] - statistics[2 * row]) * statistics[2 * row + 1];
    sum += d_out[row * width + blockIdx.x] * n;
  }
  sum = add_threads(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = beta == 0.0f ? sum : sums[blockIdx.x] + sum;
}

void gpu_norm_backward(device *gpu, float *d_in, gradient d_weight, gradient d_bias, const float *d_out,
                       const float *in, const float *weight, float *statistics, size_t rows, size_t width) {
  const bool centered = d_bias.data != nullptr;
  if (centered) gpu_bias_backward(gpu, d_bias, d_out, rows, width, width);
  LAUNCH(normalize_backward, (unsigned)rows, THREADS, gpu->stream, d_in, statistics, d_out, in, weight, centered,
         width);
  LAUNCH(add_weight_columns, (unsigned)width, THREADS, gpu->stream, d_weight.data, d_weight.beta, d_out, in,
         (const float *)statistics, rows, width);
  CUDA(cudaPeekAtLastError());
}
