// SPDX-License-Identifier: Apache-2.0
// The only file that names the implementations of devices.
#include "device/host/simd_targets.h"
// (The line above comes before all headers of Highway.)
#include <hwy/targets.h>

#include "device/cuda/traits.h"
#include "device/device.h"
#include "device/host/host_device.h"
#include "device/host/traits.h"

namespace fsdp::device {

std::unique_ptr<Device> create_host_device(const Options &options, const Waiter &waiter, Failure &failure) {
  return std::make_unique<HostDevice>(options, waiter, failure);
}

const Traits &traits_of(fsdp_device_kind kind) noexcept { return kind == FSDP_DEVICE_CUDA ? cuda_traits : host_traits; }

// The target of the kernels that run here: the best one that was compiled and that this processor supports. Highway's
// lowest bit is the best target.
const char *host_instruction_set() {
  const int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  return hwy::TargetName(targets & -targets);
}

}  // namespace fsdp::device
