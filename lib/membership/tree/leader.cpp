// SPDX-License-Identifier: Apache-2.0

#include "membership/tree/leader.h"

#include <poll.h>

#include <algorithm>

#include "base/failure.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

namespace {

constexpr uint32_t flooded_tick_ms = 1;  // even the smallest kernel buffer then takes 200,000 datagrams a second
constexpr uint64_t farewell_ms = 300;

}  // namespace

NodeLeader::NodeLeader(Seat &seat, NodePlan plan, NodeLinks links, LeaderListener listener)
    : control_(seat.control),
      plan_(std::move(plan)),
      links_(plan_, control_, std::move(links), std::move(listener.datagrams)),
      relay_(control_, plan_, links_),
      blame_(seat, plan_, links_),
      refuges_(control_, plan_, links_, relay_, std::move(listener.stream)) {
  for (const NodePlace &place : plan_.nodes) (void)parse_address(place.address);  // throws now, not in a round
  control_.set_leader(plan_.rank);
  links_.beat();  // from now on neighbours count this leader's silence
  links_.flush();
}

void NodeLeader::sleep(int wake, uint32_t ms) {
  std::vector<pollfd> polls = {{wake, POLLIN, 0}};  // a UDP heartbeat does not end the sleep
  for (const auto &[n, peer] : links_.all())
    if (peer.stream())
      polls.push_back(
          {peer.stream().socket().get(),
           static_cast<short>((peer.stream().open() ? POLLIN : 0) | (peer.stream().sending() ? POLLOUT : 0)), 0});
  refuges_.add_polls(polls);
  ::poll(polls.data(), polls.size(), static_cast<int>(ms));
}

// If a round fails for lack of memory, the next one tries again.
void NodeLeader::run(int wake, uint32_t ms) noexcept {
  try {
    const bool blames =
        blame_.gathers() || (blame_.has_findings() && !control_.accused());  // both wait for a time limit
    const uint32_t tick = blames ? LeaderLinks::shortest_tick_ms : links_.tick_ms();
    sleep(wake, std::min(ms, links_.datagrams().flooded() ? flooded_tick_ms : tick));
    work();
  } catch (...) {
  }
}

void NodeLeader::work() {
  links_.set_now(steady_ms());
  hear_all();
  if (links_.count_silence()) relay_.forget_doubted();
  if (!control_.accused()) blame_.look();
  refuges_.shelter();
  refuges_.seek();
  if (blame_.has_findings()) blame_.lose_leaders(refuges_.take_deserted());
  carry();
  // Comes after the blame, so that a rank that aborts and leaves is named for the abort.
  relay_.spread();
  links_.beat();
  links_.flush();
}

void NodeLeader::carry() {
  blame_.carry(refuges_.coordinator());
  blame_.announce();
}

// Sends everything that this node still has to send, and then Goodbye, so that the end of its connections does not
// count as a death.
void NodeLeader::finish() noexcept {
  try {
    work();
    linger();
    relay_.repeat_posts();
    relay_.spread();
    if (blame_.gathers())
      links_.set_now(links_.now_ms() + Coordinator::longest_grace_ms);  // leaves others no time to report
    carry();
    links_.say_all(tree::Goodbye{});
    const uint64_t end = steady_ms() + farewell_ms;
    while (!links_.flush() && steady_ms() < end) sleep(-1, 10);
  } catch (...) {
  }
}

// Other leaders reach each other through this one. So it stays for a moment while other leaders leave, too. If a
// neighbour was lost, it also stays for leaders that come for the verdict.
void NodeLeader::linger() {
  const uint64_t end = steady_ms() + farewell_ms;
  while (steady_ms() < end &&
         (control_.accused() ? is_missed() : links_.has_live_child() && links_.has_ranks_elsewhere())) {
    sleep(-1, 5);
    work();
  }
}

bool NodeLeader::is_missed() const {
  return refuges_.listens() && std::ranges::any_of(links_.all(), [](const auto &entry) {
           return entry.second.in_tree() && !entry.second.live() && !entry.second.left();
         });
}

void NodeLeader::hear_all() {
  links_.datagrams().receive([this](uint32_t from) { links_.heard(from); },
                             [this](uint32_t of, int32_t process) { blame_.hear_of_dump(of, process); });
  for (auto &[n, peer] : links_.all()) {
    while (peer.stream()) {
      const auto frame = peer.stream().receive();
      if (!frame) break;
      peer.heard();
      hear(n, *frame);
    }
    if (peer.stream() && !peer.stream().open()) blame_.check_connection(n);
  }
  std::erase_if(links_.all(), [](const auto &entry) { return !entry.second.in_tree() && !entry.second.stream(); });
}

void NodeLeader::hear(uint32_t from, const Frame &frame) {
  if (tree::as<tree::Beat>(frame)) return;
  if (auto states = tree::read_states(frame)) return relay_.hear(from, std::move(*states));
  if (const auto post = tree::as<tree::Post>(frame)) return relay_.hear(from, *post);
  if (const auto text = tree::as<tree::WaitText>(frame)) return relay_.hear(from, *text);
  if (tree::as<tree::Goodbye>(frame)) return links_.at(from).leave();
  const uint32_t world_size = control_.world_size();
  const auto verdict = tree::as<Verdict>(frame);
  if (verdict && is_believable(verdict->accusation, world_size)) return control_.decide(verdict->accusation);
  const auto report = tree::as<Report>(frame);
  if (report && is_believable(report->accusation, world_size)) {
    if (control_.accused()) return links_.say(from, Verdict{control_.verdict()});
    return blame_.accuse(report->accusation);
  }
  links_.at(from).end();
  blame_.accuse(
      accuse_rank(FailureKind::failed, plan_.nodes[from].leader,
                  format_text("{} sent what is no message of this version of the library", plan_.leader_text(from))));
}

namespace {

// Sends the verdict on the connections made so far. Neighbours may be at work already, and without the verdict they
// would report the end of a connection as a death.
void tell_neighbours(NodeLinks &links, const Accusation &accusation) {
  for (auto &[node, stream] : links) stream.queue(Verdict::kind, tree::bytes_of(Verdict{accusation}));
  const uint64_t end = steady_ms() + farewell_ms;
  for (auto &[node, stream] : links)
    while (stream.open() && !stream.flush() && steady_ms() < end) await_room(stream.socket(), 10);
}

}  // namespace

std::unique_ptr<MonitorTask> lead_node(Seat &seat, const NodePlan &plan, LeaderListener listener,
                                       const Waiter &waiter) {
  NodeLinks links;
  try {
    form_tree(plan, listener.stream, waiter, links);
    return std::make_unique<NodeLeader>(seat, plan, std::move(links), std::move(listener));
  } catch (const Error &error) {
    // A leader may be missing because of another rank, so settle() asks for the verdict.
    const Error end = waiter.settle(error);
    const Accusation accusation = accuse_for(end, plan.rank, plan.nodes[plan.node()].host);
    seat.control.decide(accusation);
    tell_neighbours(links, accusation);
    throw end;
  }
}

namespace {

constexpr int max_told = 3;  // number of notices; datagrams may be lost

}  // namespace

CoreDumpReporter::CoreDumpReporter(Seat &seat, const NodePlan &plan)
    : seat_(seat), leader_(plan.nodes[plan.node()].leader), notices_(plan) {
  for (uint32_t rank = leader_ + 1; rank < plan.rank; ++rank)
    if (plan.node_of[rank] == plan.node()) before_.push_back(rank);
}

void CoreDumpReporter::run(int wake, uint32_t ms) noexcept {
  if (told_ < max_told && seat_.pulse.misses_beat(leader_) && speaks() && seat_.links->dumps_core(leader_)) tell();
  pollfd entry{wake, POLLIN, 0};
  ::poll(&entry, 1, static_cast<int>(ms));
}

// This rank's caller may have found the leader's crash first, and may therefore end the context.
void CoreDumpReporter::finish() noexcept {
  if (told_ < max_told && seat_.links->dumps_core(leader_)) tell();
}

void CoreDumpReporter::tell() noexcept {
  try {
    notices_.send(seat_.control.process(leader_));
    ++told_;
  } catch (...) {  // no memory: the next round tries again
  }
}

// Only the lowest of the remaining ranks reports, which is enough.
bool CoreDumpReporter::speaks() const noexcept {
  return std::ranges::none_of(before_, [this](uint32_t rank) {
    return seat_.control.membership(rank) == Membership::member && !seat_.pulse.misses_beat(rank);
  });
}

}  // namespace fsdp::membership
