// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/refuges.h"

#include <algorithm>
#include <utility>

namespace fsdp::membership {
namespace {

constexpr uint64_t stagger_ms = 50;    // time after which the next refuge is tried, too
constexpr uint64_t seek_ms = 1000;     // time in which an ended connection is tried again
constexpr uint64_t patience_ms = 300;  // time for lower refuges to answer

}  // namespace

Refuges::Refuges(Control &control, const NodePlan &plan, LeaderLinks &links, StateRelay &relay, Fd listener)
    : control_(control), plan_(plan), links_(links), relay_(relay), listener_(std::move(listener)) {
  if (!NodePlan::is_refuge(node()) || plan_.node_count() <= 2) listener_.reset();
  if (listener_) newcomers_.emplace(plan_, listener_);
  listener_closed_ = ForkClosed(listener_.get());
}

void Refuges::add_polls(std::vector<pollfd> &polls) const {
  for (const Dial &dial : dials_) polls.push_back(dial.poll());
  if (newcomers_) newcomers_->add_polls(polls);
}

// If a parent has left in order, the node counts as orphaned only while ranks of other nodes remain.
bool Refuges::orphaned() const {
  if (!plan_.has_parent() || links_.reaches_parent()) return false;
  const NodePeer *parent = links_.find(plan_.parent());
  return !parent || !parent->left() || links_.has_ranks_elsewhere();
}

void Refuges::seek() {
  if (!orphaned() || control_.accused()) {
    orphaned_ms_ = 0;
    next_refuge_ = 0;
    dials_.clear();
    deserted_.clear();
    // These refuges are no longer needed, because everything that was reported to them has been answered.
    std::erase_if(links_.all(), [this](const auto &entry) {
      return entry.second.role() == NodePeer::Relation::refuge && !links_.replaces_parent(entry.first, entry.second);
    });
    return;
  }
  if (orphaned_ms_ == 0) orphaned_ms_ = links_.now_ms();
  dial();
  hear();
}

// Tries one refuge after the other, the lowest first, without waiting for a late answer. Once a refuge has answered, no
// further one is tried.
void Refuges::dial() {
  const uint32_t end = std::min(refuge_count, node());
  while (next_refuge_ < end && !has_refuge() && (dials_.empty() || links_.now_ms() - dialed_ms_ >= stagger_ms)) {
    const uint32_t n = next_refuge_++;
    if (n == plan_.parent() || links_.all().contains(n) || links_.in_order(n) || is_dialing(n)) continue;
    dials_.emplace_back(plan_, n, tree::Bond::refuge);
    dialed_ms_ = links_.now_ms();
    dials_.back().advance();
  }
}

bool Refuges::is_dialing(uint32_t refuge) const {
  return std::ranges::any_of(dials_, [refuge](const Dial &dial) { return dial.to() == refuge; });
}

void Refuges::hear() {
  for (Dial &dial : dials_) {
    const Dial::State state = dial.advance();
    if (state == Dial::State::answered) take(dial.to(), NodePeer(NodePeer::Relation::refuge, dial.take()));
    if (dial.nobody_listens()) deserted_.push_back(dial.to());
    // The refuge may not have been ready, or may have had no room, so it is tried again.
    if (state == Dial::State::ended && links_.now_ms() - orphaned_ms_ < seek_ms)
      next_refuge_ = std::min(next_refuge_, dial.to());
  }
  std::erase_if(dials_, [](const Dial &dial) { return dial.state() != Dial::State::trying; });
}

// Only one refuge may take the place of a parent, because with two the states of ranks would go round in circles.
void Refuges::take(uint32_t at, NodePeer refuge) {
  if (links_.replaces_parent(at, refuge)) {
    if (has_refuge()) {
      LeaderLinks::say(&refuge, LeaderLinks::frame_of(tree::Goodbye{}));
      refuge.stream().flush();
      return;
    }
    relay_.repeat_leavers(refuge);
  }
  links_.set(at, std::move(refuge));
}

bool Refuges::has_refuge() const {
  return std::ranges::any_of(links_.all(), [](const auto &entry) {
    return entry.second.role() == NodePeer::Relation::refuge && entry.second.live();
  });
}

// The listeners of refuges exist as long as the job, so if a node has none, its leader has ended. A refuge that has
// decided sends others its verdict before it ends.
std::vector<uint32_t> Refuges::take_deserted() {
  if (!dials_.empty() || next_refuge_ < std::min(refuge_count, node()) || has_refuge()) return {};
  return std::exchange(deserted_, {});
}

std::optional<uint32_t> Refuges::coordinator() const {
  if (!plan_.has_parent()) return node();
  if (links_.reaches_parent()) return plan_.parent();
  if (!orphaned()) return node();  // the job is ending
  const bool patient = links_.now_ms() - orphaned_ms_ < patience_ms;
  for (uint32_t n = 0; n < std::min(refuge_count, node()); ++n) {
    const NodePeer *refuge = links_.find(n);
    if (refuge && refuge->role() == NodePeer::Relation::refuge && refuge->live()) return n;
    if (patient && (n >= next_refuge_ || is_dialing(n))) return {};
  }
  return NodePlan::is_refuge(node()) ? std::optional(node()) : std::nullopt;
}

bool Refuges::has_room() const {
  const auto refugees = std::ranges::count_if(
      links_.all(), [](const auto &entry) { return entry.second.role() == NodePeer::Relation::refugee; });
  return refugees < static_cast<std::ptrdiff_t>(max_refugees);
}

// Neighbours in the tree are not accepted as refugees.
void Refuges::shelter() {
  if (!newcomers_) return;
  for (Newcomers::Newcomer &newcomer : newcomers_->look(has_room())) {
    const uint32_t from = newcomer.hello.node;
    const NodePeer *known = links_.find(from);
    if (newcomer.hello.bond != tree::Bond::refuge || from == node() || (known && known->in_tree()) || !has_room())
      continue;
    greet(newcomer.stream, plan_, tree::Bond::refuge);
    NodePeer peer(NodePeer::Relation::refugee, std::move(newcomer.stream));
    if (control_.accused()) LeaderLinks::say(&peer, LeaderLinks::frame_of(Verdict{control_.verdict()}));
    if (links_.replaces_parent(from, peer)) relay_.repeat_leavers(peer);
    links_.set(from, std::move(peer));
  }
}

}  // namespace fsdp::membership
