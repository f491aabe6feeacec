// SPDX-License-Identifier: Apache-2.0
#include "transport/device_team.h"

#include "transport/device_arena.h"
#include "transport/exchange.h"

namespace fsdp::transport {

std::unique_ptr<Arena> DeviceTeam::create_arena(uint64_t bytes, std::span<const Range>, const std::string &what,
                                                View view) {
  if (size() > 1)
    fail(FSDP_UNSUPPORTED, "{}: {} bytes of device memory that {} ranks share; each has only its own part", what, bytes,
         size());
  return create_parts(bytes, what, view);
}

std::unique_ptr<Arena> DeviceTeam::create_parts(uint64_t part_bytes, const std::string &what, View) {
  std::unique_ptr<Arena> arena;
  attempt_together(*host_, what,
                   [&] { arena = std::make_unique<PartArena>(device_, part_bytes, rank(), size(), what); });
  return arena;
}

}  // namespace fsdp::transport
