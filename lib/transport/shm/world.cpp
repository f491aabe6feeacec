// SPDX-License-Identifier: Apache-2.0
#include "transport/shm/world.h"

#include <algorithm>

#include "transport/shm/team.h"

namespace fsdp::transport {

ShmWorld::ShmWorld(std::shared_ptr<Seat> seat, device::Device &device, std::string description,
                   std::unique_ptr<Monitor> monitor)
    : seat_(std::move(seat)), device_(device), description_(std::move(description)), monitor_(std::move(monitor)) {
  seat_->control.set_membership(rank(), Membership::member);
}

ShmWorld::~ShmWorld() {
  if (seat_->control.membership(rank()) == Membership::member) seat_->control.set_membership(rank(), Membership::gone);
}

std::unique_ptr<Team> ShmWorld::create_team(std::span<const uint32_t> ranks, const std::string &what) {
  std::vector<uint32_t> members(ranks.begin(), ranks.end());
  for (const uint32_t rank : members)
    if (rank >= size()) fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is outside [0, {})", what, rank, size());
  std::vector<uint32_t> sorted = members;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: a rank is named twice", what);
  if (!std::binary_search(sorted.begin(), sorted.end(), rank()))
    fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is not among the ranks of the team", what, rank());
  const uint64_t key = team_keys_.next(members);
  return std::make_unique<ShmTeam>(seat_, device_, std::move(members), key, what);
}

void ShmWorld::check() {
  seat_->control.settle();
  if (seat_->control.accused() && seat_->control.verdict().kind == Verdict::destroyed) return;
  seat_->watch.check();
}

void ShmWorld::end(Verdict verdict, const std::string &reason) noexcept {
  try {
    seat_->control.accuse(verdict, rank(), format_text("rank {} aborted: {}", rank(), reason));
  } catch (...) {  // no memory for the text: the verdict has a short one of its own
    seat_->control.accuse(verdict, rank(), {});
  }
}

}  // namespace fsdp::transport
