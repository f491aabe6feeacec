// SPDX-License-Identifier: Apache-2.0

#include "membership/tree/links.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>

#include "base/failure.h"

namespace fsdp::membership {

namespace {

// Number of bytes that the peer's kernel has not acknowledged.
int unacknowledged(const Fd &socket) noexcept {
  int bytes = 0;
  return ::ioctl(socket.get(), SIOCOUTQ, &bytes) == 0 ? bytes : 1;
}

// The period at which a leader looks at its ranks' memory, because changes in the memory do not wake it. Messages of
// other nodes do, so on a way through the tree only the first node adds this delay.
uint32_t tick_of(uint32_t nodes) { return nodes <= 64 ? LeaderLinks::shortest_tick_ms : nodes <= 512 ? 100 : 400; }
// The period of heartbeats. In a large job each heartbeat causes thousands of wake-ups, all on one network, and in
// tests often on one machine.
uint32_t beat_of(uint32_t nodes, uint32_t limit_ms) { return std::min(nodes <= 512 ? 500u : 2000u, limit_ms / 8); }

}  // namespace

void NodePeer::count(uint32_t elapsed_ms, uint32_t beat_ms) noexcept {
  silence_.count(elapsed_ms, beat_ms);
  const bool all = stream_ && !stream_.sending() && unacknowledged(stream_.socket()) == 0;
  unacknowledged_ms_ = all ? 0 : unacknowledged_ms_ + elapsed_ms;
}

LeaderLinks::LeaderLinks(const NodePlan &plan, const Control &control, NodeLinks streams, Fd heartbeats)
    : plan_(plan),
      control_(control),
      datagrams_(plan, std::move(heartbeats)),
      now_ms_(steady_ms()),
      counted_ms_(now_ms_),
      beat_ms_(beat_of(plan.node_count(), plan.heartbeat_timeout_ms)),
      tick_ms_(tick_of(plan.node_count())) {
  for (auto &[n, stream] : streams)
    peers_.emplace(
        n, NodePeer(plan.is_child(n) ? NodePeer::Relation::child : NodePeer::Relation::parent, std::move(stream)));
}

bool LeaderLinks::flush() {
  bool gone = true;
  for (auto &[n, peer] : peers_)
    if (peer.stream() && !peer.stream().flush() && peer.stream().open()) gone = false;
  return gone;
}

// -- what is known of other nodes --

bool LeaderLinks::replaces_parent(uint32_t of, const NodePeer &peer) const {
  if (peer.role() == NodePeer::Relation::refugee) return of != 0 && in_order(plan_.parent_of(of));
  const NodePeer *parent = plan_.has_parent() ? find(plan_.parent()) : nullptr;
  return peer.role() == NodePeer::Relation::refuge && parent && parent->left();
}

bool LeaderLinks::in_order(uint32_t of) const {
  const Membership state = control_.membership(plan_.nodes[of].leader);
  return state == Membership::left || state == Membership::gone;
}

bool LeaderLinks::has_detour(uint32_t node) const {
  for (; node != 0; node = plan_.parent_of(node))
    if (in_order(plan_.parent_of(node))) return true;
  return false;
}

bool LeaderLinks::has_live_child() const {
  return std::ranges::any_of(peers_, [](const auto &entry) {
    return entry.second.role() == NodePeer::Relation::child && entry.second.live();
  });
}

// A rank of unknown membership counts, because a leader may leave before it has sent the membership of any rank.
bool LeaderLinks::has_ranks_elsewhere() const {
  for (uint32_t rank = 0; rank < plan_.node_of.size(); ++rank)
    if (plan_.node_of[rank] != plan_.node() && control_.membership(rank) <= Membership::member) return true;
  return false;
}

bool LeaderLinks::reaches_parent() const {
  const NodePeer *parent = find(plan_.parent());
  return parent && parent->live() && parent->stream() && !parent->blamed() &&
         silent_ms(*parent) < plan_.heartbeat_timeout_ms;
}

// -- time and heartbeats --

void LeaderLinks::heard(uint32_t from) {
  NodePeer *peer = find(from);
  if (peer && peer->in_tree()) return peer->heard();
  if (from < plan_.node_count() && from != plan_.node())
    pairs_[from].heard();  // ranks of that node may have named ranks of this node first
}

uint32_t LeaderLinks::silent_ms(const NodePeer &peer) const {
  const uint32_t ms = peer.silence().ms();
  return ms - std::min(ms, peer.silence().begun() ? 0 : plan_.forming_ms);
}

bool LeaderLinks::count_silence() {
  // If a leader was itself held up, it has not listened during that time, so the time counts little.
  const uint32_t max_ms = std::min(4 * tick_ms_, plan_.heartbeat_timeout_ms / 4);
  const auto elapsed = static_cast<uint32_t>(std::min<uint64_t>(now_ms_ - counted_ms_, max_ms));
  counted_ms_ = now_ms_;
  bool doubts = false;  // only new doubts, because what a doubted node sends later is not believed anyway
  const auto count = [&](Silence const &silence, auto &counted) {
    const bool trusted = silence.trusted();
    counted.count(elapsed, beat_ms_);
    doubts |= trusted && !silence.trusted();
  };
  for (auto &[n, peer] : peers_)
    if (is_neighbour(n, peer)) count(peer.silence(), peer);
  for (auto &[n, pair] : pairs_)
    if (pair.begun()) count(pair, pair);
  return doubts;
}

bool LeaderLinks::doubts(uint32_t of) const {
  const NodePeer *way = find(plan_.next_hop(of));
  const auto pair = pairs_.find(of);
  return (way && way->live() && !way->silence().trusted()) || (pair != pairs_.end() && !pair->second.trusted());
}

void LeaderLinks::watch_data_peers() {
  control_.find_data_peers([this](uint32_t rank) {
    const uint32_t of = plan_.node_of[rank];
    if (of != plan_.node() && !plan_.is_bound(of)) pairs_.try_emplace(of);
  });
}

void LeaderLinks::beat() {
  if (now_ms_ - beaten_ms_ < beat_ms_) return;
  beaten_ms_ = now_ms_;
  watch_data_peers();
  const tree::Beat message{++beats_};
  const SharedFrame frame = frame_of(message);
  for (auto &[n, peer] : peers_) {
    if (!is_neighbour(n, peer)) continue;
    datagrams_.beat(n, message.number);
    if (peer.all_acknowledged()) say(&peer, frame);  // otherwise it would wait behind other frames
  }
  for (const auto &[n, pair] : pairs_) datagrams_.beat(n, message.number);
}

}  // namespace fsdp::membership
