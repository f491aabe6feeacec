// SPDX-License-Identifier: Apache-2.0
// The guards around calls into CUDA.
#include "device/cuda/core.h"

namespace fsdp::device::cuda {

PrimaryContext::PrimaryContext(int index, const Driver &driver, const Checker &check) : driver_(driver), check_(check) {
  const std::string what = format_text("GPU {}", index);
  check(driver.device_get(&device_, index), "cuDeviceGet", what);
  check(driver.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain", what);
}

PrimaryContext::~PrimaryContext() {
  if (left_) return;
  check_.note(runtime_error(driver_.primary_context_release(device_)), "cuDevicePrimaryCtxRelease", "the GPU");
}

DeviceScope::Failed DeviceScope::enter(CUcontext context) noexcept {
  CUcontext current = nullptr;
  if (const CUresult code = driver_.context_get_current(&current)) return {"cuCtxGetCurrent", code};
  if (current != context) {
    if (const CUresult code = driver_.context_push(context)) return {"cuCtxPushCurrent", code};
    pushed_ = true;
  }
  current_ = true;
  return {};
}

DeviceScope::DeviceScope(const Core &core) : driver_(core.driver) {
  const Failed failed = enter(core.context.get());
  if (failed.call) core.check(failed.code, failed.call, "the calling thread's GPU");
}

DeviceScope::DeviceScope(const Core &core, std::nothrow_t) noexcept : driver_(core.driver) {
  const Failed failed = enter(core.context.get());
  if (failed.call) core.check.note(runtime_error(failed.code), failed.call, "the calling thread's GPU");
}

DeviceScope::~DeviceScope() {
  CUcontext ours = nullptr;
  if (pushed_) driver_.context_pop(&ours);
}

// Where it cannot be exchanged, what follows says so itself; its own error must not wait for the program.
RelaxedScope::RelaxedScope() noexcept {
  exchanged_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
  if (!exchanged_) cudaGetLastError();
}

RelaxedScope::~RelaxedScope() {
  if (exchanged_ && cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
}

}  // namespace fsdp::device::cuda
