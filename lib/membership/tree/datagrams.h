// SPDX-License-Identifier: Apache-2.0
// Heartbeats between leaders by UDP. TCP would be too late: after a cut of some seconds it sends again only seconds
// later, so a healed network would be judged as cut. Each heartbeat has a proof of the job secret and an increasing
// number. Notices that a leader is dumping core, which other ranks of its node send, use the same socket.
//
// Each datagram begins with a mark, which depends on the secret, the job and the receiving node. The kernel drops
// datagrams without this node's mark before they take room in the socket's buffer. So a stranger's flood neither
// displaces heartbeats nor wakes this process. A stranger that has seen a mark on the network gets past the filter; the
// leader then reads more often.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "membership/tree/plan.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

using DatagramMark = std::array<uint8_t, 8>;
struct DatagramTarget {
  Endpoint end;
  DatagramMark mark;
};

class Datagrams {
 public:
  Datagrams(const NodePlan &plan, Fd socket);
  const Fd &socket() const noexcept { return socket_; }
  void beat(uint32_t node, uint64_t number);  // sends a heartbeat, which may be lost
  // Reads all datagrams that have arrived. Calls heard(node) for each new heartbeat. Calls dumping(node, process) for
  // each notice that the leader of that node, a process with that number, is dumping core.
  void receive(const std::function<void(uint32_t)> &heard, const std::function<void(uint32_t, int32_t)> &dumping);
  // Did the last receive() find many useless datagrams? If so, the buffer may be full before the usual time to read.
  bool flooded() const noexcept { return flooded_; }

 private:
  struct Batch;
  bool take(const void *bytes, size_t size, const std::function<void(uint32_t)> &heard,
            const std::function<void(uint32_t, int32_t)> &dumping);

  const NodePlan &plan_;
  Fd socket_;
  DatagramMark mark_;  // mark of datagrams to this node
  std::string label_, dump_label_;
  std::map<uint32_t, DatagramTarget> targets_;  // the nodes to which this one sends
  std::vector<uint64_t> numbers_;               // number of the last heartbeat of each node
  bool flooded_ = false;
};

// Sends notices with which a rank tells its leader's neighbours in the tree that the leader is dumping core. Keeps
// little of the plan, which is large in a large job.
class DumpNotices {
 public:
  explicit DumpNotices(const NodePlan &plan);
  void send(int32_t process) const;  // some notices may be lost

 private:
  uint32_t node_;
  Secret secret_;
  std::string label_;
  std::map<uint32_t, DatagramTarget> targets_;
};

}  // namespace fsdp::membership
