// SPDX-License-Identifier: Apache-2.0
// The leader's part in a job of several nodes, run by its monitor's thread. Leaders are connected in a tree: what one
// suspects or sees goes up to the coordinator, its root, and the verdict comes down, into each node's control memory.
// The states of ranks go the same ways from each node to all.
//
//   leader 70 --report--> leader 1 --report--> leader 0      a leader of 66 or more nodes
//   leader 70 <--verdict-- leader 1 <--verdict-- leader 0
//
// A leader whose connection ends died. Where what came over it is not what the other one has said, the link is to
// blame. One that is silent for the heartbeat limit is stopped if its kernel still acknowledges what is sent to it;
// else the network is cut, and the link is to blame, no rank. Nodes whose ranks send each other messages, but which are
// no neighbours in the tree, hear each other's beats too: their silence is a cut, unless a neighbour has found more.
//
// Whose way up is lost keeps what is below it, and turns to the lowest of the first nodes that answers (leader_refuge).
// A verdict that does not come within a second is made here.
#pragma once

#include <poll.h>

#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "membership/liveness/monitor.h"
#include "membership/tree/court.h"
#include "membership/tree/datagrams.h"
#include "membership/tree/dial.h"
#include "membership/tree/message.h"
#include "membership/tree/mirror.h"
#include "membership/tree/peer.h"
#include "membership/tree/plan.h"

namespace fsdp::membership {

class NodeLeader final : public Chore {
 public:
  // The seat outlives it: a Monitor holds both. links: of form_tree. Of the listener a node that may be a refuge needs
  // the stream, too.
  NodeLeader(Seat &seat, NodePlan plan, NodeLinks links, LeaderListener listener);

  void run(int wake, uint32_t ms) noexcept override;
  void finish() noexcept override;

 private:
  uint32_t node() const { return plan_.node(); }
  void sleep(int wake, uint32_t ms);
  void work();
  void linger();
  bool may_pass_on() const;
  bool members_elsewhere() const;
  bool passes_on() const;
  bool is_missed() const;

  // -- the other nodes --
  void hear_all();
  void heard(uint32_t from);
  void hear(uint32_t from, const Frame &frame);
  void hear(uint32_t from, std::vector<tree::RankState> states);
  bool has_detour(uint32_t node) const;
  bool fits(uint32_t from, const NodePeer &peer, const tree::RankState &state) const;
  void hear(uint32_t from, const tree::Post &post);
  void hear(uint32_t from, const tree::WaitText &text);
  void hear_of_dump(uint32_t of, int32_t process);
  void check_connection(uint32_t of);
  void blame_link(uint32_t to, const std::string &problem);
  void count_silence();
  void watch_data_peers();
  void beat();
  void flush();
  template <class M>
  static SharedFrame frame_of(const M &message) {
    return share_frame(write_frame(static_cast<uint32_t>(M::kind), tree::bytes_of(message)));
  }
  NodePeer *find(uint32_t of) {
    const auto found = peers_.find(of);
    return found == peers_.end() ? nullptr : &found->second;
  }
  const NodePeer *find(uint32_t of) const { return const_cast<NodeLeader *>(this)->find(of); }
  static void say(NodePeer *to, const SharedFrame &frame) {
    if (to && to->live() && to->stream()) to->stream().queue(frame);
  }
  template <class M>
  void say(uint32_t to, const M &message) {
    say(find(to), frame_of(message));
  }
  template <class M>
  void say_all(const M &message) {
    const SharedFrame frame = frame_of(message);
    for (auto &[node, peer] : peers_) say(&peer, frame);
  }
  // A refuge, or who has taken refuge here, whose parent has left in order: it is in the place of a neighbour in the
  // tree.
  bool replaces_parent(uint32_t of, const NodePeer &peer) const;
  bool is_neighbour(uint32_t of, const NodePeer &peer) const {
    return peer.live() && (peer.in_tree() || replaces_parent(of, peer));
  }
  void repeat_leavers(NodePeer &to);
  // To the neighbours in the tree: from above not back.
  void spread_states(bool at_once);
  void spread(const tree::StateMap &states, bool up);
  void spread(const tree::Post &post, std::optional<uint32_t> from);
  void spread(const tree::WaitText &text, std::optional<uint32_t> from);
  bool in_order(uint32_t of) const;

  // -- this node --
  void find_dead();
  void find_silent();
  void find_suspicion();

  // -- blame --
  void accuse(const Accusation &accusation);
  bool believable(const Accusation &accusation) const;
  uint32_t silent_ms(const NodePeer &peer) const;
  void judge_silence();
  void judge_pairs();
  bool hears_of(uint32_t other) const;
  CutLink link_to(uint32_t other) const;
  std::optional<uint32_t> coordinator() const;
  void carry();
  void announce();

  // -- the way up is lost --
  bool reaches_parent() const;
  bool orphaned() const;
  void seek_refuge();
  void dial_refuges();
  void hear_refuges();
  void take_refuge(uint32_t at, NodePeer refuge);
  bool has_refuge() const;
  bool is_dialing(uint32_t refuge) const;
  void accuse_deserted();
  void shelter();
  bool has_room() const;

  Seat &seat_;
  Control &control_;
  NodePlan plan_;
  Court court_;
  Mirror mirror_;
  Datagrams datagrams_;
  Fd listener_;
  ForkClosed listener_closed_;
  std::optional<Newcomers> newcomers_;  // of a refuge: while the listener is open
  std::map<uint32_t, NodePeer> peers_;
  std::map<uint32_t, Silence> pairs_;  // nodes that are no neighbours, with which this one exchanges messages
  uint64_t now_ms_, counted_ms_, beaten_ms_ = 0, spread_ms_ = 0, beats_ = 0;
  uint32_t beat_ms_, tick_ms_;
  RankSet reported_;  // dead or silent ranks of this node, and leaders of others, or the links to them
  bool suspicion_carried_ = false, links_reported_ = false, pairs_reported_ = false, announced_ = false;
  std::vector<Accusation> findings_;  // of this node, and of those below
  size_t carried_ = 0;                // of them, to carried_to_
  std::optional<uint32_t> carried_to_;
  uint64_t found_ms_ = 0;                     // the first
  tree::StateMap from_above_, from_below_;    // states that go on once blame has; of this node, too, from below
  uint64_t orphaned_ms_ = 0, dialed_ms_ = 0;  // 0: it is not
  uint32_t next_refuge_ = 0;
  std::vector<uint32_t> deserted_;  // refuges where nobody listens
  std::list<Dial> dials_;
};

// The whole of it, by the leader of a node, for its Monitor: forms the tree and closes the listener, if this node can
// be nobody's refuge. If that fails, the ranks of the node are told why, and the error is thrown.
std::unique_ptr<Chore> lead_node(Seat &seat, const NodePlan &plan, LeaderListener listener, const Waiter &waiter);

}  // namespace fsdp::membership
