/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiles train_gpt_cuda's kernels for the host. Blocks run one after the other on the simulated stream's thread, and
 * the threads of a block are coroutines that switch at __syncthreads. It shows that the example computes the same as
 * train_gpt, and nothing about speed.
 */
#pragma once

#include <cmath>
#include <functional>

#include "simulated_cuda/enqueue.h"

#undef __global__
#undef __device__
#undef __shared__
#define __global__ static
#define __device__
#define __shared__ static thread_local /* blocks of a thread come one after the other */

namespace simulated {

struct Index {
  unsigned x;
};
inline thread_local Index thread_index, block_index, block_size;

/* Runs one block, and calls the kernel once for each of its threads. */
void run_block(unsigned threads, const std::function<void()> &kernel);
void await_block();

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, cudaStream_t stream,
            const Arguments &...arguments) {
  enqueue(stream, [=] {
    for (unsigned block = 0; block < blocks; ++block) {
      block_index.x = block;
      block_size.x = threads;
      run_block(threads, [&] { kernel(arguments...); });
    }
  });
}

}  // namespace simulated

#define threadIdx (::simulated::thread_index)
#define blockIdx (::simulated::block_index)
#define blockDim (::simulated::block_size)
#define __syncthreads() ::simulated::await_block()
#define LAUNCH(kernel, blocks, threads, stream, ...) ::simulated::launch(kernel, blocks, threads, stream, __VA_ARGS__)
