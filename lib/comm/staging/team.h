// SPDX-License-Identifier: Apache-2.0
// The ranks of a host team over memory of their devices, whose bytes go through pinned memory of the host. Works
// wherever that team's communicators do: between hosts there are MessageCommunicators only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/device_team.h"
#include "comm/staging/sizes.h"

namespace fsdp::comm::staging {

// What each rank allocates for one communicator, pinned or of the device, beside what the host's own ones do.
uint64_t communicator_bytes(const Sizes &sizes = {}) noexcept;
uint64_t messages_bytes(const Sizes &sizes = {}) noexcept;

class StagedTeam final : public DeviceTeam {
 public:
  // sizes: the same on all ranks.
  StagedTeam(std::shared_ptr<Team> host, device::Device &device, const Sizes &sizes = {})
      : DeviceTeam(std::move(host), device), sizes_(sizes) {}

  std::unique_ptr<Communicator> create_communicator(const std::string &what, uint32_t reduction_block) override;
  std::unique_ptr<MessageCommunicator> create_message_communicator(const std::string &what, bool sums) override;

 private:
  Sizes sizes_;
};

}  // namespace fsdp::comm::staging
