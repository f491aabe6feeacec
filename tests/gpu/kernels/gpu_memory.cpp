// SPDX-License-Identifier: Apache-2.0
// Runs the tests of the CUDA kernels over the memory of a real GPU. Without one they are skipped, and say why.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <stdexcept>
#include <string>

#include "../../unit/cuda_memory.h"

namespace fsdp::test {
namespace {

void check(cudaError_t error, const char *what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace

device::cuda::kernels::Stream gpu::stream() {
  static cudaStream_t const stream = [] {
    cudaStream_t created = nullptr;
    check(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return created;
  }();
  return stream;
}

void *gpu::allocate(size_t bytes) {
  void *memory = nullptr;
  check(cudaMalloc(&memory, bytes), "cudaMalloc");
  return memory;
}

void gpu::release(void *memory) { cudaFree(memory); }

void gpu::copy(void *to, const void *from, size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}

}  // namespace fsdp::test

int main(int argc, char **argv) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU: %s\n", error != cudaSuccess ? cudaGetErrorString(error) : "the driver reports none");
    return 77;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
