// SPDX-License-Identifier: Apache-2.0
// The leaders connect, each with each: a higher node connects to a lower one, both prove the job secret, and the one
// that connected says which node it is, and is answered.
#pragma once

#include <vector>

#include "base/failure.h"
#include "comm/bootstrap/frame_stream.h"
#include "comm/nodes/listener.h"
#include "comm/nodes/plan.h"

namespace fsdp::comm {

// One stream for each other node; that of this node is empty. Blocks until all leaders have come, at most the plan's
// forming_ms: they come out of one rendezvous.
std::vector<FrameStream> form_mesh(const MeshPlan &plan, const Fd &listener, const Waiter &waiter);

}  // namespace fsdp::comm
