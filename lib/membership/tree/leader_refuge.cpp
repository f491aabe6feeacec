// SPDX-License-Identifier: Apache-2.0
// A leader whose way to the root is lost turns to the first nodes: the lowest that answers takes its reports, and gives
// it the verdict. These keep their listeners as long as the job.
#include <algorithm>

#include "membership/tree/leader.h"

namespace fsdp::membership {
namespace {

constexpr uint64_t stagger_ms = 50;  // until the next refuge is tried too
constexpr uint64_t seek_ms = 1000;   // as long as that a connection that ended is made again

}  // namespace

bool NodeLeader::reaches_parent() const {
  const NodePeer *parent = find(plan_.parent());
  return parent && parent->live() && parent->stream() && !parent->blamed() &&
         silent_ms(*parent) < plan_.heartbeat_timeout_ms;
}

// Who leaves in order says nothing of others that stay.
bool NodeLeader::orphaned() const {
  if (!plan_.has_parent() || reaches_parent()) return false;
  const NodePeer *parent = find(plan_.parent());
  return !parent || !parent->left() || members_elsewhere();
}

void NodeLeader::seek_refuge() {
  if (!orphaned() || control_.accused()) {
    orphaned_ms_ = 0;
    next_refuge_ = 0;
    dials_.clear();
    deserted_.clear();
    // What was said there has been answered.
    std::erase_if(peers_, [this](const auto &entry) {
      return entry.second.role() == NodePeer::Relation::refuge && !replaces_parent(entry.first, entry.second);
    });
    return;
  }
  if (orphaned_ms_ == 0) orphaned_ms_ = now_ms_;
  dial_refuges();
  hear_refuges();
  accuse_deserted();
}

// One after the other, the lowest first. It need not wait for one that answers late, but once one has answered it does
// not need those above.
void NodeLeader::dial_refuges() {
  const uint32_t end = std::min(refuge_count, node());
  while (next_refuge_ < end && !has_refuge() && (dials_.empty() || now_ms_ - dialed_ms_ >= stagger_ms)) {
    const uint32_t n = next_refuge_++;
    if (n == plan_.parent() || peers_.contains(n) || in_order(n) || is_dialing(n)) continue;
    dials_.emplace_back(plan_, n, tree::Bond::refuge);
    dialed_ms_ = now_ms_;
    dials_.back().advance();
  }
}

bool NodeLeader::is_dialing(uint32_t refuge) const {
  return std::ranges::any_of(dials_, [refuge](const Dial &dial) { return dial.to() == refuge; });
}

void NodeLeader::hear_refuges() {
  for (Dial &dial : dials_) {
    const Dial::State state = dial.advance();
    if (state == Dial::State::answered) take_refuge(dial.to(), NodePeer(NodePeer::Relation::refuge, dial.take()));
    if (dial.nobody_listens()) deserted_.push_back(dial.to());
    // It may not have come so far, or have had no seat.
    if (state == Dial::State::ended && now_ms_ - orphaned_ms_ < seek_ms)
      next_refuge_ = std::min(next_refuge_, dial.to());
  }
  std::erase_if(dials_, [](const Dial &dial) { return dial.state() != Dial::State::trying; });
}

// In the place of a parent there is one: what is told of ranks would go round between two.
void NodeLeader::take_refuge(uint32_t at, NodePeer refuge) {
  if (replaces_parent(at, refuge)) {
    if (has_refuge()) {
      say(&refuge, frame_of(tree::Goodbye{}));
      refuge.stream().flush();
      return;
    }
    repeat_leavers(refuge);
  }
  peers_.insert_or_assign(at, std::move(refuge));
}

bool NodeLeader::replaces_parent(uint32_t of, const NodePeer &peer) const {
  if (peer.role() == NodePeer::Relation::refugee) return of != 0 && in_order(plan_.parent_of(of));
  const NodePeer *parent = plan_.has_parent() ? find(plan_.parent()) : nullptr;
  return peer.role() == NodePeer::Relation::refuge && parent && parent->left();
}

// Of the ranks that left this one may not have heard: it had no way up for a moment.
void NodeLeader::repeat_leavers(NodePeer &to) {
  tree::StateMap leavers;
  for (uint32_t rank = 0; rank < plan_.node_of.size(); ++rank) {
    const Membership membership = control_.membership(rank);
    if (membership != Membership::left && membership != Membership::gone) continue;
    leavers[rank] = {rank, control_.process(rank), static_cast<uint32_t>(membership), 0, 0};
  }
  for (const SharedFrame &frame : tree::write_states(leavers, false, tree::longest)) say(&to, frame);
}

bool NodeLeader::has_refuge() const {
  return std::ranges::any_of(peers_, [](const auto &entry) {
    return entry.second.role() == NodePeer::Relation::refuge && entry.second.live();
  });
}

// They would listen as long as the job. One that has decided and gone was a refuge to others, who know more.
void NodeLeader::accuse_deserted() {
  if (!dials_.empty() || next_refuge_ < std::min(refuge_count, node()) || has_refuge() || findings_.empty()) return;
  RankSet dead;
  for (const uint32_t n : deserted_) {
    const uint32_t leader = plan_.nodes[n].leader;
    if (!in_order(n) && !reported_.contains(leader)) dead.add(leader);
  }
  deserted_.clear();
  if (dead.empty()) return;
  reported_.add(dead);
  accuse(accuse_dead({}, dead));
}

bool NodeLeader::has_room() const {
  const auto refugees = std::ranges::count_if(
      peers_, [](const auto &entry) { return entry.second.role() == NodePeer::Relation::refugee; });
  return refugees < static_cast<std::ptrdiff_t>(most_refugees);
}

// Neighbours in the tree do not come this way.
void NodeLeader::shelter() {
  if (!newcomers_) return;
  for (Newcomers::Newcomer &newcomer : newcomers_->look(has_room())) {
    const uint32_t from = newcomer.hello.node;
    const NodePeer *known = find(from);
    if (newcomer.hello.bond != tree::Bond::refuge || from == node() || (known && known->in_tree()) || !has_room())
      continue;
    greet(newcomer.stream, plan_, tree::Bond::refuge);
    NodePeer peer(NodePeer::Relation::refugee, std::move(newcomer.stream));
    if (control_.accused()) say(&peer, frame_of(tree::VerdictMessage{control_.verdict()}));
    if (replaces_parent(from, peer)) repeat_leavers(peer);
    peers_.insert_or_assign(from, std::move(peer));
  }
}

}  // namespace fsdp::membership
