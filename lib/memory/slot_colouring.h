// SPDX-License-Identifier: Apache-2.0
// Greedy colouring of the conflict graph of pool requests in first-use order. Inside the pool planner only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "memory/live_sweep.h"

namespace fsdp::memory {

struct Colouring {
  std::vector<uint32_t> first_use;  // the requests of the track that have bytes, in order of their first use
  std::vector<uint32_t> slots;      // one a request of the pool; counts for those in first_use
  uint32_t slot_count = 0;
};

Colouring colour_requests(std::span<const PoolRequest> requests, uint32_t track, std::span<const LiveEvent> events);

}  // namespace fsdp::memory
