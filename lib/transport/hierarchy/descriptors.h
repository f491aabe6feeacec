// SPDX-License-Identifier: Apache-2.0
// Which ranks need how many descriptors for a job over several hosts, by what all of them know once they have met.
#pragma once

#include <optional>
#include <string_view>

#include "base/error.h"
#include "transport/descriptors.h"

namespace fsdp::transport {

// Of the rank that leads this host; no other one needs any. For the job itself: a model's meshes need more, counted
// when it is sealed.
DescriptorNeed need_of_leader(uint32_t node, uint32_t node_count);
// FSDP_SYSTEM, naming a rank that may not have as many as it needs.
std::optional<Error> find_shortage_of(uint32_t rank, std::string_view host, const Descriptors &has,
                                      const DescriptorNeed &need);

}  // namespace fsdp::transport
