// SPDX-License-Identifier: Apache-2.0
// The ranks of a model by what they do together.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "layout/mesh.h"

namespace fsdp::engine {

class Context;

struct Teams {
  std::shared_ptr<comm::Team> all;    // agree on steps; in the mesh's order
  std::shared_ptr<comm::Team> inner;  // share memory: gather weights, reduce gradients
  std::shared_ptr<comm::Team> outer;  // exchange what the outer axis divides or replicates; NULL: there is none
};

// Collective over the mesh: all of them; then, once they are known to have the same mesh, its axes.
Teams create_teams(Context &context, const layout::Mesh &mesh);
void create_axes(Teams &teams, Context &context, const layout::Mesh &mesh);

}  // namespace fsdp::engine
