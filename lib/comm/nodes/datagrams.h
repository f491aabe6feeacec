// SPDX-License-Identifier: Apache-2.0
// Heartbeats between leaders that do not wait for TCP: after a cut of some seconds TCP sends again only seconds later,
// and a healed network would be taken for a cut one. Each carries a proof of the job secret and a number that grows.
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
  // Calls heard for each node of which a new one has come, whoever it is.
  void receive(const std::function<void(uint32_t)> &heard);

 private:
  const NodePlan &plan_;
  Fd socket_;
  std::string label_;
  std::map<uint32_t, Endpoint> ends_;  // of those that were beaten for
  std::vector<uint64_t> numbers_;      // the last of each node
};

}  // namespace fsdp::comm
