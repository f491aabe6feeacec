// SPDX-License-Identifier: Apache-2.0
// The leader's part in a job of several nodes, run by its monitor's thread. It tells the coordinator (the lowest node
// that it reaches) what its node's ranks suspect and what it sees itself, writes the verdict that comes back into its
// node's control memory, and mirrors its ranks' states to the other nodes.
//
// A leader whose connection ends died. Where what came over it is not what the other one has said, the link is to
// blame. One that is silent for the heartbeat limit is stopped if its kernel still acknowledges what is sent to it;
// else the network is cut, and the link is to blame, no rank. A verdict that does not come within a second is made
// here.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/nodes/court.h"
#include "comm/nodes/datagrams.h"
#include "comm/nodes/listener.h"
#include "comm/nodes/message.h"
#include "comm/nodes/mirror.h"
#include "comm/nodes/peer.h"
#include "comm/nodes/plan.h"
#include "comm/shm/monitor.h"

namespace fsdp::comm {

class NodeMesh final : public Chore {
 public:
  // Of the leader. The seat outlives it: a Monitor holds both. links and datagrams: of form_mesh and LeaderListener.
  NodeMesh(Seat &seat, MeshPlan plan, std::vector<FrameStream> links, Fd datagrams);

  void run(int wake, uint32_t ms) noexcept override;
  void finish() noexcept override;

 private:
  uint32_t node() const { return plan_.node(); }
  void sleep(int wake, uint32_t ms);
  void work();

  // -- the other nodes --
  void hear_all();
  void hear(uint32_t from, const Frame &frame);
  void check_connection(uint32_t of);
  void blame_link(uint32_t to, const std::string &problem);
  void count_silence();
  void judge_silence();
  void beat();
  template <class M>
  static SharedFrame frame_of(const M &message) {
    return share_frame(write_frame(static_cast<uint32_t>(M::kind), nodes::bytes_of(message)));
  }
  void say(uint32_t to, const SharedFrame &frame) {
    NodePeer &peer = peers_[to];
    if (peer.live() && peer.stream()) peer.stream().queue(frame);
  }
  template <class M>
  void say(uint32_t to, const M &message) {
    say(to, frame_of(message));
  }
  template <class M>
  void say_all(const M &message) {
    const SharedFrame frame = frame_of(message);
    for (uint32_t n = 0; n < peers_.size(); ++n) say(n, frame);
  }
  void tell(const nodes::State &state);
  void tell(const nodes::Post &post, std::optional<uint32_t> to);
  bool in_order(uint32_t of) const;

  // -- this node --
  void find_dead();
  void find_silent();
  void find_suspicion();

  // -- blame --
  void accuse(const Accusation &accusation);
  bool believable(const Accusation &accusation) const;
  uint32_t coordinator() const;
  void carry();
  void announce();

  Seat &seat_;
  Control &control_;
  MeshPlan plan_;
  Court court_;
  Mirror mirror_;
  Datagrams datagrams_;
  std::vector<NodePeer> peers_;
  uint64_t now_ms_, counted_ms_, beaten_ms_ = 0, beats_ = 0;
  uint32_t beat_ms_;
  RankSet reported_;  // dead or silent ranks of this node, and leaders of others, or the links to them
  bool suspicion_carried_ = false, links_reported_ = false, announced_ = false;
  std::vector<Accusation> findings_;  // of this node
  size_t carried_ = 0;                // of them, to carried_to_
  uint32_t carried_to_ = UINT32_MAX;
  uint64_t found_ms_ = 0;  // the first
};

// The whole of it, by the leader of a node, for its Monitor: forms the mesh and closes the listener. If that fails, the
// ranks of the node are told why, and the error is thrown.
std::unique_ptr<Chore> lead_node(Seat &seat, const MeshPlan &plan, LeaderListener listener, const Waiter &waiter);

}  // namespace fsdp::comm
