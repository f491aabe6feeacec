// SPDX-License-Identifier: Apache-2.0
// The ranks of a host as threads of one process, on simulated GPUs: what NCCL's look-alike needs, which joins threads
// alone. Between hosts bytes travel as between those of processes.
#pragma once

#include <nlohmann/json.hpp>

#include "options.h"

namespace network {

// options: neighbours=COUNT, gpus=chosen|nccl|staging; RANK and WORLD_SIZE count processes. discard=1: before it
// trains, each rank has begun a step in its own way, and all discard it. Says "training" when all ranks of this process
// do, and at the end the outcome of each, in the order of ranks, with what its log has said.
nlohmann::json live_as_neighbours(const Options &options);

}  // namespace network
