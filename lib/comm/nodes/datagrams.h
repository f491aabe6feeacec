// SPDX-License-Identifier: Apache-2.0
// Heartbeats between leaders that do not wait for TCP: after a cut of some seconds TCP sends again only seconds later,
// and a healed network would be taken for a cut one. Each carries a proof of the job secret and a number that grows.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "comm/bootstrap/endpoint.h"
#include "comm/nodes/plan.h"

namespace fsdp::comm {

class Datagrams {
 public:
  Datagrams(const MeshPlan &plan, Fd socket);
  const Fd &socket() const noexcept { return socket_; }
  void beat(uint32_t node, uint64_t number) noexcept;  // one that is lost is no matter
  // Calls heard for each node of which a new one has come.
  void receive(const std::function<void(uint32_t)> &heard);

 private:
  const MeshPlan &plan_;
  Fd socket_;
  std::string label_;
  std::vector<Endpoint> ends_;
  std::vector<uint64_t> numbers_;  // the last of each node
};

}  // namespace fsdp::comm
