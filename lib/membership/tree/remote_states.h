// SPDX-License-Identifier: Apache-2.0
// Membership and waits of each node's ranks in the control memory of the others, so that leavers and callers that wait
// for each other are found across nodes as within one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "membership/liveness/control.h"
#include "membership/tree/message.h"
#include "membership/tree/plan.h"

namespace fsdp::membership::tree {

// The states of many ranks in one frame: of a large job they come in thousands, and what each frame costs is its tag.
// Pure functions of bytes.

// The last state of each.
using StateMap = std::map<uint32_t, RankState>;

// In frames whose bodies have at most so many bytes, which is room for one in any case. waits: those of ranks that
// wait, or of all others.
std::vector<SharedFrame> write_states(const StateMap &states, bool waits, size_t most_bytes);
// Nothing: the frame is none of states.
std::optional<std::vector<RankState>> read_states(const Frame &frame);

}  // namespace fsdp::membership::tree

namespace fsdp::membership {

class RemoteStates {
 public:
  RemoteStates(Control &control, const NodePlan &plan);

  // Calls say for each rank of this node whose state others should hear of now.
  void look(uint64_t now_ms, const std::function<void(const tree::RankState &)> &say);
  // ... and for each that shows something new.
  void look_at_posts(const std::function<void(const tree::Post &)> &say);
  // ... and for each in a circle. After what look() said of it, and again from time to time: it may have been lost.
  void look_at_texts(uint64_t now_ms, const std::function<void(const tree::WaitText &)> &say);
  // Writes what another node said. False: it is about none of its ranks.
  bool apply(const tree::RankState &state) noexcept;
  bool apply(const tree::Post &post) noexcept;
  bool apply(const tree::WaitText &text) noexcept;
  // The waits of the ranks of such nodes are not believed: what they wait for may be on its way.
  void forget_waits(const std::function<bool(uint32_t node)> &of) noexcept;

 private:
  bool elsewhere(uint32_t rank) const { return rank < plan_.node_of.size() && plan_.node_of[rank] != plan_.node(); }
  struct Said {
    uint32_t rank;
    uint64_t looks = 0;
    uint32_t membership = 0;
    uint64_t at_ms = 0;
    uint32_t post_turn = 0, text_number = 0;
    uint64_t text_ms = 0;
  };
  Said *find(uint32_t rank) noexcept;
  bool due(const Said &said, uint64_t now_ms) const noexcept;
  tree::RankState state_of(uint32_t rank) const noexcept;

  Control &control_;
  const NodePlan &plan_;
  const uint64_t period_ms_;  // of what a rank waits for
  std::vector<Said> said_;    // of the ranks of this node
};

}  // namespace fsdp::membership
