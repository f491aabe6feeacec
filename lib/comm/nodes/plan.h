// SPDX-License-Identifier: Apache-2.0
// Which rank is on which node, and how the nodes' leaders (the lowest rank of each) find each other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::comm {

struct NodePlace {
  uint32_t leader = 0;  // rank of the job
  std::string host;     // for messages
  std::string address;  // of its LeaderListener, such as "10.0.0.1:41234"
};

struct MeshPlan {
  uint32_t rank = 0;              // this leader
  std::vector<uint32_t> node_of;  // of each rank of the job
  std::vector<NodePlace> nodes;
  std::string secret;
  std::string job;  // differs between jobs of one secret
  uint32_t heartbeat_timeout_ms = 8000;
  uint32_t forming_ms = 8000;  // for all leaders to connect

  uint32_t node() const { return node_of[rank]; }
  // "rank 4 (leader of node 1, host b)"
  std::string leader_text(uint32_t node) const;
};

}  // namespace fsdp::comm
