// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/order.h"

namespace fsdp::transport::nccl {

std::shared_ptr<LaunchOrder> LaunchOrder::of(device::Device &device) {
  if (!device.launch_order) device.launch_order = std::make_shared<LaunchOrder>(device);
  return std::static_pointer_cast<LaunchOrder>(device.launch_order);
}

}  // namespace fsdp::transport::nccl
