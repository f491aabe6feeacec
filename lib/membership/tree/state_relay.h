// SPDX-License-Identifier: Apache-2.0
// What leaders tell each other about ranks while nothing has failed: their membership, their waits and their posts.
// This goes from each node through the tree to all others, and into the control memory of each host on the way.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "membership/tree/links.h"
#include "membership/tree/remote_states.h"

namespace fsdp::membership {

class StateRelay {
 public:
  // All references outlive it.
  StateRelay(Control &control, const NodePlan &plan, LeaderLinks &links);

  void hear(uint32_t from, std::vector<tree::RankState> states);
  void hear(uint32_t from, const tree::Post &post);
  void hear(uint32_t from, const tree::WaitText &text);
  // Tells the neighbours what is new about the ranks of this node, and passes on what was heard.
  void spread();
  // Tells a node that had no way up for a moment which ranks have left: it may not have heard.
  void repeat_leavers(NodePeer &to);
  // Clears the waits of ranks on doubted nodes: what they wait for may be on its way.
  void forget_doubted() noexcept;

 private:
  bool may_pass_on() const;
  bool fits(uint32_t from, const NodePeer &peer, const tree::RankState &state) const;
  void spread_states(bool at_once);
  void spread(const tree::StateMap &states, bool up);
  void spread(const tree::Post &post, std::optional<uint32_t> from);
  void spread(const tree::WaitText &text, std::optional<uint32_t> from);

  Control &control_;
  const NodePlan &plan_;
  LeaderLinks &links_;
  RemoteStates remote_;
  tree::StateMap from_above_, from_below_;  // states to pass on; those of this node count as from below
  uint64_t spread_ms_ = 0;
};

}  // namespace fsdp::membership
