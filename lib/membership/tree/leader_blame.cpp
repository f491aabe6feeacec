// SPDX-License-Identifier: Apache-2.0
// What a leader finds out about its node's ranks and about the other nodes, and how that becomes the verdict of all.
#include <algorithm>

#include "membership/liveness/deaths.h"
#include "membership/tree/leader.h"

namespace fsdp::membership {
namespace {

// For the verdict; of a cut it takes longer (Court).
uint64_t verdict_time_ms(const Accusation &finding) { return finding.kind == Verdict::cut ? 1500 : 1000; }
constexpr uint64_t refuge_patience_ms = 300;  // ... for the lowest of the first nodes to answer one that seeks refuge
constexpr uint32_t pair_patience_ms = 500;    // ... for a neighbour of a silent node to say what it is

}  // namespace

// -- this node --

void NodeLeader::find_dead() {
  Deaths dead;
  dead.find(control_, *seat_.links, seat_.pulse, reported_);
  if (dead.empty()) return;
  reported_.add(dead.ranks());
  accuse(dead.accuse({}, control_));
}

// Other ranks of a neighbour's node say so of its leader, whose kernel holds the connection until the core is written.
void NodeLeader::hear_of_dump(uint32_t of, int32_t process) {
  const uint32_t leader = plan_.nodes[of].leader;
  if (in_order(of) || reported_.contains(leader)) return;
  if (NodePeer *peer = find(of)) peer->end();
  RankSet dead;
  dead.add(leader);
  reported_.add(dead);
  accuse(accuse_dead({}, dead, dump_text({name_process(leader, process, plan_.nodes[of].host)})));
}

void NodeLeader::find_silent() {
  const std::vector<uint32_t> silent =
      seat_.pulse.silent([this](uint32_t rank) { return plan_.node_of[rank] == node() && !reported_.contains(rank); });
  if (silent.empty()) return;
  Accusation accusation = accuse_rank(Verdict::stopped, silent.front(), seat_.pulse.text(silent));
  for (const uint32_t rank : silent) accusation.ranks.add(rank);
  reported_.add(accusation.ranks);
  accuse(accusation);
}

void NodeLeader::find_suspicion() {
  if (suspicion_carried_ || !control_.suspected()) return;
  suspicion_carried_ = true;
  accuse(control_.suspicion());
}

// -- blame --

void NodeLeader::accuse(const Accusation &accusation) {
  if (findings_.empty()) found_ms_ = now_ms_;
  findings_.push_back(accusation);
}

bool NodeLeader::believable(const Accusation &accusation) const {
  const size_t ranks = plan_.node_of.size();
  return accusation.kind > Verdict::none && accusation.kind <= Verdict::destroyed && accusation.rank >= -1 &&
         accusation.rank < static_cast<int32_t>(ranks) && accusation.ranks.within(static_cast<uint32_t>(ranks));
}

// The next on the way to who decides, or this node. Nobody: a refuge is looked for still, or there is none.
std::optional<uint32_t> NodeLeader::coordinator() const {
  if (!plan_.has_parent()) return node();
  if (reaches_parent()) return plan_.parent();
  if (!orphaned()) return node();  // the job is ending
  const bool patient = now_ms_ - orphaned_ms_ < refuge_patience_ms;
  for (uint32_t n = 0; n < std::min(refuge_count, node()); ++n) {
    const NodePeer *refuge = find(n);
    if (refuge && refuge->role() == NodePeer::Relation::refuge && refuge->live()) return n;
    if (patient && (n >= next_refuge_ || is_dialing(n))) return {};
  }
  return NodePlan::is_refuge(node()) ? std::optional(node()) : std::nullopt;
}

// To a new coordinator everything again. Without an answer in time the first finding is the verdict.
void NodeLeader::carry() {
  if (control_.accused()) return;
  const auto to = coordinator();
  if (to != carried_to_) carried_ = 0;
  carried_to_ = to;
  for (; to && carried_ < findings_.size(); ++carried_) {
    if (*to == node())
      court_.hear(findings_[carried_], now_ms_);
    else
      say(*to, tree::Report{findings_[carried_]});
  }
  if (const auto verdict = court_.decide(now_ms_))
    control_.decide(*verdict);
  else if (!findings_.empty() && now_ms_ - found_ms_ >= verdict_time_ms(findings_.front()))
    control_.decide(findings_.front());
}

void NodeLeader::announce() {
  if (announced_ || !control_.accused()) return;
  announced_ = true;
  say_all(tree::VerdictMessage{control_.verdict()});
}

// -- silence --

// One that has not been heard yet may have to wait for others that connect to it.
uint32_t NodeLeader::silent_ms(const NodePeer &peer) const {
  const uint32_t ms = peer.silence().ms();
  return ms - std::min(ms, peer.silence().begun() ? 0 : plan_.forming_ms);
}

// With those at the limit go those that are about to be: links that were cut at the same time are one failure.
void NodeLeader::judge_silence() {
  const uint32_t limit = plan_.heartbeat_timeout_ms, nearly = limit - std::min(1500u, limit / 4);
  std::vector<std::string> stopped;
  std::vector<CutLink> cut;
  RankSet leaders;
  bool stopped_over = false, cut_over = false;
  for (const auto &[n, peer] : peers_) {
    const uint32_t leader = plan_.nodes[n].leader;
    const uint32_t ms = silent_ms(peer);
    if (!is_neighbour(n, peer) || in_order(n) || reported_.contains(leader) || ms < nearly) continue;
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
        accuse_rank(Verdict::stopped, leaders.list().front(), silence_text(stopped, plan_.heartbeat_timeout_ms));
    accusation.ranks = leaders;
    accuse(accusation);
  }
  if (cut_over && !links_reported_) accuse(accuse_links(plan_, cut));
  links_reported_ |= cut_over;
}

// Beats alone do not tell a stopped leader from a cut network: its neighbours in the tree do, and are given the time.
void NodeLeader::judge_pairs() {
  const uint32_t limit = plan_.heartbeat_timeout_ms + pair_patience_ms, nearly = limit - std::min(1500u, limit / 4);
  std::vector<CutLink> cut;
  bool over = false;
  for (const auto &[n, silence] : pairs_) {
    if (silence.ms() < nearly || in_order(n) || !hears_of(n)) continue;
    cut.push_back(link_to(n));
    over |= silence.ms() >= limit;
  }
  if (over && !pairs_reported_) accuse(accuse_links(plan_, cut));
  pairs_reported_ |= over;
}

// Would this node know if that one had left? Not from one that has left before.
bool NodeLeader::hears_of(uint32_t other) const {
  const NodePeer *way = find(plan_.next_hop(other));
  if (!way || !way->live()) return false;
  for (uint32_t n = 0; n < plan_.node_count(); ++n)
    if (n != node() && n != other && plan_.is_between(n, other) && in_order(n)) return false;
  return true;
}

CutLink NodeLeader::link_to(uint32_t other) const {
  return {static_cast<uint16_t>(std::min(other, node())), static_cast<uint16_t>(std::max(other, node()))};
}

}  // namespace fsdp::membership
