// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/leader.h"

#include <algorithm>
#include <cerrno>

#include "base/failure.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {
namespace {

constexpr uint32_t shortest_tick_ms = 50;
constexpr uint32_t flooded_tick_ms = 1;  // the least that the kernel keeps has room for 200,000 datagrams a second
constexpr uint64_t farewell_ms = 300;
constexpr size_t most_waits_frame_bytes = 4096;  // each is said or not: see NodePeer::take_waits

// How often a leader looks at its ranks' memory, which wakes nobody. What others say wakes it, so only the first node
// of a way is so late.
uint32_t tick_of(uint32_t nodes) { return nodes <= 64 ? shortest_tick_ms : nodes <= 512 ? 100 : 400; }
// In a large job each beat is thousands of wake-ups, of which the network and many a test machine have to take all.
uint32_t beat_of(uint32_t nodes, uint32_t limit_ms) { return std::min(nodes <= 512 ? 500u : 2000u, limit_ms / 8); }

}  // namespace

NodeLeader::NodeLeader(Seat &seat, NodePlan plan, NodeLinks links, LeaderListener listener)
    : seat_(seat),
      control_(seat.control),
      plan_(std::move(plan)),
      court_(plan_),
      mirror_(control_, plan_),
      datagrams_(plan_, std::move(listener.datagrams)),
      listener_(std::move(listener.stream)),
      now_ms_(steady_ms()),
      counted_ms_(now_ms_),
      beat_ms_(beat_of(plan_.node_count(), plan_.heartbeat_timeout_ms)),
      tick_ms_(tick_of(plan_.node_count())) {
  for (auto &[n, stream] : links)
    peers_.emplace(
        n, NodePeer(plan_.is_child(n) ? NodePeer::Relation::child : NodePeer::Relation::parent, std::move(stream)));
  for (const NodePlace &place : plan_.nodes) (void)parse_address(place.address);  // throws now, and not in a round
  if (!NodePlan::is_refuge(node()) || plan_.node_count() <= 2) listener_.reset();
  if (listener_) newcomers_.emplace(plan_, listener_);
  listener_closed_ = ForkClosed(listener_.get());
  control_.set_leader(plan_.rank);
  beat();  // neighbours count its silence from now on
  flush();
}

void NodeLeader::sleep(int wake, uint32_t ms) {
  std::vector<pollfd> polls = {{wake, POLLIN, 0}};  // beats of pairs wait for the next round
  for (const auto &[n, peer] : peers_)
    if (peer.stream())
      polls.push_back(
          {peer.stream().socket().get(),
           static_cast<short>((peer.stream().open() ? POLLIN : 0) | (peer.stream().sending() ? POLLOUT : 0)), 0});
  for (const Dial &dial : dials_) polls.push_back(dial.poll());
  if (newcomers_) newcomers_->add_polls(polls);
  ::poll(polls.data(), polls.size(), static_cast<int>(ms));
}

// No memory for a round: the next one has another chance.
void NodeLeader::run(int wake, uint32_t ms) noexcept {
  try {
    const bool blames = court_.open() || (!findings_.empty() && !control_.accused());  // it decides by the clock
    sleep(wake, std::min(ms, datagrams_.flooded() ? flooded_tick_ms : blames ? shortest_tick_ms : tick_ms_));
    work();
  } catch (...) {
  }
}

void NodeLeader::work() {
  now_ms_ = steady_ms();
  hear_all();
  count_silence();
  if (!control_.accused()) {
    find_suspicion();  // first: one that aborted and then died is named for the abort
    find_dead();
    find_silent();
    judge_silence();
    judge_pairs();
  }
  shelter();
  seek_refuge();
  carry();
  announce();
  // After the blame: a rank that aborts and leaves is named for the abort.
  mirror_.look_at_posts([this](const tree::Post &post) { spread(post, {}); });
  mirror_.look(now_ms_, [this](const tree::RankState &state) { from_below_.insert_or_assign(state.rank, state); });
  spread_states(false);
  mirror_.look_at_texts(now_ms_, [this](const tree::WaitText &text) { spread(text, {}); });
  beat();
  flush();
}

void NodeLeader::flush() {
  for (auto &[n, peer] : peers_)
    if (peer.stream()) peer.stream().flush();
}

// What this node still has to say, and that the end of its connections is none of a process.
void NodeLeader::finish() noexcept {
  try {
    work();
    linger();
    if (court_.open()) now_ms_ += Court::longest_grace_ms;  // no time for others to report
    carry();
    announce();
    say_all(tree::Goodbye{});
    const uint64_t end = steady_ms() + farewell_ms;
    bool sending = true;
    while (sending && steady_ms() < end) {
      sending = false;
      for (auto &[n, peer] : peers_) sending |= peer.stream() && peer.stream().open() && !peer.stream().flush();
      if (sending) sleep(-1, 10);
    }
  } catch (...) {
  }
}

// Others reach each other through this one: it stays a moment for those that are leaving too, and where a neighbour was
// lost, for those that have yet to hear the verdict here.
void NodeLeader::linger() {
  const uint64_t end = steady_ms() + farewell_ms;
  while (steady_ms() < end && (control_.accused() ? is_missed() : passes_on() && members_elsewhere())) {
    sleep(-1, 5);
    work();
  }
}

bool NodeLeader::passes_on() const {
  return std::ranges::any_of(peers_, [](const auto &entry) {
    return entry.second.role() == NodePeer::Relation::child && entry.second.live();
  });
}

// Most nodes of a large job are below all others, and take in nobody.
bool NodeLeader::may_pass_on() const { return NodePlan::is_refuge(node()) || !plan_.children().empty(); }

bool NodeLeader::members_elsewhere() const {
  for (uint32_t rank = 0; rank < plan_.node_of.size(); ++rank)
    if (plan_.node_of[rank] != node() && control_.membership(rank) == Membership::member) return true;
  return false;
}

bool NodeLeader::is_missed() const {
  return listener_ && std::ranges::any_of(peers_, [](const auto &entry) {
           return entry.second.in_tree() && !entry.second.live() && !entry.second.left();
         });
}

// -- the other nodes --

void NodeLeader::heard(uint32_t from) {
  NodePeer *peer = find(from);
  if (peer && peer->in_tree()) return peer->heard();
  if (from < plan_.node_count() && from != node()) pairs_[from].heard();  // its ranks may name ranks of this node first
}

void NodeLeader::hear_all() {
  datagrams_.receive([this](uint32_t from) { heard(from); },
                     [this](uint32_t of, int32_t process) { hear_of_dump(of, process); });
  for (auto &[n, peer] : peers_) {
    while (peer.stream()) {
      const auto frame = peer.stream().receive();
      if (!frame) break;
      peer.heard();
      hear(n, *frame);
    }
    if (peer.stream() && !peer.stream().open()) check_connection(n);
  }
  std::erase_if(peers_, [](const auto &entry) { return !entry.second.in_tree() && !entry.second.stream(); });
}

void NodeLeader::hear(uint32_t from, const Frame &frame) {
  if (tree::as<tree::Beat>(frame)) return;
  if (auto states = tree::read_states(frame)) return hear(from, std::move(*states));
  if (const auto post = tree::as<tree::Post>(frame)) return hear(from, *post);
  if (const auto text = tree::as<tree::WaitText>(frame)) return hear(from, *text);
  if (tree::as<tree::Goodbye>(frame)) return peers_.at(from).leave();
  const auto verdict = tree::as<tree::VerdictMessage>(frame);
  if (verdict && believable(verdict->accusation)) return control_.decide(verdict->accusation);
  const auto report = tree::as<tree::Report>(frame);
  if (report && believable(report->accusation)) {
    if (control_.accused()) return say(from, tree::VerdictMessage{control_.verdict()});
    return accuse(report->accusation);
  }
  peers_.at(from).end();
  accuse(
      accuse_rank(Verdict::failed, plan_.nodes[from].leader,
                  format_text("{} sent what is no message of this version of the library", plan_.leader_text(from))));
}

// True if a node between the given one and the root has left. A refuge then tells of the given node in place of its
// parent.
bool NodeLeader::has_detour(uint32_t node) const {
  for (; node != 0; node = plan_.parent_of(node))
    if (in_order(plan_.parent_of(node))) return true;
  return false;
}

// A state from above is of no node here or below. A state from below is of a node there, or of one that has taken
// refuge there. By way of a refuge one may hear what was so before a rank left.
bool NodeLeader::fits(uint32_t from, const NodePeer &peer, const tree::RankState &state) const {
  if (state.rank >= plan_.node_of.size() || state.membership > static_cast<uint32_t>(Membership::gone)) return false;
  const uint32_t of = plan_.node_of[state.rank];
  const bool is_below = plan_.is_above(from, of) || (NodePlan::is_refuge(from) && has_detour(of));
  if (peer.above() ? plan_.is_above(node(), of) : !is_below) return false;
  return state.membership >= static_cast<uint32_t>(control_.membership(state.rank));
}

// What is not believed of a link is not passed on as if it were; what is not of a pair is this node's matter alone.
void NodeLeader::hear(uint32_t from, std::vector<tree::RankState> states) {
  const NodePeer &peer = peers_.at(from);
  tree::StateMap &relayed = peer.above() ? from_above_ : from_below_;
  for (tree::RankState &state : states) {
    if (!fits(from, peer, state)) continue;
    if (!peer.silence().trusted()) state.looks = 0;
    if (!peer.above() || may_pass_on()) relayed.insert_or_assign(state.rank, state);
    const auto pair = pairs_.find(plan_.node_of[state.rank]);
    if (pair != pairs_.end() && !pair->second.trusted()) state.looks = 0;
    mirror_.apply(state);
  }
}

void NodeLeader::hear(uint32_t from, const tree::Post &post) {
  const bool everybody = post.to == tree::Post::everybody;
  if (post.rank >= plan_.node_of.size() || (!everybody && post.to >= plan_.node_of.size())) return;
  spread(post, from);
  if (everybody || plan_.node_of[post.to] == node()) mirror_.apply(post);
}

void NodeLeader::hear(uint32_t from, const tree::WaitText &text) {
  if (text.rank >= plan_.node_of.size()) return;
  spread(text, from);
  mirror_.apply(text);
}

// In a large job together with those of the next moment; that a rank has left at once.
void NodeLeader::spread_states(bool at_once) {
  const auto leaves = [](const auto &entry) {
    return entry.second.membership >= static_cast<uint32_t>(Membership::left);
  };
  if (!at_once && tick_ms_ > shortest_tick_ms && now_ms_ - spread_ms_ < tick_ms_ &&
      !std::ranges::any_of(from_above_, leaves) && !std::ranges::any_of(from_below_, leaves))
    return;
  spread_ms_ = now_ms_;
  spread(from_below_, true);
  from_above_.merge(from_below_);  // no rank is in both
  spread(from_above_, false);
  from_above_.clear();
  from_below_.clear();
}

void NodeLeader::spread(const tree::StateMap &states, bool up) {
  const auto say_to = [&](const SharedFrame &frame, bool waits) {
    for (auto &[n, peer] : peers_)
      if (peer.above() == up && is_neighbour(n, peer) && (!waits || peer.take_waits(frame->bytes.size())))
        say(&peer, frame);
  };
  for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) say_to(frame, false);
  for (const SharedFrame &frame : tree::write_states(states, true, most_waits_frame_bytes)) say_to(frame, true);
}

void NodeLeader::spread(const tree::Post &post, std::optional<uint32_t> from) {
  if (post.to < plan_.node_of.size()) {
    const uint32_t to = plan_.node_of[post.to];
    if (to == node()) return;
    const uint32_t hop = plan_.next_hop(to);
    const NodePeer *way = find(hop);
    if (hop == from || (way && way->live())) return hop == from ? void() : say(hop, post);
  }
  const SharedFrame frame = frame_of(post);
  for (auto &[n, peer] : peers_)
    if (is_neighbour(n, peer) && n != from) say(&peer, frame);
}

// As much is said of it as of waits, and no more: it is said again. Behind the state that it belongs to, which else
// might wait here: nobody keeps a text of a wait that he does not know.
void NodeLeader::spread(const tree::WaitText &text, std::optional<uint32_t> from) {
  spread_states(true);
  const SharedFrame frame = frame_of(text);
  for (auto &[n, peer] : peers_)
    if (is_neighbour(n, peer) && n != from && peer.take_waits(frame->bytes.size())) say(&peer, frame);
}

bool NodeLeader::in_order(uint32_t of) const {
  const Membership state = control_.membership(plan_.nodes[of].leader);
  return state == Membership::left || state == Membership::gone;
}

// The end of a connection is the end of a process only if the other end says so. Who has taken refuge goes when it has
// heard the verdict.
void NodeLeader::check_connection(uint32_t of) {
  NodePeer &peer = peers_.at(of);
  const uint32_t leader = plan_.nodes[of].leader;
  const int code = peer.stream().code();
  if (!is_neighbour(of, peer)) return peer.end();
  if (in_order(of)) return peer.leave();
  if (code == EBADMSG) return blame_link(of, peer.stream().problem());
  if (code != 0 && code != ECONNRESET && code != EPIPE) return peer.break_connection();
  peer.end();
  if (reported_.contains(leader)) return;
  reported_.add(leader);
  RankSet dead;
  dead.add(leader);
  accuse(accuse_dead({}, dead));
}

// The other leader is told, too, so the connection stays: its end would look like a death there.
void NodeLeader::blame_link(uint32_t to, const std::string &problem) {
  const uint32_t leader = plan_.nodes[to].leader;
  if (reported_.contains(leader)) return;
  reported_.add(leader);
  peers_.at(to).blame();
  const auto name = [this](uint32_t node) { return format_text("host {} (node {})", plan_.nodes[node].host, node); };
  Accusation accusation;
  accusation.kind = Verdict::failed;  // of no rank
  accusation.set_text(format_text("{} cannot hear {}: {}", name(node()), name(to), problem));
  accuse(accusation);
}

void NodeLeader::count_silence() {
  // Who was held up itself has not listened meanwhile.
  const uint32_t most_ms = std::min(4 * tick_ms_, plan_.heartbeat_timeout_ms / 4);
  const auto elapsed = static_cast<uint32_t>(std::min<uint64_t>(now_ms_ - counted_ms_, most_ms));
  counted_ms_ = now_ms_;
  bool doubts = false;  // new ones: what comes later of such a node is not believed from the start
  const auto count = [&](Silence const &silence, auto &counted) {
    const bool trusted = silence.trusted();
    counted.count(elapsed, beat_ms_);
    doubts |= trusted && !silence.trusted();
  };
  for (auto &[n, peer] : peers_)
    if (is_neighbour(n, peer)) count(peer.silence(), peer);
  for (auto &[n, pair] : pairs_)
    if (pair.begun()) count(pair, pair);
  if (!doubts) return;
  mirror_.forget_waits([this](uint32_t of) {
    const NodePeer *way = find(plan_.next_hop(of));
    const auto pair = pairs_.find(of);
    return (way && way->live() && !way->silence().trusted()) || (pair != pairs_.end() && !pair->second.trusted());
  });
}

void NodeLeader::watch_data_peers() {
  control_.find_data_peers([this](uint32_t rank) {
    const uint32_t of = plan_.node_of[rank];
    if (of != node() && !plan_.is_bound(of)) pairs_.try_emplace(of);
  });
}

void NodeLeader::beat() {
  if (now_ms_ - beaten_ms_ < beat_ms_) return;
  beaten_ms_ = now_ms_;
  watch_data_peers();
  const tree::Beat message{++beats_};
  const SharedFrame frame = frame_of(message);
  for (auto &[n, peer] : peers_) {
    if (!is_neighbour(n, peer)) continue;
    datagrams_.beat(n, message.number);
    if (peer.all_acknowledged()) say(&peer, frame);  // else it would wait behind others
  }
  for (const auto &[n, pair] : pairs_) datagrams_.beat(n, message.number);
}

namespace {

// Neighbours that have found each other may be at work already: the end of a connection would look like a death.
void tell_neighbours(NodeLinks &links, const Accusation &accusation) {
  for (auto &[node, stream] : links)
    stream.queue(static_cast<uint32_t>(tree::LinkKind::verdict), tree::bytes_of(tree::VerdictMessage{accusation}));
  const uint64_t end = steady_ms() + farewell_ms;
  for (auto &[node, stream] : links)
    while (stream.open() && !stream.flush() && steady_ms() < end) await_room(stream.socket(), 10);
}

}  // namespace

std::unique_ptr<Chore> lead_node(Seat &seat, const NodePlan &plan, LeaderListener listener, const Waiter &waiter) {
  NodeLinks links;
  try {
    form_tree(plan, listener.stream, waiter, links);
    return std::make_unique<NodeLeader>(seat, plan, std::move(links), std::move(listener));
  } catch (const Error &error) {
    // A leader that is missing may be so because of another rank.
    const Error end = waiter.settle(error);
    const uint32_t blamed = end.rank < 0 ? plan.rank : static_cast<uint32_t>(end.rank);
    const Accusation accusation = accuse_rank(Verdict::failed, blamed, end.message);
    seat.control.decide(accusation);
    tell_neighbours(links, accusation);
    throw end;
  }
}

}  // namespace fsdp::membership
