// SPDX-License-Identifier: Apache-2.0
// What a rank that leads no node does for one whose leader is dumping core. Such a leader is silent, and its kernel
// holds its connections: other nodes would take it for stopped. So one of its node tells its neighbours in the tree, by
// datagrams. Where none gets through, or where there is no other rank, they find its silence.
#pragma once

#include <vector>

#include "membership/liveness/monitor.h"
#include "membership/tree/datagrams.h"
#include "membership/tree/plan.h"

namespace fsdp::membership {

class Deputy final : public Chore {
 public:
  // The seat outlives it: a Monitor holds both.
  Deputy(Seat &seat, const NodePlan &plan);

  void run(int wake, uint32_t ms) noexcept override;
  void finish() noexcept override;

 private:
  bool speaks() const noexcept;
  void tell() noexcept;

  Seat &seat_;
  uint32_t leader_;
  std::vector<uint32_t> before_;  // ranks of this node that speak rather than this one
  DumpNotices notices_;
  int told_ = 0;
};

}  // namespace fsdp::membership
