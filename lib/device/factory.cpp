// SPDX-License-Identifier: Apache-2.0
// The only file that names the implementations of devices.
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

// The best target that this processor supports, which is the lowest bit in Highway's order.
const char *host_instruction_set() {
  const int64_t targets = hwy::SupportedTargets();
  return hwy::TargetName(targets & -targets);
}

}  // namespace fsdp::device
