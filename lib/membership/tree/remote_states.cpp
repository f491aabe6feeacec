// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/remote_states.h"

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
// and each leader hears of each wait. Up to ranks_at_full_rate ranks, each reports every wait_period_ms; in larger jobs
// the period grows with the number of ranks. See NodePeer::take_waits.
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
  const uint64_t looks = control_.waits()[said.rank].looks.load(std::memory_order_acquire);
  if (static_cast<uint32_t>(control_.membership(said.rank)) != said.membership) return true;
  if (looks == said.looks) return false;
  const bool waits = static_cast<uint32_t>(looks) != 0, waited = static_cast<uint32_t>(said.looks) != 0;
  // A wait that is over counts no more looks and so misleads no rank. In a large job its end can be told later, too.
  if (!waits && (!waited || period_ms_ == wait_period_ms)) return waited;
  return now_ms - said.at_ms >= period_ms_;
}

tree::RankState RemoteStates::state_of(uint32_t rank) const noexcept {
  const WaitEntry &entry = control_.waits()[rank];
  tree::RankState state{};
  state.rank = rank;
  state.process = control_.process(rank);
  state.membership = static_cast<uint32_t>(control_.membership(rank));
  state.looks = entry.looks.load(std::memory_order_seq_cst);
  state.for_rank = entry.for_rank.load(std::memory_order_relaxed);
  // If the wait has ended meanwhile, for_rank may belong to another wait: then the state says that no wait is on.
  const uint64_t after = entry.looks.load(std::memory_order_seq_cst);
  if (after >> 32 != state.looks >> 32 || static_cast<uint32_t>(after) == 0) state.looks = 0;
  return state;
}

void RemoteStates::look(uint64_t now_ms, const std::function<void(const tree::RankState &)> &say) {
  for (LastTold &said : last_told_) {
    if (!due(said, now_ms)) continue;
    const tree::RankState state = state_of(said.rank);
    said.looks = state.looks;
    said.membership = state.membership;
    said.at_ms = now_ms;
    say(state);
  }
}

// A post that is being written is seen at the next look.
void RemoteStates::look_at_posts(const std::function<void(const tree::Post &)> &say) {
  for (LastTold &said : last_told_) {
    const PostEntry *entry = control_.posts().find(said.rank);
    if (!entry) continue;
    const uint32_t turn = entry->turn();
    tree::Post post{said.rank, tree::Post::everybody, {}, {}};
    if (turn == said.post_turn || !control_.posts().load(said.rank, post.bytes, post.text.bytes)) continue;
    said.post_turn = turn;
    post.to = entry->to().value_or(tree::Post::everybody);
    say(post);
  }
}

RemoteStates::LastTold *RemoteStates::find(uint32_t rank) noexcept {
  const auto found = std::ranges::lower_bound(last_told_, rank, {}, &LastTold::rank);
  return found != last_told_.end() && found->rank == rank ? &*found : nullptr;
}

void RemoteStates::look_at_texts(uint64_t now_ms, const std::function<void(const tree::WaitText &)> &say) {
  const Waits waits = control_.waits();
  waits.texts().for_each([&](uint32_t rank, uint32_t number) {
    LastTold *said = find(rank);
    if (!said || said->looks >> 32 != number) return;
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
  // Between two waits the entry says that the rank does not wait. Within one wait it must not: the wait may have a
  // text, whose place would then be free.
  if (entry.looks.load(std::memory_order_relaxed) >> 32 != state.looks >> 32)
    entry.looks.store(0, std::memory_order_seq_cst);
  entry.for_rank.store(state.for_rank, std::memory_order_relaxed);
  entry.looks.store(state.looks, std::memory_order_seq_cst);
  control_.set_process(state.rank, state.process);
  control_.set_membership(state.rank, static_cast<Membership>(state.membership));
  return true;
}

void RemoteStates::forget_waits(const std::function<bool(uint32_t node)> &of) noexcept {
  for (uint32_t rank = 0; rank < plan_.node_of.size(); ++rank)
    if (control_.waits()[rank].looks.load(std::memory_order_relaxed) && elsewhere(rank) && of(plan_.node_of[rank]))
      control_.waits()[rank].looks.store(0, std::memory_order_seq_cst);
}

}  // namespace fsdp::membership
