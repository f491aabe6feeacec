// SPDX-License-Identifier: Apache-2.0
// Which ranks need how many descriptors for a job over several hosts, by what all of them know once they have met.
#pragma once

#include <span>
#include <string>

#include "comm/descriptors.h"
#include "comm/hybrid/card.h"

namespace fsdp::comm {

// node_of: of each rank. What it needs for the job itself; a model's meshes need more, counted when it is sealed.
DescriptorNeed need_of(uint32_t rank, std::span<const uint32_t> node_of);
// Throws FSDP_SYSTEM naming the first rank that may not have as many as it needs: the same on all ranks.
void check_descriptors(std::span<const Card> cards, std::span<const uint32_t> node_of,
                       std::span<const std::string> hosts);

}  // namespace fsdp::comm
