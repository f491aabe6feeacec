// SPDX-License-Identifier: Apache-2.0
#include "transport/staging/slots.h"

#include <unistd.h>

#include <vector>

#include "transport/exchange.h"

namespace fsdp::transport::staging {

namespace {

// ThreadSanitizer is only told the truth if ranks of one process have one view of what they share (base/view.h):
// then the first of them pins it. Else every rank has a view of its own.
bool pins(Team &team, const std::byte *view, const std::string &what) {
  struct Place {
    uint64_t process, address;
    bool operator==(const Place &) const = default;
  };
  const Place mine{static_cast<uint64_t>(::getpid()), reinterpret_cast<uintptr_t>(view)};
  std::vector<Place> all(team.size());
  team.all_gather(&mine, sizeof mine, all.data(), what.c_str());
  for (uint32_t r = 0; r < team.rank(); ++r)
    if (all[r] == mine) return false;
  return true;
}

}  // namespace

// All of it is writable here, though this rank writes its own parts alone: not every driver pins what may only be read.
Slots::Slots(Team &team, device::Device &device, uint64_t count, uint64_t part_bytes, const std::string &what)
    : device_(device), count_(count), part_bytes_(part_bytes) {
  const Range all{0, count * part_bytes * team.size()};
  arena_ = team.create_arena(all.bytes, std::span(&all, 1), what);
  const bool pinned_here = pins(team, arena_->writable(), what);
  const auto pin = [&] {
    if (!pinned_here) return;
    device.register_host(arena_->writable(), all.bytes);
    registered_bytes_ = all.bytes;
  };
  try {
    attempt_together(team, what, pin);
  } catch (...) {
    unpin();
    throw;
  }
}

Slots::~Slots() { unpin(); }

// Memory that the device may still use is left where it is.
void Slots::unpin() noexcept {
  if (registered_bytes_ && !device_.unregister_host(arena_->writable(), registered_bytes_)) (void)arena_.release();
}

}  // namespace fsdp::transport::staging
