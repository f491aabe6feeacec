// SPDX-License-Identifier: Apache-2.0
// Runs the ranks of a host as threads of one process, on simulated GPUs, because the simulated NCCL joins only threads.
// Between hosts, bytes travel as they do when ranks are processes.
#pragma once

#include <nlohmann/json.hpp>

#include "options.h"

namespace network {

// options: neighbours=COUNT, gpus=chosen|nccl|staging; RANK and WORLD_SIZE count processes. discard=1: before it
// trains, each rank has begun a step in its own way, and all discard it. Says "training" when all ranks of this process
// do, and at the end the outcome of each, in the order of ranks, with what its log has said.
nlohmann::json live_as_neighbours(const Options &options);

}  // namespace network
