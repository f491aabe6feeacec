/* SPDX-License-Identifier: Apache-2.0 */
/* train_gpt's device.h for a GPU. */
#include "device.h"

#include <cstdio>
#include <cstdlib>
#include <new>

#include "check.h"
#include "gpu.h"

struct device_graph {
  cudaGraphExec_t graph;
};

void gpu_check(cudaError_t error, const char *call, const char *file, int line) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "train_gpt_cuda: %s: %s: %s (%s:%d)\n", call, cudaGetErrorName(error), cudaGetErrorString(error),
          file, line);
  exit(1);
}

void gpu_check_blas(cublasStatus_t status, const char *call, const char *file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fprintf(stderr, "train_gpt_cuda: %s: %s (%s:%d)\n", call, cublasGetStatusString(status), file, line);
  exit(1);
}

/* The launchers' number of this rank on its host decides; threads of one process share a GPU. */
static int choose_gpu() {
  static const char *const variables[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                          "SLURM_LOCALID"};
  int count = 0;
  CUDA(cudaGetDeviceCount(&count));
  for (const char *variable : variables)
    if (const char *rank = getenv(variable)) return atoi(rank) % count;
  return 0;
}

void device_set_context_options(fsdp_context_options *options) {
  options->device = FSDP_DEVICE_CUDA;
  options->device_index = FSDP_DEVICE_INDEX(choose_gpu());
}

struct device *device_create(fsdp_context *) {
  auto *gpu = static_cast<device *>(check_allocate(sizeof(device)));
  const size_t workspace_bytes = size_t{32} << 20; /* what cuBLAS wants on Hopper */
  gpu->index = choose_gpu();
  CUDA(cudaSetDevice(gpu->index));
  CUDA(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
  CUDA(cudaMalloc(&gpu->workspace, workspace_bytes));
  BLAS(cublasCreate(&gpu->blas));
  BLAS(cublasSetStream(gpu->blas, gpu->stream));
  BLAS(cublasSetWorkspace(gpu->blas, gpu->workspace, workspace_bytes));
  return gpu;
}

void device_destroy(struct device *gpu) {
  BLAS(cublasDestroy(gpu->blas));
  CUDA(cudaStreamSynchronize(gpu->stream));
  CUDA(cudaStreamDestroy(gpu->stream));
  CUDA(cudaFree(gpu->workspace));
  free(gpu);
}

fsdp_stream device_stream(struct device *gpu) { return gpu->stream; }

void *device_allocate(struct device *gpu, size_t size_bytes) {
  void *memory = nullptr;
  CUDA(cudaMalloc(&memory, size_bytes));
  CUDA(cudaMemsetAsync(memory, 0, size_bytes, gpu->stream));
  return memory;
}

void device_free(struct device *, void *memory) { CUDA(cudaFree(memory)); }

void device_upload(struct device *gpu, void *to, const void *from, size_t size_bytes) {
  CUDA(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyHostToDevice, gpu->stream));
  CUDA(cudaStreamSynchronize(gpu->stream));
}

void device_download(struct device *gpu, void *to, const void *from, size_t size_bytes) {
  CUDA(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToHost, gpu->stream));
  CUDA(cudaStreamSynchronize(gpu->stream));
}

void device_zero(struct device *gpu, void *memory, size_t size_bytes) {
  CUDA(cudaMemsetAsync(memory, 0, size_bytes, gpu->stream));
}

__global__ void widen(float *out, const uint16_t *in, uint64_t count) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) reinterpret_cast<uint32_t *>(out)[i] = uint32_t{in[i]} << 16;
}

void device_widen_bfloat16(struct device *gpu, float *out, const uint16_t *in, uint64_t count) {
  LAUNCH(widen, blocks_for(count), THREADS, gpu->stream, out, in, count);
  CUDA(cudaPeekAtLastError());
}

struct blocks {
  const uint8_t *codes;
  const void *scales;
  uint64_t count, columns, block_rows, block_columns, across;
  int are_powers; /* E8M0, else fp32 */
};

__device__ float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent ? ldexpf(8.0f + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return (code & 0x7f) == 0x7f ? nanf("") : code >> 7 ? -magnitude : magnitude;
}

__device__ float e8m0_value(uint8_t code) { return code == 255 ? nanf("") : ldexpf(1.0f, code - 127); }

__global__ void dequantize(float *out, blocks from) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= from.count) return;
  const uint64_t row = i / from.columns, column = i % from.columns;
  const uint64_t block = row / from.block_rows * from.across + column / from.block_columns;
  const float scale = from.are_powers ? e8m0_value(static_cast<const uint8_t *>(from.scales)[block])
                                      : static_cast<const float *>(from.scales)[block];
  out[i] = e4m3_value(from.codes[i]) * scale;
}

void device_dequantize(struct device *gpu, float *out, const struct quantized *weights) {
  const fsdp_tensor &codes = weights->codes, &scales = weights->scales;
  const blocks from{static_cast<const uint8_t *>(codes.data),
                    scales.data,
                    codes.element_count,
                    codes.shape[1],
                    weights->block_rows,
                    weights->block_columns,
                    scales.shape[1],
                    scales.dtype == FSDP_E8M0};
  LAUNCH(dequantize, blocks_for(codes.element_count), THREADS, gpu->stream, out, from);
  CUDA(cudaPeekAtLastError());
}

size_t device_parallel_heads(size_t heads) { return heads; }

int device_has_graphs(void) { return 1; }

void device_capture_begin(struct device *gpu) {
  CUDA(cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal));
}

struct device_graph *device_capture_end(struct device *gpu) {
  cudaGraph_t recorded = nullptr;
  auto *graph = static_cast<device_graph *>(check_allocate(sizeof(device_graph)));
  CUDA(cudaStreamEndCapture(gpu->stream, &recorded));
  CUDA(cudaGraphInstantiate(&graph->graph, recorded, 0));
  CUDA(cudaGraphDestroy(recorded));
  return graph;
}

void device_launch(struct device *gpu, struct device_graph *graph) { CUDA(cudaGraphLaunch(graph->graph, gpu->stream)); }

void device_destroy_graph(struct device_graph *graph) {
  if (!graph) return;
  CUDA(cudaGraphExecDestroy(graph->graph));
  free(graph);
}
