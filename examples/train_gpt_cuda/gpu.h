/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's GPU, for the files that work on it: its stream, cuBLAS, and how errors end the program. */
#ifndef TRAIN_GPT_CUDA_GPU_H
#define TRAIN_GPT_CUDA_GPU_H

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include "device.h"
#include "gpt.h"
#include "launch.h"

struct device {
  int index;
  cudaStream_t stream;
  cublasHandle_t blas;
  void *workspace; /* cuBLAS's: with one of its own a captured product could not be replayed */
};

#define CUDA(call) gpu_check((call), #call, __FILE__, __LINE__)
#define BLAS(call) gpu_check_blas((call), #call, __FILE__, __LINE__)
void gpu_check(cudaError_t error, const char *call, const char *file, int line);
void gpu_check_blas(cublasStatus_t status, const char *call, const char *file, int line);

/* Threads of a block where each takes one element, or all of them one row. */
constexpr int THREADS = 256;
inline unsigned blocks_for(size_t count) { return (unsigned)((count + THREADS - 1) / THREADS); }

/* One value of each thread of a block becomes one for all of them, in two rounds and always in the same order. */
constexpr int PARTS = 16;
struct lanes {
  float of_thread[THREADS];
  float of_part[PARTS];
};
template <class Combine>
__device__ inline float combine_threads(float value, lanes &shared, Combine combine) {
  const int thread = (int)threadIdx.x;
  shared.of_thread[thread] = value;
  __syncthreads();
  if (thread < PARTS) {
    float part = shared.of_thread[thread * (THREADS / PARTS)];
    for (int i = 1; i < THREADS / PARTS; ++i) part = combine(part, shared.of_thread[thread * (THREADS / PARTS) + i]);
    shared.of_part[thread] = part;
  }
  __syncthreads();
  float all = shared.of_part[0];
  for (int i = 1; i < PARTS; ++i) all = combine(all, shared.of_part[i]);
  __syncthreads(); /* the next one may write */
  return all;
}
struct add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct larger {
  __device__ float operator()(float a, float b) const { return b > a ? b : a; }
};
__device__ inline float add_threads(float value, lanes &shared) { return combine_threads(value, shared, add()); }
__device__ inline float find_largest(float value, lanes &shared) { return combine_threads(value, shared, larger()); }

/* What gpt.h's functions are made of; rows, widths and gradients as in train_gpt's linear.h, norm.h, attention.h. */
void gpu_linear_forward(device *gpu, float *out, const float *in, const float *weight, size_t rows, size_t in_width,
                        size_t out_width, float beta);
void gpu_linear_backward_input(device *gpu, float *d_in, const float *d_out, const float *weight, size_t rows,
                               size_t in_width, size_t out_width);
void gpu_linear_backward_weight(device *gpu, gradient d_weight, const float *d_out, const float *in, size_t rows,
                                size_t in_width, size_t out_width);
void gpu_bias_forward(device *gpu, float *out, const float *bias, size_t rows, size_t width, size_t stride);
void gpu_bias_backward(device *gpu, gradient d_bias, const float *d_out, size_t rows, size_t width, size_t stride);
void gpu_norm_forward(device *gpu, float *out, const float *in, const float *weight, const float *bias, size_t rows,
                      size_t width);
/* statistics: 2 * rows elements of scratch. */
void gpu_norm_backward(device *gpu, float *d_in, gradient d_weight, gradient d_bias, const float *d_out,
                       const float *in, const float *weight, float *statistics, size_t rows, size_t width);
void gpu_attention_forward(float *out, float *probabilities, const float *qkv, const gpt_shape *shape);
/* scratch: heads * tokens * tokens elements. */
void gpu_attention_backward(float *d_qkv, const float *d_out, const float *probabilities, const float *qkv,
                            float *scratch, const gpt_shape *shape);
void gpu_gelu_forward(device *gpu, float *out, const float *in, size_t count);
void gpu_gelu_backward(device *gpu, float *d, const float *in, size_t count);
void gpu_copy(device *gpu, float *to, const float *from, size_t count);

/* One product of row-major matrices: c [m, n] = alpha * op(a) op(b) + beta * c. */
struct product {
  bool transposed_a, transposed_b;
  size_t m, n, k;
  float alpha;
  const float *a;
  size_t stride_a; /* elements from one row to the next */
  const float *b;
  size_t stride_b;
  float beta;
  float *c;
  size_t stride_c;
};
void gpu_multiply(device *gpu, const product &product);
/* `count` products at once; the elements from one to the next of a, b and c. */
void gpu_multiply_batch(device *gpu, const product &product, size_t step_a, size_t step_b, size_t step_c, size_t count);

#endif
