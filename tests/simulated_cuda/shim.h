// SPDX-License-Identifier: Apache-2.0
// Compiles the library's kernels (lib/device/cuda/*.cu) for the host. It must be included before them. The simulated
// runtime's thread for a stream runs blocks one after the other, and also the threads of a block. It shows logic, order
// and bits, but neither a GPU's speed nor races between threads.
#pragma once

#define FSDP_SIMULATED_CUDA 1

#include "base/float_environment.h"
#include "simulated_cuda/enqueue.h"

// CUDA's headers turn these into attributes that only nvcc knows.
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__ static
#define __launch_bounds__(...)
#define __grid_constant__

namespace simulated {

struct Index {
  unsigned x;
};
inline thread_local Index thread_index, block_index;

// Calls run() with the indices of each thread of one block.
template <class Run>
void run_block(unsigned block, unsigned threads, const Run &run) {
  block_index.x = block;
  for (thread_index.x = 0; thread_index.x < threads; ++thread_index.x) run();
}

// GPUs have no rounding or flush modes, so the program's own settings must not apply.
template <class RunBlock>
int launch_blocks(unsigned blocks, CUstream_st *stream, const RunBlock &run_one) {
  const cudaError_t error = enqueue(stream, [blocks, run_one] {
    const fsdp::FloatEnvironment standard;
    for (unsigned block = 0; block < blocks; ++block) run_one(block);
  });
  return static_cast<int>(error);
}

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, CUstream_st *stream,
           const Arguments &...arguments) {
  return launch_blocks(blocks, stream,
                       [=](unsigned block) { run_block(block, threads, [&] { kernel(arguments...); }); });
}

// Each thread runs three functions with barriers between them, and has an object that outlives the functions.
template <class Work>
void run_kept(const Work &work, unsigned block, unsigned threads) {
  typename Work::Shared shared;
  typename Work::Kept kept[Work::threads];
  run_block(block, threads, [&] { work.first(shared, kept[thread_index.x]); });
  run_block(block, threads, [&] { work.second(shared, kept[thread_index.x]); });
  run_block(block, threads, [&] { work.third(shared, kept[thread_index.x]); });
}

// Each thread runs two or three functions with barriers between them.
template <class Work>
void run_phases(const Work &work, unsigned block, unsigned threads) {
  typename Work::Shared shared;
  run_block(block, threads, [&] { work.first(shared); });
  run_block(block, threads, [&] { work.second(shared); });
  if constexpr (requires { work.third(shared); }) run_block(block, threads, [&] { work.third(shared); });
}

template <class Work>
int launch_phased(const Work &work, unsigned blocks, unsigned threads, CUstream_st *stream) {
  return launch_blocks(blocks, stream, [=](unsigned block) {
    if constexpr (requires { typename Work::Kept; })
      run_kept(work, block, threads);
    else
      run_phases(work, block, threads);
  });
}

}  // namespace simulated

#define threadIdx (::simulated::thread_index)
#define blockIdx (::simulated::block_index)
#define FSDP_LAUNCH(kernel, blocks, threads, stream, ...) \
  ::simulated::launch(kernel, blocks, threads, stream, __VA_ARGS__)
#define FSDP_LAUNCH_PHASED(work, blocks, threads, stream) ::simulated::launch_phased(work, blocks, threads, stream)
