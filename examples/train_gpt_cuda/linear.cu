/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products by cuBLAS, and biases. */
#include "gpu.h"

/* cuBLAS has columns where C has rows: it sees every matrix transposed, so a and b change places. */
void gpu_multiply_batch(device *gpu, const product &p, size_t step_a, size_t step_b, size_t step_c, size_t count) {
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  BLAS(cublasSgemmStridedBatched(gpu->blas, op(p.transposed_b), op(p.transposed_a), (int)p.n, (int)p.m, (int)p.k,
                                 &p.alpha, p.b, (int)p.stride_b, (long long)step_b, p.a, (int)p.stride_a,
                                 (long long)step_a, &p.beta, p.c, (int)p.stride_c, (long long)step_c, (int)count));
}

void gpu_multiply(device *gpu, const product &p) { gpu_multiply_batch(gpu, p, 0, 0, 0, 1); }

void gpu_linear_forward(device *gpu, float *out, const float *in, const float *weight, size_t rows, size_t in_width,
                        size_t out_width, float beta) {
  gpu_multiply(gpu,
               {false, true, rows, out_width, in_width, 1.0f, in, in_width, weight, in_width, beta, out, out_width});
}

void gpu_linear_backward_input(device *gpu, float *d_in, const float *d_out, const float *weight, size_t rows,
                               size_t in_width, size_t out_width) {
  gpu_multiply(
      gpu, {false, false, rows, in_width, out_width, 1.0f, d_out, out_width, weight, in_width, 0.0f, d_in, in_width});
}

void gpu_linear_backward_weight(device *gpu, gradient d_weight, const float *d_out, const float *in, size_t rows,
                                size_t in_width, size_t out_width) {
  gpu_multiply(gpu, {true, false, out_width, in_width, rows, 1.0f, d_out, out_width, in, in_width, d_weight.beta,
                     d_weight.data, in_width});
}

__global__ void add_bias(float *out, const float *bias, size_t rows, size_t width, size_t stride) {
  const size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < rows * width) out[i / width * stride + i % width] += bias[i % width];
}

void gpu_bias_forward(device *gpu, float *out, const float *bias, size_t rows, size_t width, size_t stride) {
  LAUNCH(add_bias, blocks_for(rows * width), THREADS, gpu->stream, out, bias, rows, width, stride);
  CUDA(cudaPeekAtLastError());
}

/* A block for each column, so that no sum depends on which block comes first. */
__global__ void add_columns(float *sums, float beta, const float *d_out, size_t rows, size_t stride) {
  __shared__ lanes shared;
  float sum = 0.0f;
  for (size_t row = threadIdx.x; row < rows; row += THREADS) sum += d_out[row * stride + blockIdx.x];
  sum = add_threads(sum, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = beta == 0.0f ? sum : sums[blockIdx.x] + sum;
}

void gpu_bias_backward(device *gpu, gradient d_bias, const float *d_out, size_t rows, size_t width, size_t stride) {
  LAUNCH(add_columns, (unsigned)width, THREADS, gpu->stream, d_bias.data, d_bias.beta, d_out, rows, stride);
  CUDA(cudaPeekAtLastError());
}
