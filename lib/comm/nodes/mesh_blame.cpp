// SPDX-License-Identifier: Apache-2.0
// What a leader finds out about its node's ranks and about the other nodes, and how that becomes the verdict of all.
#include <algorithm>

#include "comm/nodes/mesh.h"

namespace fsdp::comm {
namespace {

constexpr uint64_t coordinator_answer_ms = 1000;  // for the coordinator

}  // namespace

// -- this node --

void NodeMesh::find_dead() {
  RankSet dead;
  seat_.links->find_dead([&](uint32_t rank) {
    const Membership state = control_.membership(rank);
    if (state != Membership::left && state != Membership::gone && !reported_.contains(rank)) dead.add(rank);
  });
  if (dead.empty()) return;
  reported_.add(dead);
  accuse(accuse_dead({}, dead));
}

void NodeMesh::find_silent() {
  const std::vector<uint32_t> silent =
      seat_.pulse.silent([this](uint32_t rank) { return plan_.node_of[rank] == node() && !reported_.contains(rank); });
  if (silent.empty()) return;
  Accusation accusation = accuse_rank(Verdict::stopped, silent.front(), seat_.pulse.text(silent));
  for (const uint32_t rank : silent) accusation.ranks.add(rank);
  reported_.add(accusation.ranks);
  accuse(accusation);
}

void NodeMesh::find_suspicion() {
  if (suspicion_carried_ || !control_.suspected()) return;
  suspicion_carried_ = true;
  accuse(control_.suspicion());
}

// -- blame --

void NodeMesh::accuse(const Accusation &accusation) {
  if (findings_.empty()) found_ms_ = now_ms_;
  findings_.push_back(accusation);
}

bool NodeMesh::believable(const Accusation &accusation) const {
  return accusation.kind > Verdict::none && accusation.kind <= Verdict::cut && accusation.rank >= -1 &&
         accusation.rank < static_cast<int32_t>(plan_.node_of.size());
}

uint32_t NodeMesh::coordinator() const {
  for (uint32_t n = 0; n < node(); ++n)
    if (peers_[n].live() && peers_[n].silent_ms() < plan_.heartbeat_timeout_ms) return n;
  return node();
}

// To a new coordinator everything again. Without an answer in time the first finding is the verdict.
void NodeMesh::carry() {
  if (control_.accused()) return;
  const uint32_t to = coordinator();
  if (to != carried_to_) carried_ = 0;
  carried_to_ = to;
  for (; carried_ < findings_.size(); ++carried_) {
    if (to == node())
      court_.hear(findings_[carried_], now_ms_);
    else
      say(to, nodes::Report{findings_[carried_]});
  }
  if (const auto verdict = court_.decide(now_ms_))
    control_.decide(*verdict);
  else if (!findings_.empty() && now_ms_ - found_ms_ >= coordinator_answer_ms)
    control_.decide(findings_.front());
}

void NodeMesh::announce() {
  if (announced_ || !control_.accused()) return;
  announced_ = true;
  say_all(nodes::VerdictMessage{control_.verdict()});
}

// -- silence --

// With those at the limit go those that are about to be: links that were cut at the same time are one failure.
void NodeMesh::judge_silence() {
  const uint32_t limit = plan_.heartbeat_timeout_ms, nearly = limit - std::min(1500u, limit / 4);
  std::vector<std::string> stopped;
  std::vector<CutLink> cut;
  RankSet leaders;
  bool stopped_over = false, cut_over = false;
  for (uint32_t n = 0; n < peers_.size(); ++n) {
    const uint32_t leader = plan_.nodes[n].leader;
    if (!peers_[n].live() || in_order(n) || reported_.contains(leader) || peers_[n].silent_ms() < nearly) continue;
    const bool over = peers_[n].silent_ms() >= limit;
    if (!peers_[n].acknowledges(limit / 4)) {
      cut.push_back({static_cast<uint16_t>(std::min(n, node())), static_cast<uint16_t>(std::max(n, node()))});
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

}  // namespace fsdp::comm
