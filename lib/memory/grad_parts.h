// SPDX-License-Identifier: Apache-2.0
// Full gradients that take turns are lent, reduced and drained by parts. A part is a whole group, unless
// max_pending_bytes leaves no room for that. Then it is a run of the group's trainable parameters in the order
// declared, since a backward pass comes to them one after the other. Each part has a layout of its own, so that every
// rank sums as much of it as the others. Inside the memory room only.
#pragma once

#include <cstdint>
#include <vector>

#include "memory/model_spec.h"

namespace fsdp::memory {

// How groups are cut.
struct GradCut {
  uint32_t pending = 0;              // full gradients alive at once, besides those that are open during other visits
  uint64_t part_bytes = UINT64_MAX;  // no part of several parameters has more
};

// What is tried, the best first: the most alive at once, then the fewest parts. The last one takes the least memory.
std::vector<GradCut> list_cuts(const ModelSpec &spec);
// By parameter: its part in the group, from 0; that of a frozen one says nothing.
std::vector<uint32_t> cut_group(const GroupSpec &group, const GradCut &cut);

// INVALID_ARGUMENT that says what does not fit: least_bytes is what would.
[[noreturn]] void refuse_pending_bytes(const ModelSpec &spec, uint64_t least_bytes);

}  // namespace fsdp::memory
