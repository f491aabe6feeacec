// SPDX-License-Identifier: Apache-2.0
// Replaces the CUDA device in a build without CUDA.
#include "device/device.h"

namespace fsdp::device {

std::unique_ptr<Device> create_cuda_device(int32_t, const Options &, const Waiter &, Failure &) {
  fail(FSDP_UNSUPPORTED, "FSDP_DEVICE_CUDA: this library was built without CUDA (-Dcuda=enabled)");
}
const char *cuda_description() noexcept { return "no"; }
std::string cuda_at_run_time() { return {}; }

}  // namespace fsdp::device
