// SPDX-License-Identifier: Apache-2.0
// The few things that NCCL needs and device::Device does not say.
#pragma once

#include <array>
#include <cstdint>

#include "fsdp.h"

namespace fsdp::comm::nccl {

// The same for two ranks exactly if they have the same GPU, wherever they run.
using GpuIdentity = std::array<uint8_t, 16>;
GpuIdentity gpu_identity(int32_t index);

// The major number of its compute capability.
int32_t gpu_generation(int32_t index);

// For a thread that works for NCCL and nothing else.
void make_current(int32_t index) noexcept;

// This thread asks about events while another one captures: that must not spoil the capture.
void allow_calls_during_captures() noexcept;

}  // namespace fsdp::comm::nccl
