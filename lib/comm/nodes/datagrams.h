// SPDX-License-Identifier: Apache-2.0
// Heartbeats between leaders that do not wait for TCP: after a cut of some seconds TCP sends again only seconds later,
// and a healed network would be taken for a cut one. Each carries a proof of the job secret and a number that grows.
// And what other ranks of a leader's node tell in its stead.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "comm/bootstrap/endpoint.h"
#include "comm/nodes/plan.h"

namespace fsdp::comm {

class Datagrams {
 public:
  Datagrams(const NodePlan &plan, Fd socket);
  const Fd &socket() const noexcept { return socket_; }
  void beat(uint32_t node, uint64_t number);  // one that is lost is no matter
  // Calls heard for each node of which a new one has come, whoever it is, and dumping for each whose leader, of this
  // process, is said to dump core.
  void receive(const std::function<void(uint32_t)> &heard, const std::function<void(uint32_t, int32_t)> &dumping);

 private:
  const NodePlan &plan_;
  Fd socket_;
  std::string label_, dump_label_;
  std::map<uint32_t, Endpoint> ends_;  // of those that were beaten for
  std::vector<uint64_t> numbers_;      // the last of each node
};

// By which a rank tells the neighbours of its node's leader in the tree that this one is dumping core. It needs little
// of the plan, which is large in a large job.
class DumpNotices {
 public:
  explicit DumpNotices(const NodePlan &plan);
  void send(int32_t process) const;  // some may be lost

 private:
  uint32_t node_;
  std::string secret_, label_;
  std::map<uint32_t, Endpoint> ends_;
};

}  // namespace fsdp::comm
