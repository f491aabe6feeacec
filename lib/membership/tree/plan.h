// SPDX-License-Identifier: Apache-2.0
// Assigns ranks to nodes, tells how the leaders (the lowest rank of each node) reach each other, and defines the tree
// that connects them. Node 0 is the root. If there are at most `degree` other nodes, the tree is a star. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "membership/wire/secret.h"

namespace fsdp::membership {

constexpr uint32_t tree_degree = 64;
constexpr uint32_t refuge_count = 8;
constexpr uint32_t max_refugees = 8;  // limit for one refuge; refugees leave as soon as they know the verdict

// The parent of a node that is not the root.
constexpr uint32_t parent_in_tree(uint32_t node, uint32_t degree = tree_degree) { return (node - 1) / degree; }
inline std::vector<uint32_t> children_in_tree(uint32_t node, uint32_t node_count, uint32_t degree = tree_degree) {
  std::vector<uint32_t> all;
  const uint64_t first = uint64_t{node} * degree + 1;
  for (uint64_t n = first; n < std::min<uint64_t>(first + degree, node_count); ++n)
    all.push_back(static_cast<uint32_t>(n));
  return all;
}
inline uint32_t child_count_in_tree(uint32_t node, uint32_t node_count, uint32_t degree = tree_degree) {
  const uint64_t first = uint64_t{node} * degree + 1;
  return static_cast<uint32_t>(std::max(first, std::min<uint64_t>(first + degree, node_count)) - first);
}

struct NodePlace {
  uint32_t leader = 0;  // the leader's rank in the job
  std::string host;     // name for messages
  std::string address;  // address of its LeaderListener, such as "10.0.0.1:41234"
};

struct NodePlan {
  uint32_t rank = 0;              // the rank that has this plan
  std::vector<uint32_t> node_of;  // the node of each rank of the job
  std::vector<NodePlace> nodes;
  Secret secret;
  std::string job;  // differs between jobs with the same secret
  uint32_t heartbeat_timeout_ms = 8000;
  uint32_t forming_ms = 8000;  // time for all leaders to connect
  uint32_t degree = tree_degree;

  uint32_t node() const { return node_of[rank]; }
  uint32_t node_count() const { return static_cast<uint32_t>(nodes.size()); }

  // -- the tree --
  uint32_t parent_of(uint32_t other) const { return parent_in_tree(other, degree); }
  bool has_parent() const { return node() != 0; }
  uint32_t parent() const { return parent_of(node()); }
  bool is_child(uint32_t other) const { return other > node() && other < node_count() && parent_of(other) == node(); }
  bool is_bound(uint32_t other) const { return is_child(other) || (has_parent() && other == parent()); }
  bool has_children(uint32_t other) const { return child_count_in_tree(other, node_count(), degree) > 0; }
  std::vector<uint32_t> children() const { return children_in_tree(node(), node_count(), degree); }
  // Is `node` an ancestor of `other` or of this node, or one of the two? These nodes include the way between the two.
  bool is_between(uint32_t node, uint32_t other) const { return is_above(node, other) || is_above(node, this->node()); }
  // The neighbour through which this node reaches node `to`.
  uint32_t next_hop(uint32_t to) const {
    while (to > node() && parent_of(to) != node()) to = parent_of(to);
    return to > node() ? to : parent();
  }
  bool is_above(uint32_t above, uint32_t below) const {
    while (below > above) below = parent_of(below);
    return below == above;
  }
  // Is the node one of those to which leaders turn that have lost their way to the root?
  static bool is_refuge(uint32_t node) { return node < refuge_count; }
  // "rank 4 (leader of node 1, host b)"
  std::string leader_text(uint32_t node) const;
};

}  // namespace fsdp::membership
