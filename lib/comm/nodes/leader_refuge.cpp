// SPDX-License-Identifier: Apache-2.0
// A leader whose way to the root is lost turns to the first nodes: the lowest that answers takes its reports, and gives
// it the verdict. These keep their listeners as long as the job.
#include <algorithm>

#include "comm/nodes/leader.h"

namespace fsdp::comm {
bool NodeLeader::reaches_parent() const {
  const NodePeer *parent = find(plan_.parent());
  return parent && parent->live() && parent->stream() && !parent->blamed() &&
         parent->silence().ms() < plan_.heartbeat_timeout_ms;
}

bool NodeLeader::orphaned() const {
  if (!plan_.has_parent() || reaches_parent()) return false;
  const NodePeer *parent = find(plan_.parent());
  return !(parent && parent->left());
}

void NodeLeader::seek_refuge() {
  if (!orphaned() || control_.accused()) {
    dials_.clear();
    // What was said there has been answered.
    std::erase_if(peers_, [](const auto &entry) { return entry.second.role() == NodePeer::Role::refuge; });
    return;
  }
  if (!seeking_) {
    seeking_ = true;
    orphaned_ms_ = now_ms_;
    for (uint32_t n = 0; n < std::min(refuge_count, node()); ++n)
      if (n != plan_.parent() && !peers_.contains(n)) dials_.emplace_back(plan_, n, nodes::Bond::refuge);
  }
  for (Dial &dial : dials_) {
    const Dial::State state = dial.advance();
    if (state == Dial::State::answered) take_refuge(dial);
    if (dial.nobody_listens()) lose_refuge(dial);
  }
  std::erase_if(dials_, [](const Dial &dial) { return dial.state() != Dial::State::trying; });
}

void NodeLeader::take_refuge(Dial &dial) {
  peers_.insert_or_assign(dial.to(), NodePeer(NodePeer::Role::refuge, dial.take()));
}

// It would listen as long as the job.
void NodeLeader::lose_refuge(const Dial &dial) {
  const uint32_t leader = plan_.nodes[dial.to()].leader;
  if (in_order(dial.to()) || reported_.contains(leader)) return;
  reported_.add(leader);
  RankSet dead;
  dead.add(leader);
  accuse(accuse_dead({}, dead));
}

uint32_t NodeLeader::room() const {
  const auto refugees = static_cast<uint32_t>(
      std::ranges::count_if(peers_, [](const auto &entry) { return entry.second.role() == NodePeer::Role::refugee; }));
  return most_guests - std::min(most_guests, refugees);
}

// Neighbours in the tree do not come this way.
void NodeLeader::shelter() {
  if (!listener_) return;
  for (Door::Newcomer &newcomer : door_.look(room())) {
    const uint32_t from = newcomer.hello.node;
    const NodePeer *known = find(from);
    if (newcomer.hello.bond != nodes::Bond::refuge || from == node() || (known && known->in_tree())) continue;
    greet(newcomer.stream, plan_, nodes::Bond::refuge);
    NodePeer peer(NodePeer::Role::refugee, std::move(newcomer.stream));
    if (control_.accused()) say(&peer, frame_of(nodes::VerdictMessage{control_.verdict()}));
    peers_.insert_or_assign(from, std::move(peer));
  }
}

}  // namespace fsdp::comm
