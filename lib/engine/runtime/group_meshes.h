// SPDX-License-Identifier: Apache-2.0
// Groups with meshes of their own: the ranks of a model name different meshes for one group, and may name its
// parameters differently. At the seal the ranks tell each other what they have named.
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
// Finds out which meshes there are of each group, and what their ranks call its parameters. Throws MISMATCH, the same
// on all ranks, if parameters of different meshes contradict each other.
void learn_instances(transport::Team &team, memory::ModelSpec &spec);

}  // namespace fsdp::engine
