// SPDX-License-Identifier: Apache-2.0
// What may change of a model's parameters from step to step and must be alike on all ranks: which are trained
// (fsdp_set_param_trainable), and their lr_scales (fsdp_set_param_lr_scale). Meetings compare a hash of what all
// parameters have, and not of how they came to it: ranks that set different values can set them alike again.
#pragma once

#include <cstdint>
#include <string>

#include "memory/model_spec.h"
#include "transport/team.h"

namespace fsdp::engine {

uint64_t hash_trained(const memory::ModelSpec &spec) noexcept;
uint64_t hash_lr_scales(const memory::ModelSpec &spec) noexcept;
// Of what was not declared frozen.
bool trains_all(const memory::ModelSpec &spec) noexcept;

// Collective over the team, whose ranks have come to know that these two of them differ: the first parameter in which
// they do, as text.
std::string compare_trained(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd);
std::string compare_lr_scales(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd);

}  // namespace fsdp::engine
