// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/blame.h"

#include <algorithm>
#include <cerrno>

#include "membership/liveness/failure_detector.h"

namespace fsdp::membership {
namespace {

// Time in which the verdict must arrive. For a cut the coordinator waits longer.
uint64_t verdict_time_ms(const Accusation &finding) { return finding.kind == FailureKind::cut ? 1500 : 1000; }
constexpr uint32_t pair_patience_ms = 500;  // time for a neighbour of a silent node to find the cause of the silence

}  // namespace

Blame::Blame(Seat &seat, const NodePlan &plan, LeaderLinks &links)
    : seat_(seat), control_(seat.control), plan_(plan), links_(links), coordinator_(plan) {}

void Blame::look() {
  find_suspicion();  // first: if a rank aborted and then died, the report names the abort
  find_dead();
  find_silent();
  judge_silence();
  judge_pairs();
}

// -- this node --

void Blame::find_dead() {
  Deaths dead;
  dead.find(control_, *seat_.links, seat_.pulse, reported_);
  if (dead.empty()) return;
  reported_.add(dead.ranks());
  accuse(dead.accuse({}, control_));
}

// The connection with the leader is still open, because the kernel keeps it until the core is written.
void Blame::hear_of_dump(uint32_t of, int32_t process) {
  const uint32_t leader = plan_.nodes[of].leader;
  if (links_.in_order(of) || reported_.contains(leader)) return;
  if (NodePeer *peer = links_.find(of)) peer->end();
  RankSet dead;
  dead.add(leader);
  reported_.add(dead);
  accuse(accuse_dead({}, dead, dump_text({name_process(leader, process, plan_.nodes[of].host)})));
}

void Blame::find_silent() {
  const std::vector<uint32_t> silent =
      seat_.pulse.silent([this](uint32_t rank) { return plan_.node_of[rank] == node() && !reported_.contains(rank); });
  if (silent.empty()) return;
  Accusation accusation = accuse_rank(FailureKind::stopped, silent.front(), seat_.pulse.text(silent));
  for (const uint32_t rank : silent) accusation.ranks.add(rank);
  reported_.add(accusation.ranks);
  accuse(accusation);
}

void Blame::find_suspicion() {
  if (suspicion_carried_ || !control_.suspected()) return;
  suspicion_carried_ = true;
  accuse(control_.suspicion());
}

// -- other nodes --

// The end of a connection means the end of a process only if the other end has closed or reset it. Refugees leave when
// they have the verdict, so the end of their connections means nothing.
void Blame::check_connection(uint32_t of) {
  NodePeer &peer = links_.at(of);
  const uint32_t leader = plan_.nodes[of].leader;
  const int code = peer.stream().code();
  if (!links_.is_neighbour(of, peer)) return peer.end();
  if (links_.in_order(of)) return peer.leave();
  if (code == EBADMSG) return blame_link(of, peer.stream().problem());
  if (code != 0 && code != ECONNRESET && code != EPIPE) return peer.break_connection();
  peer.end();
  if (reported_.contains(leader)) return;
  reported_.add(leader);
  accuse(accuse_death(leader));
}

// Keeps the connection, because the other leader must get the verdict and would report the end of the connection as a
// death.
void Blame::blame_link(uint32_t to, const std::string &problem) {
  const uint32_t leader = plan_.nodes[to].leader;
  if (reported_.contains(leader)) return;
  reported_.add(leader);
  links_.at(to).blame();
  const auto name = [this](uint32_t node) { return format_text("host {} (node {})", plan_.nodes[node].host, node); };
  Accusation accusation;
  accusation.kind = FailureKind::failed;  // blames no rank
  accusation.text.set(format_text("{} cannot hear {}: {}", name(node()), name(to), problem));
  accuse(accusation);
}

void Blame::lose_leaders(const std::vector<uint32_t> &nodes) {
  RankSet dead;
  for (const uint32_t n : nodes) {
    const uint32_t leader = plan_.nodes[n].leader;
    if (!links_.in_order(n) && !reported_.contains(leader)) dead.add(leader);
  }
  if (dead.empty()) return;
  reported_.add(dead);
  accuse(accuse_dead({}, dead));
}

// Once one peer is at the limit, peers close to the limit are reported with it: links that were cut at the same time
// are one failure.
void Blame::judge_silence() {
  const uint32_t limit = plan_.heartbeat_timeout_ms, nearly = limit - std::min(1500u, limit / 4);
  std::vector<std::string> stopped;
  std::vector<CutLink> cut;
  RankSet leaders;
  bool stopped_over = false, cut_over = false;
  for (const auto &[n, peer] : links_.all()) {
    const uint32_t leader = plan_.nodes[n].leader;
    const uint32_t ms = links_.silent_ms(peer);
    if (!links_.is_neighbour(n, peer) || links_.in_order(n) || reported_.contains(leader) || ms < nearly) continue;
    const bool over = ms >= limit;
    if (!peer.acknowledges(limit / 4)) {
      cut.push_back(link_to(n));
      cut_over |= over;
      continue;
    }
    stopped.push_back(name_process(leader, control_.process(leader), plan_.nodes[n].host));
    leaders.add(leader);
    stopped_over |= over;
  }
  if (stopped_over) {
    reported_.add(leaders);
    Accusation accusation =
        accuse_rank(FailureKind::stopped, leaders.list().front(), silence_text(stopped, plan_.heartbeat_timeout_ms));
    accusation.ranks = leaders;
    accuse(accusation);
  }
  if (cut_over && !links_reported_) accuse(accuse_links(plan_, cut));
  links_reported_ |= cut_over;
}

// Heartbeats alone do not distinguish a stopped leader from a cut network. The leader's neighbours in the tree can
// distinguish them, and get time to do so.
void Blame::judge_pairs() {
  const uint32_t limit = plan_.heartbeat_timeout_ms + pair_patience_ms, nearly = limit - std::min(1500u, limit / 4);
  std::vector<CutLink> cut;
  bool over = false;
  for (const auto &[n, silence] : links_.pairs()) {
    if (silence.ms() < nearly || links_.in_order(n) || !hears_of(n)) continue;
    cut.push_back(link_to(n));
    over |= silence.ms() >= limit;
  }
  if (over && !pairs_reported_) accuse(accuse_links(plan_, cut));
  pairs_reported_ |= over;
}

// Would this node learn that `other` has left in order? It would not if a node between has left itself.
bool Blame::hears_of(uint32_t other) const {
  const NodePeer *way = links_.find(plan_.next_hop(other));
  if (!way || !way->live()) return false;
  for (uint32_t n = 0; n < plan_.node_count(); ++n)
    if (n != node() && n != other && plan_.is_between(n, other) && links_.in_order(n)) return false;
  return true;
}

CutLink Blame::link_to(uint32_t other) const {
  return {static_cast<uint16_t>(std::min(other, node())), static_cast<uint16_t>(std::max(other, node()))};
}

// -- the verdict --

void Blame::accuse(const Accusation &accusation) {
  if (findings_.empty()) found_ms_ = links_.now_ms();
  findings_.push_back(accusation);
}

// A new coordinator gets all findings again. If no answer arrives in time, the first finding becomes the verdict.
void Blame::carry(std::optional<uint32_t> to) {
  if (control_.accused()) return;
  if (to != carried_to_) carried_ = 0;
  carried_to_ = to;
  for (; to && carried_ < findings_.size(); ++carried_) {
    if (*to == node())
      coordinator_.hear(findings_[carried_], links_.now_ms());
    else
      links_.say(*to, Report{findings_[carried_]});
  }
  if (const auto verdict = coordinator_.decide(links_.now_ms()))
    control_.decide(*verdict);
  else if (!findings_.empty() && links_.now_ms() - found_ms_ >= verdict_time_ms(findings_.front()))
    control_.decide(findings_.front());
}

void Blame::announce() {
  if (announced_ || !control_.accused()) return;
  announced_ = true;
  links_.say_all(Verdict{control_.verdict()});
}

}  // namespace fsdp::membership
