// SPDX-License-Identifier: Apache-2.0
// Runs the ranks of a host as threads of one process, on simulated GPUs, because the simulated NCCL joins only threads.
// Between hosts, bytes travel as they do when ranks are processes.
#pragma once

#include <nlohmann/json.hpp>

#include "options.h"

namespace network {

// options: neighbours=COUNT, gpus=chosen|nccl|staging; RANK and WORLD_SIZE count processes. With discard=1 each rank
// begins a different step before it trains, and all ranks discard it. Says "training" when all ranks of this process
// train. At the end it reports the outcome of each rank, in the order of ranks, with the lines of its log.
nlohmann::json live_as_neighbours(const Options &options);

}  // namespace network
