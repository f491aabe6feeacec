// SPDX-License-Identifier: Apache-2.0
// Where a libnccl may be. Nothing is executed to find out.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp.h"

namespace fsdp::transport::nccl {

// The few things that NCCL needs and device::Device does not say.

// What a rank has of a GPU: all of it, or a slice (MIG).
struct GpuIdentity {
  std::array<uint8_t, 16>
      number;                 // of the GPU or of the slice, the same for two ranks exactly if they have the same one
  int32_t domain, bus, slot;  // of the GPU in its host (PCI): slices of one GPU have the same

  bool operator==(const GpuIdentity &) const = default;
  bool same_gpu(const GpuIdentity &other) const noexcept {
    return domain == other.domain && bus == other.bus && slot == other.slot;
  }
  std::string place() const;  // "0000:1b:00"
};
GpuIdentity gpu_identity(int32_t index);

// The major number of its compute capability.
int32_t gpu_generation(int32_t index);

// For a thread that works for NCCL and nothing else.
void make_current(int32_t index) noexcept;

// This thread asks about events while another one captures: that must not spoil the capture.
void allow_calls_during_captures() noexcept;

// The files named libnccl.so* that this process has mapped, each once.
std::vector<std::string> mapped_libraries();
// Where Python's wheels put it, in the environments that the process can see, those that exist only.
std::vector<std::string> wheel_libraries();
// What wheel_libraries looked into, for messages.
std::vector<std::string> python_folders();

}  // namespace fsdp::transport::nccl
