// SPDX-License-Identifier: Apache-2.0
// The arena of a device whose memory other ranks do not read: this rank's part, and addresses that name nothing for the
// parts of the others.
#pragma once

#include <memory>
#include <string>

#include "transport/team.h"

namespace fsdp::transport {

class PartArena : public Arena {
 public:
  PartArena(device::Device &device, uint64_t part_bytes, uint32_t rank, uint32_t size, std::string what);

  const std::byte *data() const noexcept override { return base_; }
  uint64_t size_bytes() const noexcept override { return size_bytes_; }
  std::byte *writable() const noexcept override { return base_; }
  void protect(uint64_t offset, uint64_t bytes, bool readable) override;
  void protect_own(uint64_t offset, uint64_t bytes, Access access) override;
  bool protects() const noexcept override { return false; }
  void restore(uint64_t offset, uint64_t bytes) override;
  // What there is of it.
  device::Memory &own() const noexcept { return *memory_; }

 private:
  std::string what_;
  uint64_t size_bytes_;
  std::unique_ptr<device::Memory> memory_;
  // Where the part of rank 0 would be if the parts of all ranks lay one after the other, this rank's at its own memory.
  // So whoever computes base + rank * part_bytes needs no case for a device; nothing but the own part is ever touched.
  std::byte *base_;
};

}  // namespace fsdp::transport
