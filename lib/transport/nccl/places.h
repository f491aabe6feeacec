// SPDX-License-Identifier: Apache-2.0
// Where a libnccl may be. Nothing is executed to find it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp.h"

namespace fsdp::transport::nccl {

// Properties of GPUs that NCCL needs and device::Device does not provide.
// The GPU of a rank, or its slice of a GPU (MIG).
struct GpuIdentity {
  std::array<uint8_t, 16> number;  // number of the GPU or the slice: equal for two ranks exactly if they share it
  int32_t domain, bus, slot;       // PCI address of the GPU in its host, which is equal for slices of one GPU

  bool operator==(const GpuIdentity &) const = default;
  bool same_gpu(const GpuIdentity &other) const noexcept {
    return domain == other.domain && bus == other.bus && slot == other.slot;
  }
  std::string place() const;  // "0000:1b:00"
};
GpuIdentity gpu_identity(int32_t index);

// The major number of the GPU's compute capability.
int32_t gpu_generation(int32_t index);

// Makes the GPU the current one of a thread that works only for NCCL.
void make_current(int32_t index) noexcept;
// Lets this thread query events while another thread captures a graph, without ending the capture.
void allow_calls_during_captures() noexcept;

// The files named libnccl.so* that this process has mapped, each once.
std::vector<std::string> mapped_libraries();
// The existing libraries from Python wheels, in the environments that the process can see.
std::vector<std::string> wheel_libraries();
// The folders that wheel_libraries() searched, for messages.
std::vector<std::string> python_folders();

}  // namespace fsdp::transport::nccl
