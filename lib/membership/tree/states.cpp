// SPDX-License-Identifier: Apache-2.0

#include "membership/tree/states.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "membership/tree/message.h"

namespace fsdp::membership::tree {
namespace {

SharedFrame frame_of(const std::vector<RankState> &states) {
  return share_frame(write_frame(static_cast<uint32_t>(LinkKind::states), std::as_bytes(std::span(states))));
}

}  // namespace

std::vector<SharedFrame> write_states(const StateMap &states, bool waiting, size_t max_bytes) {
  std::vector<SharedFrame> frames;
  std::vector<RankState> body;
  for (const auto &[rank, state] : states) {
    if (waits(state) != waiting) continue;
    if (!body.empty() && (body.size() + 1) * sizeof state > max_bytes)
      frames.push_back(frame_of(std::exchange(body, {})));
    body.push_back(state);
  }
  if (!body.empty()) frames.push_back(frame_of(body));
  return frames;
}

std::optional<std::vector<RankState>> read_states(const Frame &frame) {
  const size_t bytes = frame.body.size();
  if (frame.kind != static_cast<uint32_t>(LinkKind::states) || bytes == 0 || bytes % sizeof(RankState) != 0) return {};
  std::vector<RankState> states(bytes / sizeof(RankState));
  std::memcpy(static_cast<void *>(states.data()), frame.body.data(), bytes);
  return states;
}

}  // namespace fsdp::membership::tree

namespace fsdp::membership {
namespace {

// Period at which a long wait is reported to the other nodes. When one rank of a large job is late, all others wait,
// and each leader receives each wait. With up to ranks_at_full_rate ranks, each rank reports every wait_period_ms; in
// larger jobs the period grows with the number of ranks. See NodePeer::take_waits.
constexpr uint64_t wait_period_ms = 100;
constexpr uint64_t ranks_at_full_rate = 60;
constexpr uint64_t wait_text_period_ms = 1000;

uint64_t wait_report_period_ms(const NodePlan &plan) {
  return wait_period_ms * std::max(plan.node_of.size() / ranks_at_full_rate, size_t{1});
}

}  // namespace

RemoteStates::RemoteStates(Control &control, const NodePlan &plan)
    : control_(control), plan_(plan), period_ms_(wait_report_period_ms(plan)) {
  for (uint32_t rank = 0; rank < plan.node_of.size(); ++rank)
    if (plan.node_of[rank] == plan.node())
      last_told_.push_back({rank});
    else
      control_.set_remote(rank);
}

bool RemoteStates::due(const LastTold &said, uint64_t now_ms) const noexcept {
  const uint64_t shown = control_.waits()[said.rank].wait_and_looks.load(std::memory_order_acquire);
  if (static_cast<uint32_t>(control_.membership(said.rank)) != said.membership) return true;
  if (shown == said.wait_and_looks) return false;
  const bool waits = look_count(shown) != 0, waited = look_count(said.wait_and_looks) != 0;
  // A wait that has ended makes no more looks, so it misleads no rank. Therefore in a large job its end can be sent
  // later, too.
  if (!waits && (!waited || period_ms_ == wait_period_ms)) return waited;
  return now_ms - said.at_ms >= period_ms_;
}

tree::RankState RemoteStates::state_of(uint32_t rank) const noexcept {
  const WaitEntry &entry = control_.waits()[rank];
  tree::RankState state{};
  state.rank = rank;
  state.process = control_.process(rank);
  state.membership = static_cast<uint32_t>(control_.membership(rank));
  state.wait_and_looks = entry.wait_and_looks.load(std::memory_order_seq_cst);
  state.awaited_rank = entry.awaited_rank.load(std::memory_order_acquire);
  // If the wait has just ended, awaited_rank may belong to another wait. In that case the state says that the rank does
  // not wait.
  const uint64_t after = entry.wait_and_looks.load(std::memory_order_seq_cst);
  if (!same_wait(after, state.wait_and_looks) || look_count(after) == 0) state.wait_and_looks = 0;
  return state;
}

void RemoteStates::look(uint64_t now_ms, const std::function<void(const tree::RankState &)> &say) {
  for (LastTold &said : last_told_) {
    if (!due(said, now_ms)) continue;
    const tree::RankState state = state_of(said.rank);
    said.wait_and_looks = state.wait_and_looks;
    said.membership = state.membership;
    said.at_ms = now_ms;
    say(state);
  }
}

// A post that is being written is found at the next look.
void RemoteStates::look_at_posts(uint64_t now_ms, const std::function<void(const tree::Post &)> &say) {
  for (LastTold &said : last_told_) {
    const PostEntry *entry = control_.posts().find(said.rank);
    if (!entry) continue;
    const uint32_t turn = entry->turn();
    tree::Post post{said.rank, tree::Post::everybody, {}, {}};
    if (turn == said.post_turn || !control_.posts().load(said.rank, post.bytes, post.text.bytes)) continue;
    said.post_turn = turn;
    said.post_ms = now_ms;
    post.to = entry->to().value_or(tree::Post::everybody);
    say(post);
  }
}

void RemoteStates::repeat_posts(uint64_t since_ms) noexcept {
  for (LastTold &said : last_told_)
    if (said.post_ms >= since_ms) said.post_turn = 0;
}

RemoteStates::LastTold *RemoteStates::find(uint32_t rank) noexcept {
  const auto found = std::ranges::lower_bound(last_told_, rank, {}, &LastTold::rank);
  return found != last_told_.end() && found->rank == rank ? &*found : nullptr;
}

void RemoteStates::look_at_texts(uint64_t now_ms, const std::function<void(const tree::WaitText &)> &say) {
  const Waits waits = control_.waits();
  waits.texts().for_each([&](uint32_t rank, uint32_t number) {
    LastTold *said = find(rank);
    if (!said || wait_number(said->wait_and_looks) != number) return;
    if (said->text_number == number && now_ms - said->text_ms < std::max(wait_text_period_ms, period_ms_)) return;
    tree::WaitText text{rank, number, {}};
    if (!waits.texts().load(rank, number, text.text)) return;
    said->text_number = number;
    said->text_ms = now_ms;
    say(text);
  });
}

bool RemoteStates::apply(const tree::Post &post) noexcept {
  if (!elsewhere(post.rank)) return false;
  control_.posts().store(post.rank, post.bytes, post.text.view(), std::nullopt);
  return true;
}

bool RemoteStates::apply(const tree::WaitText &text) noexcept {
  if (!elsewhere(text.rank) || !control_.waits().is_current(text.rank, text.number)) return false;
  control_.waits().show_text(text.rank, text.number, text.text.view());
  return true;
}

bool RemoteStates::apply(const tree::RankState &state) noexcept {
  if (!elsewhere(state.rank) || state.membership > static_cast<uint32_t>(Membership::gone)) return false;
  WaitEntry &entry = control_.waits()[state.rank];
  // Between two waits the entry shows that the rank does not wait. Within one wait it must not show that: the wait may
  // have a text, and the place of the text would count as free.
  if (!same_wait(entry.wait_and_looks.load(std::memory_order_relaxed), state.wait_and_looks))
    entry.wait_and_looks.store(0, std::memory_order_seq_cst);
  entry.awaited_rank.store(state.awaited_rank, std::memory_order_release);
  entry.wait_and_looks.store(state.wait_and_looks, std::memory_order_seq_cst);
  control_.set_process(state.rank, state.process);
  control_.set_membership(state.rank, static_cast<Membership>(state.membership));
  return true;
}

void RemoteStates::forget_waits(const std::function<bool(uint32_t node)> &of) noexcept {
  for (uint32_t rank = 0; rank < plan_.node_of.size(); ++rank)
    if (control_.waits()[rank].wait_and_looks.load(std::memory_order_relaxed) && elsewhere(rank) &&
        of(plan_.node_of[rank]))
      control_.waits()[rank].wait_and_looks.store(0, std::memory_order_seq_cst);
}

namespace {

constexpr uint64_t repeat_after_ms = 1200;      // leaders seek a refuge for a second: see Refuges
constexpr uint64_t repeat_from_ms = 1000;       // how long before the news posts may have been lost
constexpr size_t max_waits_frame_bytes = 4096;  // a frame is sent or dropped as a whole: see NodePeer::take_waits

}  // namespace

StateRelay::StateRelay(Control &control, const NodePlan &plan, LeaderLinks &links)
    : control_(control), plan_(plan), links_(links), remote_(control, plan) {}

// Most nodes of a large job are leaves of the tree and accept no refugees, so they pass on nothing from above.
bool StateRelay::may_pass_on() const { return NodePlan::is_refuge(plan_.node()) || !plan_.children().empty(); }

// States from above are not of this node or of nodes below it. States from below are of the sender and of nodes below
// it or, if the sender is a refuge, of nodes that use it as a detour. Over a refuge an old state may arrive after the
// news that a rank has left; such a state does not fit.
bool StateRelay::fits(uint32_t from, const NodePeer &peer, const tree::RankState &state) const {
  if (state.rank >= plan_.node_of.size() || state.membership > static_cast<uint32_t>(Membership::gone)) return false;
  const uint32_t of = plan_.node_of[state.rank];
  const bool is_below = plan_.is_above(from, of) || (NodePlan::is_refuge(from) && links_.has_detour(of));
  if (peer.above() ? plan_.is_above(plan_.node(), of) : !is_below) return false;
  return state.membership >= static_cast<uint32_t>(control_.membership(state.rank));
}

// Waits that arrived over a doubted connection are cleared before they are passed on. Doubts about a pair concern only
// this node, so the waits of the pair are passed on unchanged.
void StateRelay::hear(uint32_t from, std::vector<tree::RankState> states) {
  const NodePeer &peer = links_.at(from);
  tree::StateMap &relayed = peer.above() ? from_above_ : from_below_;
  for (tree::RankState &state : states) {
    if (!fits(from, peer, state)) continue;
    note_leaver(state);
    if (!peer.silence().trusted()) state.wait_and_looks = 0;
    if (!peer.above() || may_pass_on()) relayed.insert_or_assign(state.rank, state);
    const auto pair = links_.pairs().find(plan_.node_of[state.rank]);
    if (pair != links_.pairs().end() && !pair->second.trusted()) state.wait_and_looks = 0;
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

// Messages of other nodes go through a leader with children, or through a refuge.
void StateRelay::note_leaver(const tree::RankState &state) noexcept {
  const uint32_t of = plan_.node_of[state.rank];
  const bool leaves = state.membership >= static_cast<uint32_t>(Membership::left) &&
                      control_.membership(state.rank) <= Membership::member;
  if (!leaves || plan_.nodes[of].leader != state.rank || !(plan_.has_children(of) || NodePlan::is_refuge(of))) return;
  last_lost_ms_ = links_.now_ms();
  if (first_lost_ms_ == 0) first_lost_ms_ = last_lost_ms_;
}

// A post is lost if it was to go through a leader that has left, while those behind that leader had not found their
// refuges yet. So this node passes on its latest posts again when they have had time to find them.
bool StateRelay::should_repeat_posts() const noexcept {
  return first_lost_ms_ != 0 && links_.now_ms() - first_lost_ms_ >= repeat_after_ms;
}

void StateRelay::repeat_posts() noexcept {
  if (first_lost_ms_ == 0) return;
  remote_.repeat_posts(first_lost_ms_ - std::min(first_lost_ms_, repeat_from_ms));
  first_lost_ms_ = last_lost_ms_ > first_lost_ms_ ? last_lost_ms_ : 0;  // for leaders that have left since
}

void StateRelay::spread() {
  if (should_repeat_posts()) repeat_posts();
  remote_.look_at_posts(links_.now_ms(), [this](const tree::Post &post) { spread(post, {}); });
  remote_.look(links_.now_ms(),
               [this](const tree::RankState &state) { from_below_.insert_or_assign(state.rank, state); });
  spread_states(false);
  remote_.look_at_texts(links_.now_ms(), [this](const tree::WaitText &text) { spread(text, {}); });
}

// In a large job states wait a moment and are sent together with the next ones. The news that a rank has left is sent
// immediately.
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

// Texts share the limit of waits (take_waits): a dropped text is sent again. All pending states are sent first, because
// a node drops the text of a wait that it does not know.
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
