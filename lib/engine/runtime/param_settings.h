// SPDX-License-Identifier: Apache-2.0
// Settings of a model's parameters that may change from step to step and must be equal on all ranks: which parameters
// are trained (fsdp_set_param_trainable), and their lr_scales (fsdp_set_param_lr_scale). Meetings compare a hash of the
// present settings of all parameters and not of their history, so ranks that set different values can make them equal
// again.
#pragma once

#include <cstdint>
#include <string>

#include "memory/model_spec.h"
#include "transport/team.h"

namespace fsdp::engine {

uint64_t hash_trained(const memory::ModelSpec &spec) noexcept;
uint64_t hash_lr_scales(const memory::ModelSpec &spec) noexcept;
// Are all parameters trained that were not declared as frozen?
bool trains_all(const memory::ModelSpec &spec) noexcept;
// Collective over the team; called when the team knows that these two ranks differ. Returns a text about the first
// parameter in which they differ.
std::string compare_trained(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd);
std::string compare_lr_scales(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd);

}  // namespace fsdp::engine
