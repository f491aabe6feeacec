// SPDX-License-Identifier: Apache-2.0
// The few things that NCCL needs and device::Device does not say.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "fsdp.h"

namespace fsdp::transport::nccl {

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

}  // namespace fsdp::transport::nccl
