// SPDX-License-Identifier: Apache-2.0
#include "transport/staging/team.h"

#include "transport/exchange.h"
#include "transport/staging/collectives.h"

namespace fsdp::transport::staging {

// The slots, and where the parts of the others are summed.
uint64_t communicator_bytes(const ConveyorSizes &sizes) noexcept { return (Conveyor::slots + 1) * sizes.part_bytes; }
uint64_t messages_bytes(const ConveyorSizes &sizes) noexcept { return Conveyor::slots * sizes.slot_bytes; }

std::unique_ptr<Collectives> StagedTeam::create_collectives(const std::string &what, const Shape &shape) {
  auto calls = host_->create_collectives(what, {.arenas = shape.arenas, .sums = shape.sums});
  const ConveyorSizes sizes = sizes_.bounded(shape.longest_call, size());
  std::unique_ptr<Slots> slots;
  if (shape.arenas) slots = std::make_unique<Slots>(*host_, device_, Conveyor::slots, sizes.part_bytes, what);
  std::unique_ptr<Collectives> made;
  attempt_together(*host_, what, [&] {
    made = std::make_unique<StagedCollectives>(host_, std::move(calls), std::move(slots), device_, sizes, shape, what);
  });
  return made;
}

}  // namespace fsdp::transport::staging
