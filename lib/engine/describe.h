// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "memory/model_plan.h"

namespace fsdp::engine {

// The layout of a sealed model as JSON.
std::string describe(const memory::ModelSpec &spec, const memory::ModelPlan &plan);
// Its mesh and strategies in a line, for people.
std::string describe_mesh(const memory::ModelSpec &spec);

}  // namespace fsdp::engine
