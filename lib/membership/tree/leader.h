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
// A leader whose way up is lost keeps what is below it, and turns to the lowest of the first nodes that answers
// (refuges.h). A verdict that does not come within a second is made here.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "membership/liveness/monitor.h"
#include "membership/tree/blame.h"
#include "membership/tree/datagrams.h"
#include "membership/tree/links.h"
#include "membership/tree/plan.h"
#include "membership/tree/refuges.h"
#include "membership/tree/state_relay.h"

namespace fsdp::membership {

class NodeLeader final : public MonitorTask {
 public:
  // The seat outlives it: a Monitor holds both. links: of form_tree. Of the listener a node that may be a refuge needs
  // the stream, too.
  NodeLeader(Seat &seat, NodePlan plan, NodeLinks links, LeaderListener listener);

  void run(int wake, uint32_t ms) noexcept override;
  void finish() noexcept override;

 private:
  void sleep(int wake, uint32_t ms);
  void work();
  void linger();
  bool is_missed() const;
  void hear_all();
  void hear(uint32_t from, const Frame &frame);
  void carry();

  Control &control_;
  NodePlan plan_;
  LeaderLinks links_;
  StateRelay relay_;
  Blame blame_;
  Refuges refuges_;
};

// The leader's whole part, for its Monitor: forms the tree and closes the listener, if this node can be no refuge. If
// that fails, the ranks of the node are told why, and the error is thrown.
std::unique_ptr<MonitorTask> lead_node(Seat &seat, const NodePlan &plan, LeaderListener listener, const Waiter &waiter);

// What a rank that leads no node does for one whose leader is dumping core. Such a leader is silent, and its kernel
// holds its connections: other nodes would take it for stopped. So one of its node tells its neighbours in the tree, by
// datagrams. Where none gets through, or where there is no other rank, they find its silence.

class CoreDumpReporter final : public MonitorTask {
 public:
  // The seat outlives it: a Monitor holds both.
  CoreDumpReporter(Seat &seat, const NodePlan &plan);

  void run(int wake, uint32_t ms) noexcept override;
  void finish() noexcept override;

 private:
  bool speaks() const noexcept;
  void tell() noexcept;

  Seat &seat_;
  uint32_t leader_;
  std::vector<uint32_t> before_;  // ranks of this node that speak rather than this one
  DumpNotices notices_;
  int told_ = 0;
};

}  // namespace fsdp::membership
