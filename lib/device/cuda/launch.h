// SPDX-License-Identifier: Apache-2.0
// The one way to start a kernel: under nvcc a launch, in the simulation (whose shim comes first and has these two
// already) a function in the stream's queue. Both give a cudaError_t as int, and copy the arguments.
//
// FSDP_LAUNCH(kernel, blocks, threads, stream, arguments...): a __global__ function whose threads need nothing of each
// other. FSDP_LAUNCH_PHASED(work, blocks, threads, stream): work.first(shared) in all threads of a block, then
// work.second(shared) in all of them, with one object of the type Work::Shared per block, of no initial value. A
// barrier in a kernel would need threads that can be suspended in the simulation; two functions do not.
#pragma once

#ifndef FSDP_SIMULATED_CUDA
#include <cuda_runtime.h>

namespace fsdp::device::cuda {

// Not <<<>>>, whose error has to be fetched from where other calls' errors are left as well.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, CUstream_st *stream,
           const Arguments &...arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class Work>
__global__ void __launch_bounds__(Work::threads) phased(const __grid_constant__ Work work) {
  __shared__ typename Work::Shared shared;
  work.first(shared);
  __syncthreads();
  work.second(shared);
}

}  // namespace fsdp::device::cuda

#define FSDP_LAUNCH(kernel, blocks, threads, stream, ...) \
  ::fsdp::device::cuda::launch(kernel, blocks, threads, stream, __VA_ARGS__)
#define FSDP_LAUNCH_PHASED(work, blocks, threads, stream) \
  ::fsdp::device::cuda::launch(::fsdp::device::cuda::phased<decltype(work)>, blocks, threads, stream, work)

#endif
