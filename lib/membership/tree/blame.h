// SPDX-License-Identifier: Apache-2.0
// What a leader finds out about failures of its node's ranks and of other nodes, and how these findings become the
// job's verdict: they go up to the coordinator, and the coordinator's verdict comes back.
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
  // All references must outlive this object.
  Blame(Seat &seat, const NodePlan &plan, LeaderLinks &links);

  // Looks for ranks of this node that are dead, silent or suspected, and for nodes that are silent.
  void look();
  // Called when other ranks of node `of` report that its leader, process `process`, is dumping core.
  void hear_of_dump(uint32_t of, int32_t process);
  // Called when the connection with node `of` has ended.
  void check_connection(uint32_t of);
  // Called when no process listens any more at the addresses of these nodes' leaders, which means that the leaders have
  // ended.
  void lose_leaders(const std::vector<uint32_t> &nodes);
  void accuse(const Accusation &accusation);

  // Sends findings toward the coordinator, or decides if this leader is the coordinator. Without a coordinator the
  // findings wait. A leader that gets no verdict for a while decides itself.
  void carry(std::optional<uint32_t> coordinator);
  // Sends the verdict once to all connected leaders.
  void announce();
  bool has_findings() const noexcept { return !findings_.empty(); }
  bool gathers() const noexcept { return coordinator_.open(); }  // waits for simultaneous failures

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
  RankSet reported_;  // already reported: ranks of this node, and leaders of other nodes or the links to them
  bool suspicion_carried_ = false, links_reported_ = false, pairs_reported_ = false, announced_ = false;
  std::vector<Accusation> findings_;  // findings of this node and of the nodes below
  size_t carried_ = 0;                // number of findings carried to carried_to_
  std::optional<uint32_t> carried_to_;
  uint64_t found_ms_ = 0;  // time of the first finding
};

}  // namespace fsdp::membership
