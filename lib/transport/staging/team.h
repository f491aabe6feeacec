// SPDX-License-Identifier: Apache-2.0
// The ranks of a host team over memory of their devices, whose bytes go through pinned memory of the host. Works
// wherever that team's collectives do: between hosts there are none over arenas.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/device_team.h"
#include "transport/staging/conveyor.h"

namespace fsdp::transport::staging {

// What each rank allocates for collectives over arenas, and without them, pinned or of the device, beside what the
// host's own ones do.
uint64_t communicator_bytes(const ConveyorSizes &sizes = {}) noexcept;
uint64_t messages_bytes(const ConveyorSizes &sizes = {}) noexcept;

class StagedTeam final : public DeviceTeam {
 public:
  // sizes: the same on all ranks.
  StagedTeam(std::shared_ptr<Team> host, device::Device &device, const ConveyorSizes &sizes = {})
      : DeviceTeam(std::move(host), device), sizes_(sizes) {}

  std::unique_ptr<Collectives> create_collectives(const std::string &what, const Shape &shape) override;

 private:
  ConveyorSizes sizes_;
};

}  // namespace fsdp::transport::staging
