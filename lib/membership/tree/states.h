// SPDX-License-Identifier: Apache-2.0
// Copies the membership and the waits of each node's ranks into the control memory of the other nodes. So ranks that
// leave, and callers that wait for each other, are found across nodes as within one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "membership/liveness/control.h"
#include "membership/tree/links.h"
#include "membership/tree/message.h"
#include "membership/tree/plan.h"

namespace fsdp::membership::tree {

// The states of many ranks share a frame: in a large job they come in thousands, and each frame costs an authentication
// tag. Pure functions of bytes.

// The last state of each rank.
using StateMap = std::map<uint32_t, RankState>;

// Frames whose bodies have at most max_bytes, but hold at least one state. waits: the states of ranks that wait, else
// of all others.
std::vector<SharedFrame> write_states(const StateMap &states, bool waits, size_t max_bytes);
// Empty: the frame is not one of states.
std::optional<std::vector<RankState>> read_states(const Frame &frame);

}  // namespace fsdp::membership::tree

namespace fsdp::membership {

class RemoteStates {
 public:
  RemoteStates(Control &control, const NodePlan &plan);

  // Calls say for each rank of this node whose state others should hear of now.
  void look(uint64_t now_ms, const std::function<void(const tree::RankState &)> &say);
  // Calls say for each rank of this node that has posted something new.
  void look_at_posts(uint64_t now_ms, const std::function<void(const tree::Post &)> &say);
  // Makes the next look_at_posts() call say again for posts that were told after that time.
  void repeat_posts(uint64_t since_ms) noexcept;
  // Calls say for each rank of this node that has a text, since it waits in a circle. look() has told the wait before.
  // The text is told again from time to time, since it may have been dropped.
  void look_at_texts(uint64_t now_ms, const std::function<void(const tree::WaitText &)> &say);
  // Writes what another node has said into this node's control memory. False: it was not written, because it is about a
  // rank of this node, about none of the job, or out of date.
  bool apply(const tree::RankState &state) noexcept;
  bool apply(const tree::Post &post) noexcept;
  bool apply(const tree::WaitText &text) noexcept;
  // Clears the waits of ranks on nodes for which of(node) is true: what they wait for may be on its way.
  void forget_waits(const std::function<bool(uint32_t node)> &of) noexcept;

 private:
  bool elsewhere(uint32_t rank) const { return rank < plan_.node_of.size() && plan_.node_of[rank] != plan_.node(); }
  struct LastTold {
    uint32_t rank;
    uint64_t looks = 0;
    uint32_t membership = 0;
    uint64_t at_ms = 0;
    uint32_t post_turn = 0, text_number = 0;
    uint64_t post_ms = 0, text_ms = 0;
  };
  LastTold *find(uint32_t rank) noexcept;
  bool due(const LastTold &said, uint64_t now_ms) const noexcept;
  tree::RankState state_of(uint32_t rank) const noexcept;

  Control &control_;
  const NodePlan &plan_;
  const uint64_t period_ms_;         // at which a long wait is told
  std::vector<LastTold> last_told_;  // what was last told about each rank of this node
};

// What leaders tell each other about ranks while nothing has failed: their membership, their waits and their posts.
// This goes from each node through the tree to all others, and into the control memory of each host on the way.
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
  void note_leaver(const tree::RankState &state) noexcept;
  void repeat_posts() noexcept;
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
  uint64_t way_lost_ms_ = 0;  // when a leader with children last left; 0: posts have been repeated since
};

}  // namespace fsdp::membership
