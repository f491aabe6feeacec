// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/device.h"

namespace fsdp::device {

// Anonymous pages, all of them present from the start: no page fault and no failure later. Not inherited by children.
class HostMemory final : public Memory {
 public:
  HostMemory(uint64_t bytes, const char *what);
  ~HostMemory() override;
  HostMemory(const HostMemory &) = delete;
  HostMemory &operator=(const HostMemory &) = delete;

  std::byte *data() const noexcept override { return data_; }
  uint64_t size_bytes() const noexcept override { return bytes_; }

 private:
  std::byte *data_ = nullptr;  // NULL if there are no bytes
  uint64_t bytes_;
};

}  // namespace fsdp::device
