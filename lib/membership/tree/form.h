// SPDX-License-Identifier: Apache-2.0
// The leaders connect in a tree: a child to its parent, both prove the job secret, and the child says which node it is,
// and is answered.
#pragma once

#include <map>

#include "base/failure.h"
#include "membership/tree/listener.h"
#include "membership/tree/plan.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

using NodeLinks = std::map<uint32_t, FrameStream>;  // of each neighbour in the tree, by node

// Blocks until all neighbours have come, at most the plan's forming_ms: they come out of one rendezvous. links: what
// there is so far, where it throws.
void form_tree(const NodePlan &plan, const Fd &listener, const Waiter &waiter, NodeLinks &links);

}  // namespace fsdp::membership
