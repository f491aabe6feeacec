// SPDX-License-Identifier: Apache-2.0
// CUDA puts the streams of a process and GPU into few hardware queues. Streams of one queue wait for each other, and
// where they are of ranks that wait for each other too, as threads of one process, that may be a circle that never
// ends.
#pragma once

#include "comm/team.h"

namespace fsdp::engine {

class Context;

// Collective over the model's ranks, when all streams have been made. Logs a warning on the first of the ranks that
// share too few queues.
void warn_of_queues(Context &context, comm::Team &team);

}  // namespace fsdp::engine
