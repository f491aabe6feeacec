// SPDX-License-Identifier: Apache-2.0
// What checkpoints call the tensors that they have of a parameter. A checkpoint has each name once.
#pragma once

#include <string>
#include <vector>

#include "memory/model_spec.h"
#include "memory/plane.h"

namespace fsdp::memory {

// Of a published plane of a frozen quantized parameter; whatever else is published has the parameter's own name.
std::string stored_name(const ParamSpec &param, const PlanePlan &plane);
std::string stored_name(const ParamSpec &param, const StateSpec &state);

// Names that two tensors of the model would have, with both of them: it could be trained, and never saved.
std::vector<std::string> find_shared_names(const ModelSpec &spec);

}  // namespace fsdp::memory
