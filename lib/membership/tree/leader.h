// SPDX-License-Identifier: Apache-2.0
// The work of a leader in a job of several nodes, on its monitor's thread. Leaders are connected in a tree. A leader's
// reports go up to the coordinator at the root, and the verdict comes down, into each node's control memory. The states
// of ranks take the same ways, from each node to all others.
//
//   leader 70 --report--> leader 1 --report--> leader 0      a leader of 66 or more nodes
//   leader 70 <--verdict-- leader 1 <--verdict-- leader 0
//
// A leader whose connection ends has died. If bytes were changed in transit, the link is to blame. A leader that is
// silent for the heartbeat limit is stopped if its kernel still acknowledges data. Otherwise the network is cut, and
// the link is to blame, not a rank. Nodes that are not neighbours in the tree, but whose ranks exchange messages, also
// send each other heartbeats. Silence between them is a cut, unless a neighbour has found out more.
//
// A leader whose way up is lost keeps the connections below it, and turns to the lowest refuge that answers
// (refuges.h). If no verdict arrives within a second, the leader decides itself.
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
#include "membership/tree/states.h"

namespace fsdp::membership {

class NodeLeader final : public MonitorTask {
 public:
  // The seat must outlive this object; a Monitor holds both. `links`: from form_tree. A node that may be a refuge also
  // needs the listener's stream.
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

// Makes the leader's task for its Monitor: forms the tree, and closes the listener if this node cannot be a refuge. On
// failure it tells the ranks of the node the reason, and throws the error.
std::unique_ptr<MonitorTask> lead_node(Seat &seat, const NodePlan &plan, LeaderListener listener, const Waiter &waiter);

// What the other ranks of a node do while their leader is dumping core. Such a leader is silent while its kernel keeps
// its connections, so other nodes would judge it as stopped. Therefore another rank of the node tells the leader's
// neighbours in the tree by datagrams. If no datagram arrives, or if there is no other rank, the neighbours notice only
// the silence.

class CoreDumpReporter final : public MonitorTask {
 public:
  // The seat must outlive this object; a Monitor holds both.
  CoreDumpReporter(Seat &seat, const NodePlan &plan);

  void run(int wake, uint32_t ms) noexcept override;
  void finish() noexcept override;

 private:
  bool speaks() const noexcept;
  void tell() noexcept;

  Seat &seat_;
  uint32_t leader_;
  std::vector<uint32_t> before_;  // ranks of this node that report before this one does
  DumpNotices notices_;
  int told_ = 0;
};

}  // namespace fsdp::membership
