// SPDX-License-Identifier: Apache-2.0
// Membership and waits of each node's ranks in the control memory of the others, so that leavers and callers that wait
// for each other are found across nodes as within one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "comm/nodes/message.h"
#include "comm/nodes/plan.h"
#include "comm/shm/control.h"

namespace fsdp::comm {

class Mirror {
 public:
  Mirror(Control &control, const MeshPlan &plan);

  // Calls say for each rank of this node whose state others should hear of now.
  void look(uint64_t now_ms, const std::function<void(const nodes::State &)> &say);
  // ... and for each that shows something new; to: the rank that is to read it; nobody: all of them.
  void look_at_posts(const std::function<void(const nodes::Post &, std::optional<uint32_t> to)> &say);
  // Writes what `node` said, if it is about a rank of its own.
  void apply(uint32_t node, const nodes::State &state) noexcept;
  void apply(uint32_t node, const nodes::Post &post) noexcept;
  // The waits of its ranks are not believed: what they wait for may be on its way.
  void forget_waits(uint32_t node) noexcept;

 private:
  struct Said {
    uint32_t rank;
    uint64_t looks = 0;
    uint32_t membership = 0;
    uint64_t at_ms = 0;
    uint64_t post_turn = 0;
  };
  bool due(const Said &said, uint64_t now_ms) const noexcept;
  nodes::State state_of(uint32_t rank) const noexcept;

  Control &control_;
  const MeshPlan &plan_;
  std::vector<Said> said_;  // of the ranks of this node
};

}  // namespace fsdp::comm
