// SPDX-License-Identifier: Apache-2.0
// NCCL's kernels wait on the GPU for those of other ranks. Two communicators whose kernels start in one order here and
// in another one there may wait for each other for ever. So all ranks launch in one order, that of their calls, and on
// each GPU they also start in it: by an event between one launch and the next, on whatever streams they are.
#pragma once

#include <memory>

#include "device/device.h"

namespace fsdp::transport::nccl {

class LaunchOrder {
 public:
  explicit LaunchOrder(device::Device &device) : last_(device.create_event()) {}
  // Of this device, shared by all that launch on it.
  static std::shared_ptr<LaunchOrder> of(device::Device &device);

  // Events do not reach across the edges of a graph capture (see device::Device::begin_capture): there whoever joins
  // the library's streams to the captured one keeps the order, and whoever launches the graphs.
  void enter(device::Stream &stream) { stream.wait(*last_); }
  void leave(device::Stream &stream) { stream.record(*last_); }

 private:
  std::unique_ptr<device::Event> last_;
};

}  // namespace fsdp::transport::nccl
