// SPDX-License-Identifier: Apache-2.0
// The connections of a leader with other leaders: with its neighbours in the tree and, in place of lost neighbours,
// with refuges and refugees. Also measures how long other nodes have been silent.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include "base/fd.h"
#include "membership/liveness/control.h"
#include "membership/tree/datagrams.h"
#include "membership/tree/dial.h"
#include "membership/tree/message.h"
#include "membership/tree/plan.h"
#include "membership/wire/frame_stream.h"

namespace fsdp::membership {

// How long another node has been silent, counted in looks of this rank, as Pulse does.

class Silence {
 public:
  void heard() noexcept { ms_ = 0, begun_ = true; }
  // Has the node been heard at least once? Before that, its leader may not have sent its first heartbeat yet.
  bool begun() const noexcept { return begun_; }
  // `beat_ms`: the period of the node's heartbeats.
  void count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept {
    ms_ += elapsed_ms;
    doubted_ms_ -= std::min(doubted_ms_, elapsed_ms);
    if (begun_ && ms_ >= doubt_after_ms(beat_ms)) doubted_ms_ = doubt_ms;
  }
  uint32_t ms() const noexcept { return ms_; }
  // False from the time when silence raises doubts until some time after the silence. The waits of a doubted node's
  // ranks are not believed, because messages to these ranks may still be in transit.
  bool trusted() const noexcept { return doubted_ms_ == 0; }

 private:
  // Two heartbeats were lost. A possible cycle of waits is judged only after a longer time than this.
  static constexpr uint32_t doubt_after_ms(uint32_t beat_ms) { return std::max(1200u, beat_ms * 12 / 5); }
  static constexpr uint32_t doubt_ms = 8000;  // after a cut, TCP pauses as long as the cut lasted
  uint32_t ms_ = 0, doubted_ms_ = 0;
  bool begun_ = false;
};

class NodePeer {
 public:
  enum class Relation {
    parent,
    child,
    refuge,  // this leader has lost its way to the root, and now uses the peer
    refugee  // the peer has lost its way to the root, and now uses this leader
  };

  NodePeer(Relation role, FrameStream stream)
      : role_(role), stream_(std::move(stream)), fork_closed_(stream_.socket().get()) {}

  Relation role() const noexcept { return role_; }
  bool in_tree() const noexcept { return role_ == Relation::parent || role_ == Relation::child; }
  // Is the peer on the way to the root, as the parent or in place of a former parent?
  bool above() const noexcept { return role_ == Relation::parent || role_ == Relation::refuge; }
  FrameStream &stream() noexcept { return stream_; }
  const FrameStream &stream() const noexcept { return stream_; }
  // Has the peer neither left in order nor been lost?
  bool live() const noexcept { return live_; }
  void end() noexcept { live_ = false, break_connection(); }
  void leave() noexcept { end(), left_ = true; }
  bool left() const noexcept { return left_; }  // has the peer left in order?
  // Drops the connection for a reason that tells nothing about the process at its other end.
  void break_connection() noexcept {
    fork_closed_ = ForkClosed();
    stream_ = FrameStream();
  }
  // From now on nothing that arrives over the connection is believed.
  void blame() noexcept { blamed_ = true; }
  bool blamed() const noexcept { return blamed_; }

  void heard() noexcept { silence_.heard(), waits_bytes_ = 0; }
  // May `bytes` bytes about waits be sent to this peer? Such messages never cease, and would fill the buffers of a
  // stopped leader. Its kernel would then acknowledge nothing more, and the network to it would be judged as cut.
  bool take_waits(uint64_t bytes) noexcept {
    if (waits_bytes_ + bytes > max_waits_bytes) return false;
    waits_bytes_ += bytes;
    return true;
  }
  void count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept;
  const Silence &silence() const noexcept { return silence_; }
  // Had the peer's kernel acknowledged everything less than within_ms ago? If so, the network works.
  bool acknowledges(uint32_t within_ms) const noexcept { return unacknowledged_ms_ < within_ms; }
  bool all_acknowledged() const noexcept { return unacknowledged_ms_ == 0; }

 private:
  static constexpr uint64_t max_waits_bytes =
      32 * 1024;  // limit between two messages of the peer; a kernel has room for twice as much

  Relation role_;
  FrameStream stream_;
  ForkClosed fork_closed_;  // no child keeps the socket, so the end of this process ends the connection
  bool live_ = true, left_ = false, blamed_ = false;
  Silence silence_;
  uint32_t unacknowledged_ms_ = 0;
  uint64_t waits_bytes_ = 0;
};

class LeaderLinks {
 public:
  // The plan and the control memory must outlive this object. `streams`: from form_tree. `heartbeats`: the listener's
  // UDP socket.
  LeaderLinks(const NodePlan &plan, const Control &control, NodeLinks streams, Fd heartbeats);

  std::map<uint32_t, NodePeer> &all() noexcept { return peers_; }
  const std::map<uint32_t, NodePeer> &all() const noexcept { return peers_; }
  NodePeer *find(uint32_t of) {
    const auto found = peers_.find(of);
    return found == peers_.end() ? nullptr : &found->second;
  }
  const NodePeer *find(uint32_t of) const {
    const auto found = peers_.find(of);
    return found == peers_.end() ? nullptr : &found->second;
  }
  NodePeer &at(uint32_t of) { return peers_.at(of); }
  void set(uint32_t of, NodePeer peer) { peers_.insert_or_assign(of, std::move(peer)); }

  // -- sending: flush() sends what a connection does not take immediately --
  template <class M>
  static SharedFrame frame_of(const M &message) {
    return share_frame(write_frame(static_cast<uint32_t>(M::kind), tree::bytes_of(message)));
  }
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
  // True once nothing is left to send.
  bool flush();

  // -- what is known of other nodes --
  // Does the peer take the place of a neighbour in the tree, because a parent has left in order? If so, the peer is
  // this node's refuge, or a refugee whose own parent has left.
  bool replaces_parent(uint32_t of, const NodePeer &peer) const;
  bool is_neighbour(uint32_t of, const NodePeer &peer) const {
    return peer.live() && (peer.in_tree() || replaces_parent(of, peer));
  }
  // The leader of that node has left the job, or has destroyed its context.
  bool in_order(uint32_t of) const;
  // Has a node between that node and the root left? If so, a refuge passes on that node's states in place of the
  // parent.
  bool has_detour(uint32_t node) const;
  bool has_live_child() const;
  // Is there a rank of another node that, as far as this node knows, has not left the job?
  bool has_ranks_elsewhere() const;
  bool reaches_parent() const;

  // -- time and heartbeats --
  // The time of the current round.
  uint64_t now_ms() const noexcept { return now_ms_; }
  void set_now(uint64_t ms) noexcept { now_ms_ = ms; }
  // The period at which a leader looks at the memory of its ranks.
  uint32_t tick_ms() const noexcept { return tick_ms_; }
  static constexpr uint32_t shortest_tick_ms = 50;
  Datagrams &datagrams() noexcept { return datagrams_; }
  void heard(uint32_t from);
  // Counts how long each node has been silent. Returns true if a node is doubted that was not doubted before.
  bool count_silence();
  // How long the peer has been silent. Before its first message the plan's forming_ms do not count, because other nodes
  // may still have to connect to the peer.
  uint32_t silent_ms(const NodePeer &peer) const;
  // Nodes that are not neighbours, but whose ranks exchange messages with ranks of this node.
  const std::map<uint32_t, Silence> &pairs() const noexcept { return pairs_; }
  // True if the waits of that node's ranks must not be believed.
  bool doubts(uint32_t of) const;
  void beat();

 private:
  void watch_data_peers();

  const NodePlan &plan_;
  const Control &control_;
  std::map<uint32_t, NodePeer> peers_;
  std::map<uint32_t, Silence> pairs_;
  Datagrams datagrams_;
  uint64_t now_ms_, counted_ms_, beaten_ms_ = 0, beats_ = 0;
  uint32_t beat_ms_, tick_ms_;
};

}  // namespace fsdp::membership
