// SPDX-License-Identifier: Apache-2.0
// Is there room for a model where its ranks run? The kernel says no by killing, so it is asked before anything is
// allocated.
#pragma once

#include <cstdint>
#include <vector>

#include "device/memory_limit.h"
#include "memory/model_plan.h"
#include "transport/team.h"

namespace fsdp::engine {

// What rank `inner` of the inner axis will allocate in the host's memory, that which it makes for all of its axis
// included.
uint64_t host_bytes(const memory::ModelPlan &plan, bool host_memory, uint32_t inner, uint32_t inner_size) noexcept;

// Collective: throws OUT_OF_MEMORY, the same on every rank, if ranks that share a cgroup need more together than that
// has free.
void check_room(transport::Team &team, uint64_t bytes, const std::vector<device::MemoryLimit> &limits);

}  // namespace fsdp::engine
