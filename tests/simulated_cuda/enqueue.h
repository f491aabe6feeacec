// SPDX-License-Identifier: Apache-2.0
// All that compiled kernels need of the simulated runtime. A test of kernels alone may define it to run them at once.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace simulated {

// cudaLaunchKernel of the simulated runtime. The kernel runs on the stream's thread in its order, or becomes a node of
// the graph that the stream is being captured into, which may run it any number of times.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> kernel);

}  // namespace simulated
