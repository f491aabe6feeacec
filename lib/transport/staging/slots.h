// SPDX-License-Identifier: Apache-2.0
// Pinned memory of the host that the ranks of a team share, cut into slots that take turns. In a slot every rank has a
// part, which its device writes and the devices of the others read: no byte is copied by the host.
#pragma once

#include <memory>
#include <string>

#include "transport/team.h"

namespace fsdp::transport::staging {

class Slots {
 public:
  // Collective over the team.
  Slots(Team &team, device::Device &device, uint64_t count, uint64_t part_bytes, const std::string &what);
  ~Slots();
  Slots(const Slots &) = delete;
  Slots &operator=(const Slots &) = delete;

  uint64_t part_bytes() const noexcept { return part_bytes_; }
  std::byte *part(uint64_t slot, uint32_t rank) const noexcept {
    return arena_->writable() + (rank * count_ + slot) * part_bytes_;
  }

 private:
  void unpin() noexcept;

  device::Device &device_;
  uint64_t count_;
  uint64_t part_bytes_;
  std::unique_ptr<Arena> arena_;
  uint64_t registered_bytes_ = 0;
};

}  // namespace fsdp::transport::staging
