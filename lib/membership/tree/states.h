// SPDX-License-Identifier: Apache-2.0
// Copies the membership and the waits of each node's ranks into the control memory of the other nodes. So ranks that
// leave, and callers that wait for each other, are found across nodes in the same way as within one node.
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

// The states of many ranks share a frame, because in a large job thousands of states arrive, and each frame costs an
// authentication tag. Pure functions of bytes.

// The last state of each rank.
using StateMap = std::map<uint32_t, RankState>;

// Returns frames whose bodies have at most max_bytes, but at least one state each. `waits`: the states of ranks that
// wait; if false, the states of all other ranks.
std::vector<SharedFrame> write_states(const StateMap &states, bool waits, size_t max_bytes);
// Returns nothing if the frame does not have states.
std::optional<std::vector<RankState>> read_states(const Frame &frame);

}  // namespace fsdp::membership::tree

namespace fsdp::membership {

class RemoteStates {
 public:
  RemoteStates(Control &control, const NodePlan &plan);

  // Calls `say` for each rank of this node whose state must be sent to others now.
  void look(uint64_t now_ms, const std::function<void(const tree::RankState &)> &say);
  // Calls `say` for each rank of this node that has a new post.
  void look_at_posts(uint64_t now_ms, const std::function<void(const tree::Post &)> &say);
  // Lets the next look_at_posts() call `say` again for posts that it passed on after that time.
  void repeat_posts(uint64_t since_ms) noexcept;
  // Calls `say` for each rank of this node that has a text, because it is in a cycle of waits. look() has passed on the
  // wait before. The text is passed on again regularly, because it may have been dropped.
  void look_at_texts(uint64_t now_ms, const std::function<void(const tree::WaitText &)> &say);
  // Writes a message of another node into this node's control memory. Returns false if it was not written, because it
  // is about a rank of this node, about no rank of the job, or outdated.
  bool apply(const tree::RankState &state) noexcept;
  bool apply(const tree::Post &post) noexcept;
  bool apply(const tree::WaitText &text) noexcept;
  // Clears the waits of ranks on nodes for which of(node) is true, because the awaited data may be in transit.
  void forget_waits(const std::function<bool(uint32_t node)> &of) noexcept;

 private:
  bool elsewhere(uint32_t rank) const { return rank < plan_.node_of.size() && plan_.node_of[rank] != plan_.node(); }
  struct LastTold {
    uint32_t rank;
    uint64_t wait_and_looks = 0;
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
  const uint64_t period_ms_;         // period at which a long wait is sent
  std::vector<LastTold> last_told_;  // the last state sent for each rank of this node
};

// What leaders tell each other about ranks while nothing has failed: membership, waits and posts. These go from each
// node through the tree to all others, and into the control memory of each host on the way.
class StateRelay {
 public:
  // All references must outlive this object.
  StateRelay(Control &control, const NodePlan &plan, LeaderLinks &links);

  void hear(uint32_t from, std::vector<tree::RankState> states);
  void hear(uint32_t from, const tree::Post &post);
  void hear(uint32_t from, const tree::WaitText &text);
  // Sends the neighbours the news about the ranks of this node, and passes on received news.
  void spread();
  // Tells a node which ranks have left. The node had no way up for a moment, so it may have missed that.
  void repeat_leavers(NodePeer &to);
  // Lets the next spread() repeat posts that a leader which has left may not have passed on. If this node leaves now,
  // it cannot wait until others have found their refuges.
  void repeat_posts() noexcept;
  // Clears the waits of ranks on doubted nodes, because the awaited data may be in transit.
  void forget_doubted() noexcept;

 private:
  bool may_pass_on() const;
  bool fits(uint32_t from, const NodePeer &peer, const tree::RankState &state) const;
  void note_leaver(const tree::RankState &state) noexcept;
  bool should_repeat_posts() const noexcept;
  void spread_states(bool at_once);
  void spread(const tree::StateMap &states, bool up);
  void spread(const tree::Post &post, std::optional<uint32_t> from);
  void spread(const tree::WaitText &text, std::optional<uint32_t> from);

  Control &control_;
  const NodePlan &plan_;
  LeaderLinks &links_;
  RemoteStates remote_;
  tree::StateMap from_above_, from_below_;  // states to pass on; states of this node count as from below
  uint64_t spread_ms_ = 0;
  // When the first and the last leader left through which messages go; first 0: posts have been repeated since.
  uint64_t first_lost_ms_ = 0, last_lost_ms_ = 0;
};

}  // namespace fsdp::membership
