// SPDX-License-Identifier: Apache-2.0
#include "membership/tree/deputy.h"

#include <poll.h>

#include <algorithm>

namespace fsdp::membership {
namespace {

constexpr int most_told = 3;  // datagrams are lost now and then

}  // namespace

Deputy::Deputy(Seat &seat, const NodePlan &plan)
    : seat_(seat), leader_(plan.nodes[plan.node()].leader), notices_(plan) {
  for (uint32_t rank = leader_ + 1; rank < plan.rank; ++rank)
    if (plan.node_of[rank] == plan.node()) before_.push_back(rank);
}

void Deputy::run(int wake, uint32_t ms) noexcept {
  if (told_ < most_told && seat_.pulse.misses_beat(leader_) && speaks() && seat_.links->dumps_core(leader_)) tell();
  pollfd entry{wake, POLLIN, 0};
  ::poll(&entry, 1, static_cast<int>(ms));
}

// This rank's caller may have found the leader first, and end the context for it.
void Deputy::finish() noexcept {
  if (told_ < most_told && seat_.links->dumps_core(leader_)) tell();
}

void Deputy::tell() noexcept {
  try {
    notices_.send(seat_.control.process(leader_));
    ++told_;
  } catch (...) {  // no memory: the next round has another chance
  }
}

// Of the ranks that are left the lowest does, which is enough.
bool Deputy::speaks() const noexcept {
  return std::ranges::none_of(before_, [this](uint32_t rank) {
    return seat_.control.membership(rank) == Membership::member && !seat_.pulse.misses_beat(rank);
  });
}

}  // namespace fsdp::membership
