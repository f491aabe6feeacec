// SPDX-License-Identifier: Apache-2.0
#include "comm/nodes/mesh.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "comm/nodes/form.h"

namespace fsdp::comm {
namespace {

constexpr uint32_t tick_ms = 50;
constexpr uint32_t longest_beat_ms = 500;
constexpr uint64_t farewell_ms = 200;

}  // namespace

NodeMesh::NodeMesh(Seat &seat, MeshPlan plan, std::vector<FrameStream> links, Fd datagrams)
    : seat_(seat),
      control_(seat.control),
      plan_(std::move(plan)),
      court_(plan_),
      mirror_(control_, plan_),
      datagrams_(plan_, std::move(datagrams)),
      peers_(plan_.nodes.size()),
      now_ms_(steady_ms()),
      counted_ms_(now_ms_),
      beat_ms_(std::min(longest_beat_ms, plan_.heartbeat_timeout_ms / 8)) {
  for (uint32_t n = 0; n < peers_.size(); ++n)
    if (n != node()) peers_[n] = NodePeer(std::move(links[n]));
  control_.set_leader(plan_.rank);
}

void NodeMesh::sleep(int wake, uint32_t ms) {
  std::vector<pollfd> polls = {{wake, POLLIN, 0}, {datagrams_.socket().get(), POLLIN, 0}};
  for (NodePeer &peer : peers_)
    if (peer.stream())
      polls.push_back(
          {peer.stream().socket().get(),
           static_cast<short>((peer.stream().open() ? POLLIN : 0) | (peer.stream().sending() ? POLLOUT : 0)), 0});
  ::poll(polls.data(), polls.size(), static_cast<int>(ms));
}

// No memory for a round: the next one has another chance.
void NodeMesh::run(int wake, uint32_t ms) noexcept {
  try {
    sleep(wake, std::min(ms, tick_ms));
    work();
  } catch (...) {
  }
}

void NodeMesh::work() {
  now_ms_ = steady_ms();
  hear_all();
  count_silence();
  if (!control_.accused()) {
    find_suspicion();  // first: one that aborted and then died is named for the abort
    find_dead();
    find_silent();
    judge_silence();
  }
  carry();
  announce();
  // After the blame: a rank that aborts and leaves is named for the abort.
  mirror_.look_at_posts([this](const nodes::Post &post, std::optional<uint32_t> to) { tell(post, to); });
  mirror_.look(now_ms_, [this](const nodes::State &state) { tell(state); });
  beat();
  for (NodePeer &peer : peers_)
    if (peer.stream()) peer.stream().flush();
}

// What this node still has to say, and that the end of its connections is none of a process.
void NodeMesh::finish() noexcept {
  try {
    work();
    if (court_.open()) now_ms_ += farewell_ms;  // no time for others to report
    carry();
    announce();
    say_all(nodes::Goodbye{});
    const uint64_t end = steady_ms() + farewell_ms;
    bool sending = true;
    while (sending && steady_ms() < end) {
      sending = false;
      for (NodePeer &peer : peers_) sending |= peer.stream() && peer.stream().open() && !peer.stream().flush();
      if (sending) sleep(-1, 10);
    }
  } catch (...) {
  }
}

// -- the other nodes --

void NodeMesh::hear_all() {
  datagrams_.receive([this](uint32_t from) { peers_[from].heard(); });
  for (uint32_t n = 0; n < peers_.size(); ++n) {
    while (peers_[n].stream()) {
      const auto frame = peers_[n].stream().receive();
      if (!frame) break;
      peers_[n].heard();
      hear(n, *frame);
    }
    if (peers_[n].stream() && !peers_[n].stream().open()) check_connection(n);
  }
}

void NodeMesh::hear(uint32_t from, const Frame &frame) {
  if (nodes::as<nodes::Beat>(frame)) return;
  if (const auto state = nodes::as<nodes::State>(frame)) {
    nodes::State heard = *state;
    if (!peers_[from].trusted()) heard.looks = 0;
    return mirror_.apply(from, heard);
  }
  if (const auto post = nodes::as<nodes::Post>(frame)) return mirror_.apply(from, *post);
  if (nodes::as<nodes::Goodbye>(frame)) return peers_[from].end();
  if (const auto verdict = nodes::as<nodes::VerdictMessage>(frame)) {
    if (believable(verdict->accusation)) control_.decide(verdict->accusation);
    return;
  }
  const auto report = nodes::as<nodes::Report>(frame);
  if (report && believable(report->accusation)) {
    if (control_.accused()) return say(from, nodes::VerdictMessage{control_.verdict()});
    if (coordinator() == node()) return court_.hear(report->accusation, now_ms_);
    return say(coordinator(), *report);  // the sender does not reach who decides here
  }
  peers_[from].end();
  accuse(
      accuse_rank(Verdict::failed, plan_.nodes[from].leader,
                  format_text("{} sent what is no message of this version of the library", plan_.leader_text(from))));
}

// The waits of ranks go on and on: they would fill the buffers of a leader that is stopped, whose kernel then
// acknowledges nothing more, and it would be taken for one behind a cut network.
void NodeMesh::tell(const nodes::State &state) {
  const bool waits = static_cast<uint32_t>(state.looks) != 0;
  const SharedFrame frame = frame_of(state);
  for (uint32_t n = 0; n < peers_.size(); ++n)
    if (!waits || peers_[n].silent_ms() < 2 * beat_ms_) say(n, frame);
}

void NodeMesh::tell(const nodes::Post &post, std::optional<uint32_t> to) {
  if (to && *to < plan_.node_of.size()) {
    if (plan_.node_of[*to] != node()) say(plan_.node_of[*to], post);
  } else {
    say_all(post);
  }
}

bool NodeMesh::in_order(uint32_t of) const {
  const Membership state = control_.membership(plan_.nodes[of].leader);
  return state == Membership::left || state == Membership::gone;
}

// The end of a connection is the end of a process only if the other end says so.
void NodeMesh::check_connection(uint32_t of) {
  const uint32_t leader = plan_.nodes[of].leader;
  const int code = peers_[of].stream().code();
  if (in_order(of)) return peers_[of].end();
  if (code == EBADMSG) return blame_link(of, peers_[of].stream().problem());
  if (code != 0 && code != ECONNRESET && code != EPIPE) return peers_[of].break_connection();
  peers_[of].end();
  RankSet dead;
  dead.add(leader);
  accuse(accuse_dead({}, dead));
}

// The other leader is told, too, so the connection stays: its end would look like a death there.
void NodeMesh::blame_link(uint32_t to, const std::string &problem) {
  const uint32_t leader = plan_.nodes[to].leader;
  if (reported_.contains(leader)) return;
  reported_.add(leader);
  const auto name = [this](uint32_t node) { return format_text("host {} (node {})", plan_.nodes[node].host, node); };
  Accusation accusation;
  accusation.kind = Verdict::failed;  // of no rank
  accusation.set_text(format_text("{} cannot hear {}: {}", name(node()), name(to), problem));
  accuse(accusation);
}

void NodeMesh::count_silence() {
  const auto elapsed = static_cast<uint32_t>(std::min<uint64_t>(now_ms_ - counted_ms_, 4 * tick_ms));
  counted_ms_ = now_ms_;
  for (uint32_t n = 0; n < peers_.size(); ++n) {
    if (!peers_[n].live()) continue;
    peers_[n].count(elapsed);
    if (!peers_[n].trusted()) mirror_.forget_waits(n);
  }
}

void NodeMesh::beat() {
  if (now_ms_ - beaten_ms_ < beat_ms_) return;
  beaten_ms_ = now_ms_;
  const nodes::Beat message{++beats_};
  for (uint32_t n = 0; n < peers_.size(); ++n) {
    if (!peers_[n].live()) continue;
    datagrams_.beat(n, message.number);
    if (peers_[n].all_acknowledged()) say(n, message);  // else it would wait behind others
  }
}

std::unique_ptr<Chore> lead_node(Seat &seat, const MeshPlan &plan, LeaderListener listener, const Waiter &waiter) {
  try {
    std::vector<FrameStream> links = form_mesh(plan, listener.stream, waiter);
    return std::make_unique<NodeMesh>(seat, plan, std::move(links), std::move(listener.datagrams));
  } catch (const Error &error) {
    // A leader that is missing may be so because of another rank.
    const Error end = waiter.settle(error);
    const uint32_t blamed = end.rank < 0 ? plan.rank : static_cast<uint32_t>(end.rank);
    seat.control.decide(accuse_rank(Verdict::failed, blamed, end.message));
    throw end;
  }
}

}  // namespace fsdp::comm
