// SPDX-License-Identifier: Apache-2.0
// The one place that names the devices.
#include "device/device.h"
#include "device/host/host_device.h"

namespace fsdp::device {

std::unique_ptr<Device> create_host_device(const Options &options, const Waiter &waiter, Failure &failure) {
  return std::make_unique<HostDevice>(options, waiter, failure);
}

}  // namespace fsdp::device
