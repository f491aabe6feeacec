// SPDX-License-Identifier: Apache-2.0

#include "transport/team.h"

#include "base/checked.h"
#include "transport/exchange.h"

namespace fsdp::transport {

PartArena::PartArena(device::Device &device, uint64_t part_bytes, uint32_t rank, uint32_t size, std::string what)
    : what_(std::move(what)), size_bytes_(checked_multiply(part_bytes, size, what_.c_str())) {
  memory_ = device.allocate(part_bytes, what_.c_str());
  // Computed with integers, because a pointer must stay inside its object.
  const auto own = reinterpret_cast<uintptr_t>(memory_->data());
  base_ = reinterpret_cast<std::byte *>(own - rank * part_bytes);
}

void PartArena::protect(uint64_t offset, uint64_t bytes, bool) {
  fail(FSDP_INTERNAL, "{}: protecting {} bytes at {} of memory of a device", what_, bytes, offset);
}

void PartArena::restore(uint64_t offset, uint64_t bytes) {
  fail(FSDP_INTERNAL, "{}: restoring a view of {} bytes at {} of memory of a device", what_, bytes, offset);
}

void PartArena::protect_own(uint64_t offset, uint64_t bytes, Access) { protect(offset, bytes, false); }

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
