// SPDX-License-Identifier: Apache-2.0
// Compiled kernels need only this function of the simulated runtime. A test of kernels alone may define it to run them
// at once.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace simulated {

// Stands for cudaLaunchKernel. The kernel runs in order on the stream's thread. If the stream is being captured, the
// kernel becomes a node of the graph, which may run it any number of times.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> kernel);

}  // namespace simulated
