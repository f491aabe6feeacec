// SPDX-License-Identifier: Apache-2.0
// Heartbeats between leaders that do not wait for TCP: after a cut of some seconds TCP sends again only seconds later,
// and a healed network would be taken for a cut one. Each carries a proof of the job secret and a number that grows.
// And what other ranks of a leader's node tell in its stead.
//
// Each datagram begins with a mark, which depends on the secret, the job and the node that it is for. The kernel drops
// all others before they take room in the socket's buffer, so a stranger's flood neither displaces heartbeats nor wakes
// this process. A stranger that has seen a mark on its way gets past that: then the leader reads more often.
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
  void beat(uint32_t node, uint64_t number);  // one that is lost is no matter
  // Reads all that has come. Calls heard for each node of which a new heartbeat has come, and dumping for each whose
  // leader, of this process, is said to dump core.
  void receive(const std::function<void(uint32_t)> &heard, const std::function<void(uint32_t, int32_t)> &dumping);
  // The last receive() found many datagrams that told nothing: the buffer may be full before the usual time to read.
  bool flooded() const noexcept { return flooded_; }

 private:
  struct Batch;
  bool take(const void *bytes, size_t size, const std::function<void(uint32_t)> &heard,
            const std::function<void(uint32_t, int32_t)> &dumping);

  const NodePlan &plan_;
  Fd socket_;
  DatagramMark mark_;  // of what is for this node
  std::string label_, dump_label_;
  std::map<uint32_t, DatagramTarget> targets_;  // that were beaten for
  std::vector<uint64_t> numbers_;               // the last of each node
  bool flooded_ = false;
};

// By which a rank tells the neighbours of its node's leader in the tree that this one is dumping core. It needs little
// of the plan, which is large in a large job.
class DumpNotices {
 public:
  explicit DumpNotices(const NodePlan &plan);
  void send(int32_t process) const;  // some may be lost

 private:
  uint32_t node_;
  Secret secret_;
  std::string label_;
  std::map<uint32_t, DatagramTarget> targets_;
};

}  // namespace fsdp::membership
