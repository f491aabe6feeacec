// SPDX-License-Identifier: Apache-2.0
// The connections of a leader with other leaders: with its neighbours in the tree, and with refuges and refugees in the
// place of those that are lost. It also knows how long each other node has been silent.
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

// For how long another node has not been heard, counted in this rank's own time: see Pulse.

class Silence {
 public:
  void heard() noexcept { ms_ = 0, begun_ = true; }
  // It has been heard at all. Before, its leader may not have come so far.
  bool begun() const noexcept { return begun_; }
  // beat_ms: how often it says that it lives.
  void count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept {
    ms_ += elapsed_ms;
    doubted_ms_ -= std::min(doubted_ms_, elapsed_ms);
    if (begun_ && ms_ >= doubt_after_ms(beat_ms)) doubted_ms_ = doubt_ms;
  }
  uint32_t ms() const noexcept { return ms_; }
  // What its ranks wait for is not believed for a while after silence: messages to them may be on their way still.
  bool trusted() const noexcept { return doubted_ms_ == 0; }

 private:
  // Two heartbeats lost. Circles of callers are looked at for longer before they are one.
  static constexpr uint32_t doubt_after_ms(uint32_t beat_ms) { return std::max(1200u, beat_ms * 12 / 5); }
  static constexpr uint32_t doubt_ms = 8000;  // TCP's pause after a cut is as long as the cut was
  uint32_t ms_ = 0, doubted_ms_ = 0;
  bool begun_ = false;
};

class NodePeer {
 public:
  enum class Relation {
    parent,
    child,
    refuge,  // this leader has lost its way to the root, and has turned to that one
    refugee  // ... that one has, and to this one
  };

  NodePeer(Relation role, FrameStream stream)
      : role_(role), stream_(std::move(stream)), fork_closed_(stream_.socket().get()) {}

  Relation role() const noexcept { return role_; }
  bool in_tree() const noexcept { return role_ == Relation::parent || role_ == Relation::child; }
  // On the way to the root, or in the place of what was.
  bool above() const noexcept { return role_ == Relation::parent || role_ == Relation::refuge; }
  FrameStream &stream() noexcept { return stream_; }
  const FrameStream &stream() const noexcept { return stream_; }
  // Neither ended in order nor lost.
  bool live() const noexcept { return live_; }
  void end() noexcept { live_ = false, break_connection(); }
  void leave() noexcept { end(), left_ = true; }
  bool left() const noexcept { return left_; }  // in order
  // The connection is gone for a reason that says nothing of the process at its end.
  void break_connection() noexcept {
    fork_closed_ = ForkClosed();
    stream_ = FrameStream();
  }
  // Nothing that comes over the connection can be believed any more.
  void blame() noexcept { blamed_ = true; }
  bool blamed() const noexcept { return blamed_; }

  void heard() noexcept { silence_.heard(), waits_bytes_ = 0; }
  // May so much be said of what ranks wait for? It goes on and on, and would fill the buffers of a leader that is
  // stopped: its kernel would acknowledge nothing more, and it would be taken for one behind a cut network.
  bool take_waits(uint64_t bytes) noexcept {
    if (waits_bytes_ + bytes > most_waits_bytes) return false;
    waits_bytes_ += bytes;
    return true;
  }
  void count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept;
  const Silence &silence() const noexcept { return silence_; }
  // Everything sent has been acknowledged by the peer's kernel until a moment ago: the network is well.
  bool acknowledges(uint32_t within_ms) const noexcept { return unacknowledged_ms_ < within_ms; }
  bool all_acknowledged() const noexcept { return unacknowledged_ms_ == 0; }

 private:
  static constexpr uint64_t most_waits_bytes = 32 * 1024;  // since it was heard; a kernel has room for twice as much

  Relation role_;
  FrameStream stream_;
  ForkClosed fork_closed_;  // its end tells of this process's
  bool live_ = true, left_ = false, blamed_ = false;
  Silence silence_;
  uint32_t unacknowledged_ms_ = 0;
  uint64_t waits_bytes_ = 0;
};

class LeaderLinks {
 public:
  // The plan and the control memory outlive it. streams: of form_tree. heartbeats: the socket of the listener.
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

  // -- saying: what a connection does not take now waits for flush() --
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
  // True once all has gone.
  bool flush();

  // -- what is known of other nodes --
  // A refuge, or a node that has taken refuge here, whose parent has left in order: it is in the place of a neighbour
  // in the tree.
  bool replaces_parent(uint32_t of, const NodePeer &peer) const;
  bool is_neighbour(uint32_t of, const NodePeer &peer) const {
    return peer.live() && (peer.in_tree() || replaces_parent(of, peer));
  }
  // The leader of that node has left the job in order.
  bool in_order(uint32_t of) const;
  // A node between that one and the root has left: a refuge then tells of it in place of its parent.
  bool has_detour(uint32_t node) const;
  bool has_live_child() const;
  bool members_elsewhere() const;
  bool reaches_parent() const;

  // -- time and heartbeats --
  // Of the round that is under way.
  uint64_t now_ms() const noexcept { return now_ms_; }
  void set_now(uint64_t ms) noexcept { now_ms_ = ms; }
  // How often a leader looks at the memory of its ranks.
  uint32_t tick_ms() const noexcept { return tick_ms_; }
  static constexpr uint32_t shortest_tick_ms = 50;
  Datagrams &datagrams() noexcept { return datagrams_; }
  void heard(uint32_t from);
  // Counts for how long each node has been silent. True if one is doubted that was not before.
  bool count_silence();
  // One that has not been heard yet may have to wait for others that connect to it.
  uint32_t silent_ms(const NodePeer &peer) const;
  // Nodes that are no neighbours, with which this one exchanges messages.
  const std::map<uint32_t, Silence> &pairs() const noexcept { return pairs_; }
  // Is what the ranks of that node wait for to be believed?
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
