// SPDX-License-Identifier: Apache-2.0
// What a leader finds out about failures, of its node's ranks and of other nodes, and how that becomes the verdict of
// all: findings go up to the coordinator, and its verdict comes back.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "membership/seat.h"
#include "membership/tree/coordinator.h"
#include "membership/tree/links.h"

namespace fsdp::membership {

class Blame {
 public:
  // All outlive it.
  Blame(Seat &seat, const NodePlan &plan, LeaderLinks &links);

  // Looks for ranks of this node that are dead, silent or suspected, and for nodes that are silent.
  void look();
  // The other ranks of that node say that its leader is dumping core.
  void hear_of_dump(uint32_t of, int32_t process);
  // That node's connection has ended.
  void check_connection(uint32_t of);
  // Nothing listens any more where the leaders of these nodes have listened: they have ended.
  void lose_leaders(const std::vector<uint32_t> &nodes);
  void accuse(const Accusation &accusation);

  // Findings go to the coordinator; without one they wait. The coordinator, and after a while each leader, decides.
  void carry(std::optional<uint32_t> coordinator);
  // Tells a verdict to all that have a connection, once.
  void announce();
  bool has_findings() const noexcept { return !findings_.empty(); }
  bool gathers() const noexcept { return coordinator_.open(); }  // findings of the same moment

 private:
  void find_dead();
  void find_silent();
  void find_suspicion();
  void blame_link(uint32_t to, const std::string &problem);
  void judge_silence();
  void judge_pairs();
  bool hears_of(uint32_t other) const;
  CutLink link_to(uint32_t other) const;
  uint32_t node() const { return plan_.node(); }

  Seat &seat_;
  Control &control_;
  const NodePlan &plan_;
  LeaderLinks &links_;
  Coordinator coordinator_;
  RankSet reported_;  // dead or silent ranks of this node, and leaders of others, or the links to them
  bool suspicion_carried_ = false, links_reported_ = false, pairs_reported_ = false, announced_ = false;
  std::vector<Accusation> findings_;  // of this node, and of those below
  size_t carried_ = 0;                // of them, to carried_to_
  std::optional<uint32_t> carried_to_;
  uint64_t found_ms_ = 0;  // when the first was
};

}  // namespace fsdp::membership
