// SPDX-License-Identifier: Apache-2.0
// Applies the rules of stream capture. All work enters a stream through this file.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "simulated_cuda/runtime.h"

namespace simulated {

// Adds work to the stream in order, or a node to its capture. `after` is work of other streams that must come first; a
// capture has none. The enqueued work is stored at `work`, or nullptr if it was captured. `waits` says that `run` waits
// for a value.
cudaError_t submit(Stream &stream, std::function<void()> run, cudaGraphNodeType type = cudaGraphNodeTypeKernel,
                   std::vector<Work *> after = {}, Work **work = nullptr, bool waits = false);

bool is_legacy(const Stream &stream);
bool is_capturing(Stream &stream);

// Calls that query the stream or wait for it check this first. They are refused while the stream is capturing, and on
// the legacy stream while a blocking stream is.
cudaError_t refuse_capture(Stream &stream);
cudaError_t refuse_capture(Device &device);
// Potentially unsafe calls of this thread check this first.
cudaError_t refuse_unsafe_call();

cudaError_t begin_capture(Stream &stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(Stream &stream, cudaGraph_t *graph);
cudaError_t record_event(Event &event, Stream &stream);
cudaError_t wait_event(Stream &stream, const Event &event);
// Returns cudaErrorCapturedEvent if the event stands for nodes of a graph.
cudaError_t refuse_captured(const Recorded &recorded);

// Returns the work that must be done before the stream is idle.
std::vector<Work *> outstanding(Stream &stream);
// Blocks until all streams of the device have done their work. Destroyed streams are included.
void finish_all_work(Device &device);

}  // namespace simulated
