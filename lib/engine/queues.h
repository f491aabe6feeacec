// SPDX-License-Identifier: Apache-2.0
// CUDA puts the streams of a process and GPU into few hardware queues. Streams of one queue wait for each other, and
// where they are of ranks that wait for each other too, as threads of one process, that may be a circle that never
// ends. Lanes of staging see to it that none waits so (device/cuda/lane.h); kernels of NCCL wait for those of peers.
#pragma once

namespace fsdp::engine {

class Context;
struct Teams;

// Collective over the model's ranks, when all streams have been made. Logs a warning on the first of the ranks that
// share the queues of a GPU over NCCL.
void warn_of_queues(Context &context, const Teams &teams);

}  // namespace fsdp::engine
