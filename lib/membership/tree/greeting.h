// SPDX-License-Identifier: Apache-2.0
// What two leaders say first on a connection that both have proven the job secret on. Pure.
#pragma once

#include <optional>
#include <string>

#include "membership/tree/message.h"
#include "membership/tree/plan.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

// What the proof of such a connection is for.
inline std::string link_label(const NodePlan &plan) { return "libfsdp node link " + plan.job; }

inline tree::Hello hello_of(const NodePlan &plan, tree::Bond bond) {
  return {tree::version,      plan.node(), plan.node_count(), static_cast<uint32_t>(plan.node_of.size()),
          tree::native_order, bond};
}

inline void greet(FrameStream &stream, const NodePlan &plan, tree::Bond bond) {
  const tree::Hello mine = hello_of(plan, bond);
  stream.queue(static_cast<uint32_t>(mine.kind), tree::bytes_of(mine));
}

// Of a node of this job with this version of the library; nothing else.
inline std::optional<tree::Hello> read_hello(const NodePlan &plan, const Frame &frame) {
  const auto said = tree::as<tree::Hello>(frame);
  const tree::Hello mine = hello_of(plan, tree::Bond::tree);
  const bool known = said && said->version == mine.version && said->node_count == mine.node_count &&
                     said->world_size == mine.world_size && said->byte_order == mine.byte_order &&
                     said->node < said->node_count && said->bond <= tree::Bond::refuge;
  return known ? said : std::nullopt;
}

}  // namespace fsdp::membership
