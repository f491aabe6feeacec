// SPDX-License-Identifier: Apache-2.0
#include "comm/staging/team.h"

#include "comm/exchange.h"
#include "comm/staging/communicator.h"
#include "comm/staging/messages.h"

namespace fsdp::comm::staging {

// The slots, and where the parts of the others are summed.
uint64_t communicator_bytes(const Sizes &sizes) noexcept { return (Conveyor::slots + 1) * sizes.part_bytes; }
uint64_t messages_bytes(const Sizes &sizes) noexcept { return Conveyor::slots * sizes.slot_bytes; }

std::unique_ptr<Communicator> StagedTeam::create_communicator(const std::string &what, uint32_t reduction_block) {
  auto calls = host_->create_communicator(what);
  auto slots = std::make_unique<Slots>(*host_, device_, Conveyor::slots, sizes_.part_bytes, what);
  std::unique_ptr<Communicator> communicator;
  attempt_together(*host_, what, [&] {
    communicator = std::make_unique<DeviceCommunicator>(host_, std::move(calls), std::move(slots), device_, sizes_,
                                                        reduction_block, what);
  });
  return communicator;
}

std::unique_ptr<MessageCommunicator> StagedTeam::create_message_communicator(const std::string &what, bool sums) {
  auto calls = host_->create_message_communicator(what, sums);
  std::unique_ptr<MessageCommunicator> communicator;
  attempt_together(*host_, what, [&] {
    communicator = std::make_unique<DeviceMessages>(host_, std::move(calls), device_, sizes_, what);
  });
  return communicator;
}

}  // namespace fsdp::comm::staging
