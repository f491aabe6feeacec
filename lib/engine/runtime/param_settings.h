// SPDX-License-Identifier: Apache-2.0
// Which of a model's parameters are trained, as fsdp_set_param_trainable says it from step to step. Meetings compare a
// hash of it, as they do of lr_scales (lr_scales.h).
#pragma once

#include <cstdint>
#include <string>

#include "memory/model_spec.h"
#include "transport/team.h"

namespace fsdp::engine {

uint64_t hash_trained(const memory::ModelSpec &spec) noexcept;
// Of what was not declared frozen.
bool trains_all(const memory::ModelSpec &spec) noexcept;

// Collective over the team, whose ranks have come to know that these two of them differ: the first parameter that one
// of them trains and the other does not, as text.
std::string compare_trained(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd);

// The lr_scales of a model's parameters, which may change from step to step. Meetings compare a hash of what all
// parameters have, and not of how they came to it: ranks that set different ones can set them alike again.

uint64_t hash_lr_scales(const memory::ModelSpec &spec) noexcept;

// Collective over the team, whose ranks have come to know that these two of them differ: the first parameter that they
// have otherwise, as text.
std::string compare_lr_scales(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd);

}  // namespace fsdp::engine
