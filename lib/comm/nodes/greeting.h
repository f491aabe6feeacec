// SPDX-License-Identifier: Apache-2.0
// What two leaders say first on a connection that both have proven the job secret on. Pure.
#pragma once

#include <optional>
#include <string>

#include "comm/bootstrap/frame_stream.h"
#include "comm/nodes/message.h"
#include "comm/nodes/plan.h"

namespace fsdp::comm {

// What the proof of such a connection is for.
inline std::string link_label(const NodePlan &plan) { return "libfsdp node link " + plan.job; }

inline nodes::Hello hello_of(const NodePlan &plan, nodes::Bond bond) {
  return {nodes::version,      plan.node(), plan.node_count(), static_cast<uint32_t>(plan.node_of.size()),
          nodes::native_order, bond};
}

inline void greet(FrameStream &stream, const NodePlan &plan, nodes::Bond bond) {
  const nodes::Hello mine = hello_of(plan, bond);
  stream.queue(static_cast<uint32_t>(mine.kind), nodes::bytes_of(mine));
}

// Of a node of this job with this version of the library; nothing else.
inline std::optional<nodes::Hello> read_hello(const NodePlan &plan, const Frame &frame) {
  const auto said = nodes::as<nodes::Hello>(frame);
  const nodes::Hello mine = hello_of(plan, nodes::Bond::tree);
  const bool known = said && said->version == mine.version && said->node_count == mine.node_count &&
                     said->world_size == mine.world_size && said->byte_order == mine.byte_order &&
                     said->node < said->node_count && said->bond <= nodes::Bond::refuge;
  return known ? said : std::nullopt;
}

}  // namespace fsdp::comm
