// SPDX-License-Identifier: Apache-2.0
// Both sides of a refuge. A leader that has lost its way to the root turns to the first nodes, the refuges: the lowest
// one that answers takes its reports and sends it the verdict. Refuges keep their listeners as long as the job lasts.
#pragma once

#include <poll.h>

#include <cstdint>
#include <list>
#include <optional>
#include <vector>

#include "membership/tree/states.h"

namespace fsdp::membership {

class Refuges {
 public:
  // All references must outlive this object. The listener is kept if this node may be a refuge, and closed if not.
  Refuges(Control &control, const NodePlan &plan, LeaderLinks &links, StateRelay &relay, Fd listener);

  // -- for this node, when its way up is lost --
  void seek();
  // When no refuge is left to try: returns the refuges at which no process listens, each only once. Their leaders have
  // ended.
  std::vector<uint32_t> take_deserted();
  // The next node on the way to the coordinator, or this node if it decides. Empty while a refuge is being sought, or
  // if there is none.
  std::optional<uint32_t> coordinator() const;

  // -- for other nodes --
  void shelter();
  bool listens() const noexcept { return static_cast<bool>(listener_); }

  void add_polls(std::vector<pollfd> &polls) const;

 private:
  bool orphaned() const;
  void dial();
  void hear();
  void take(uint32_t at, NodePeer refuge);
  bool has_refuge() const;
  bool is_dialing(uint32_t refuge) const;
  bool has_room() const;
  uint32_t node() const { return plan_.node(); }

  Control &control_;
  const NodePlan &plan_;
  LeaderLinks &links_;
  StateRelay &relay_;
  Fd listener_;
  ForkClosed listener_closed_;
  std::optional<Newcomers> newcomers_;        // while the listener is open
  uint64_t orphaned_ms_ = 0, dialed_ms_ = 0;  // orphaned since (0: not orphaned); time of the last new dial
  uint32_t next_refuge_ = 0;
  std::vector<uint32_t> deserted_;
  std::list<Dial> dials_;
};

}  // namespace fsdp::membership
