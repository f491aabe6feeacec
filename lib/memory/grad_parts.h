// SPDX-License-Identifier: Apache-2.0
// Full gradients that take turns in memory are lent, reduced and drained part by part. A part is a whole group, unless
// max_pending_bytes leaves too little room. In that case a part is a run of the group's trainable parameters in the
// order declared, because a backward pass reaches them one after the other. Each part has its own layout, so that all
// ranks sum equally many elements of it. Only for the memory room.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/model_spec.h"

namespace fsdp::memory {

// How groups are divided into parts.
struct GradCut {
  uint32_t pending = 0;              // full gradients alive at once, besides those that several visits keep open
  uint64_t part_bytes = UINT64_MAX;  // maximum bytes of a part that has several parameters
};

// The cuts to try, the best first: those with the most gradients alive at once, then those with the fewest parts. The
// last cut takes the least memory.
std::vector<GradCut> list_cuts(const ModelSpec &spec);
// Returns each parameter's part: its number in the group, from 0. The number of a frozen parameter is unused.
std::vector<uint32_t> cut_group(const GroupSpec &group, const GradCut &cut);

// Throws INVALID_ARGUMENT, which says what does not fit. `least_bytes` is the least sufficient limit.
[[noreturn]] void refuse_pending_bytes(const ModelSpec &spec, uint64_t least_bytes);

}  // namespace fsdp::memory
