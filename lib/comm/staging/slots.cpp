// SPDX-License-Identifier: Apache-2.0
#include "comm/staging/slots.h"

#include "comm/together.h"

namespace fsdp::comm::staging {

// All of it is writable here, though this rank writes its own parts alone: not every driver pins what may only be read.
Slots::Slots(Team &team, device::Device &device, uint64_t count, uint64_t part_bytes, const std::string &what)
    : device_(device), count_(count), part_bytes_(part_bytes) {
  const Range all{0, count * part_bytes * team.size()};
  auto arena = team.create_arena(all.bytes, std::span(&all, 1), what);
  bool registered = false;
  const auto pin = [&] {
    device.register_host(arena->writable(), all.bytes);
    registered = true;
  };
  try {
    attempt_together(team, what, pin);
  } catch (...) {
    if (registered) device.unregister_host(arena->writable());
    throw;
  }
  arena_ = std::move(arena);
}

Slots::~Slots() { device_.unregister_host(arena_->writable()); }

}  // namespace fsdp::comm::staging
