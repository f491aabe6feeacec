// SPDX-License-Identifier: Apache-2.0
// Groups with meshes of their own: the ranks of a model may name different meshes for one group, and different names
// for its parameters. At the seal the ranks exchange these names.
#pragma once

#include <vector>

#include "memory/model_spec.h"
#include "transport/team.h"

namespace fsdp::engine {

// All functions are collective over the model's team.

// Gives each mesh one number on all ranks. If two groups have one mesh on some ranks and two on others, they get two
// numbers everywhere.
void number_meshes_alike(transport::Team &team, memory::ModelSpec &spec);
// check_meshes() and learn_instances() need declarations that were compared.
// Throws the same MISMATCH on all ranks if the meshes of a group overlap or lack a rank of the model. Only after this
// check may teams of these meshes be made.
void check_meshes(transport::Team &team, const memory::ModelSpec &spec);
// Finds all meshes of each group, and the names that their ranks give its parameters. Throws MISMATCH, the same on all
// ranks, if parameters of different meshes contradict each other.
void learn_instances(transport::Team &team, memory::ModelSpec &spec);

}  // namespace fsdp::engine
