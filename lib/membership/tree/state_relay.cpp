// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/state_relay.h"

#include <algorithm>

namespace fsdp::membership {
namespace {

constexpr size_t max_waits_frame_bytes = 4096;  // a frame is sent or dropped as a whole: see NodePeer::take_waits

}  // namespace

StateRelay::StateRelay(Control &control, const NodePlan &plan, LeaderLinks &links)
    : control_(control), plan_(plan), links_(links), remote_(control, plan) {}

// Most nodes of a large job are leaves of the tree, and take in no refugees: they pass on nothing from above.
bool StateRelay::may_pass_on() const { return NodePlan::is_refuge(plan_.node()) || !plan_.children().empty(); }

// From above come no states of this node or of nodes below it. From below come states of the sender and of nodes below
// it, or, if the sender is a refuge, of nodes that use it as a detour. By way of a refuge an old state may arrive after
// the news that a rank has left: it does not fit.
bool StateRelay::fits(uint32_t from, const NodePeer &peer, const tree::RankState &state) const {
  if (state.rank >= plan_.node_of.size() || state.membership > static_cast<uint32_t>(Membership::gone)) return false;
  const uint32_t of = plan_.node_of[state.rank];
  const bool is_below = plan_.is_above(from, of) || (NodePlan::is_refuge(from) && links_.has_detour(of));
  if (peer.above() ? plan_.is_above(plan_.node(), of) : !is_below) return false;
  return state.membership >= static_cast<uint32_t>(control_.membership(state.rank));
}

// Waits that came over a doubted connection are cleared before they are passed on. Doubts about a pair concern only
// this node, so they are passed on as they are.
void StateRelay::hear(uint32_t from, std::vector<tree::RankState> states) {
  const NodePeer &peer = links_.at(from);
  tree::StateMap &relayed = peer.above() ? from_above_ : from_below_;
  for (tree::RankState &state : states) {
    if (!fits(from, peer, state)) continue;
    if (!peer.silence().trusted()) state.looks = 0;
    if (!peer.above() || may_pass_on()) relayed.insert_or_assign(state.rank, state);
    const auto pair = links_.pairs().find(plan_.node_of[state.rank]);
    if (pair != links_.pairs().end() && !pair->second.trusted()) state.looks = 0;
    remote_.apply(state);
  }
}

void StateRelay::hear(uint32_t from, const tree::Post &post) {
  const bool everybody = post.to == tree::Post::everybody;
  if (post.rank >= plan_.node_of.size() || (!everybody && post.to >= plan_.node_of.size())) return;
  spread(post, from);
  if (everybody || plan_.node_of[post.to] == plan_.node()) remote_.apply(post);
}

void StateRelay::hear(uint32_t from, const tree::WaitText &text) {
  if (text.rank >= plan_.node_of.size()) return;
  spread(text, from);
  remote_.apply(text);
}

void StateRelay::spread() {
  remote_.look_at_posts([this](const tree::Post &post) { spread(post, {}); });
  remote_.look(links_.now_ms(),
               [this](const tree::RankState &state) { from_below_.insert_or_assign(state.rank, state); });
  spread_states(false);
  remote_.look_at_texts(links_.now_ms(), [this](const tree::WaitText &text) { spread(text, {}); });
}

// In a large job states wait a moment and go together with the next ones. The news that a rank has left goes at once.
void StateRelay::spread_states(bool at_once) {
  const auto leaves = [](const auto &entry) {
    return entry.second.membership >= static_cast<uint32_t>(Membership::left);
  };
  if (!at_once && links_.tick_ms() > LeaderLinks::shortest_tick_ms && links_.now_ms() - spread_ms_ < links_.tick_ms() &&
      !std::ranges::any_of(from_above_, leaves) && !std::ranges::any_of(from_below_, leaves))
    return;
  spread_ms_ = links_.now_ms();
  spread(from_below_, true);
  from_above_.merge(from_below_);  // no rank is in both
  spread(from_above_, false);
  from_above_.clear();
  from_below_.clear();
}

void StateRelay::spread(const tree::StateMap &states, bool up) {
  const auto say_to = [&](const SharedFrame &frame, bool waits) {
    for (auto &[n, peer] : links_.all())
      if (peer.above() == up && links_.is_neighbour(n, peer) && (!waits || peer.take_waits(frame->bytes.size())))
        links_.say(&peer, frame);
  };
  for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) say_to(frame, false);
  for (const SharedFrame &frame : tree::write_states(states, true, max_waits_frame_bytes)) say_to(frame, true);
}

void StateRelay::spread(const tree::Post &post, std::optional<uint32_t> from) {
  if (post.to < plan_.node_of.size()) {
    const uint32_t to = plan_.node_of[post.to];
    if (to == plan_.node()) return;
    const uint32_t hop = plan_.next_hop(to);
    const NodePeer *way = links_.find(hop);
    if (hop == from || (way && way->live())) return hop == from ? void() : links_.say(hop, post);
  }
  const SharedFrame frame = LeaderLinks::frame_of(post);
  for (auto &[n, peer] : links_.all())
    if (links_.is_neighbour(n, peer) && n != from) links_.say(&peer, frame);
}

// Texts share the limit of waits (take_waits): a dropped text is sent again. All pending states are sent first,
// since a node drops the text of a wait that it does not know.
void StateRelay::spread(const tree::WaitText &text, std::optional<uint32_t> from) {
  spread_states(true);
  const SharedFrame frame = LeaderLinks::frame_of(text);
  for (auto &[n, peer] : links_.all())
    if (links_.is_neighbour(n, peer) && n != from && peer.take_waits(frame->bytes.size())) links_.say(&peer, frame);
}

void StateRelay::repeat_leavers(NodePeer &to) {
  tree::StateMap leavers;
  for (uint32_t rank = 0; rank < plan_.node_of.size(); ++rank) {
    const Membership membership = control_.membership(rank);
    if (membership != Membership::left && membership != Membership::gone) continue;
    leavers[rank] = {rank, control_.process(rank), static_cast<uint32_t>(membership), 0, 0};
  }
  for (const SharedFrame &frame : tree::write_states(leavers, false, tree::longest)) links_.say(&to, frame);
}

void StateRelay::forget_doubted() noexcept {
  remote_.forget_waits([this](uint32_t of) { return links_.doubts(of); });
}

}  // namespace fsdp::membership
