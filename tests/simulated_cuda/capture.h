// SPDX-License-Identifier: Apache-2.0
// The rules of stream capture, and the one way into a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <vector>

#include "simulated_cuda/runtime.h"

namespace simulated {

// Work in the order of the stream, or a node of its capture. after: work of other streams that it follows; not in a
// capture. work: where to put what was enqueued; nullptr in there if it was captured. waits: `run` waits for a value.
cudaError_t submit(Stream &stream, std::function<void()> run, cudaGraphNodeType type = cudaGraphNodeTypeKernel,
                   std::vector<Work *> after = {}, Work **work = nullptr, bool waits = false);

bool is_legacy(const Stream &stream);
bool is_capturing(Stream &stream);

// For calls that ask or wait for the stream. They are refused while the stream is capturing, and on the legacy stream
// while a stream that it waits for is.
cudaError_t refuse_capture(Stream &stream);
cudaError_t refuse_capture(Device &device);
// For potentially unsafe calls of this thread.
cudaError_t refuse_unsafe_call();

cudaError_t begin_capture(Stream &stream, cudaStreamCaptureMode mode);
cudaError_t end_capture(Stream &stream, cudaGraph_t *graph);
cudaError_t record_event(Event &event, Stream &stream);
cudaError_t wait_event(Stream &stream, const Event &event);
// cudaErrorCapturedEvent if the event stands for nodes of a graph.
cudaError_t refuse_captured(const Recorded &recorded);

// All that the stream was given is done when these are.
std::vector<Work *> outstanding(Stream &stream);
// Blocks until all streams of the device, also those destroyed, have done what they were given.
void finish_all_work(Device &device);

}  // namespace simulated
