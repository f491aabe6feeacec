// SPDX-License-Identifier: Apache-2.0
// Implements the driver's contexts. There are only the primary ones, which the runtime uses.
#include <cuda.h>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"
#include "simulated_cuda/driver.h"
#include "simulated_cuda/simulated.h"

namespace simulated {
namespace {

constexpr uintptr_t first_handle = 0x57000000;

CUcontext handle_of(int device) {
  return reinterpret_cast<CUcontext>(first_handle + static_cast<uintptr_t>(device) * 16);
}

// Returns nullptr if the context does not belong to an existing device.
Device *device_of(CUcontext context) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(context) - first_handle;
  return place % 16 == 0 && place / 16 < max_devices ? runtime().device(static_cast<int>(place / 16)) : nullptr;
}

bool alive(const Device &device) { return device.used || device.retained > 0; }

CUresult usable(CUcontext context) {
  const Device *device = device_of(context);
  if (!device) return CUDA_ERROR_INVALID_CONTEXT;
  return alive(*device) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

}  // namespace

CUresult CUDAAPI primary_context_retain(CUcontext *context, CUdevice index) {
  return driver_call("cuDevicePrimaryCtxRetain", nothing, [&] {
    Device *device = runtime().device(index);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    ++device->retained;
    *context = handle_of(index);
    return CUDA_SUCCESS;
  });
}

// The last release destroys a context that the runtime does not use, and waits for its work. In this simulation the
// objects of the context remain usable.
CUresult CUDAAPI primary_context_release(CUdevice index) {
  return driver_call("cuDevicePrimaryCtxRelease", nothing, [&] {
    Device *device = runtime().device(index);
    if (!device) return CUDA_ERROR_INVALID_DEVICE;
    if (device->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--device->retained == 0 && !device->used) finish_all_work(*device);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_get_current(CUcontext *context) {
  return driver_call("cuCtxGetCurrent", nothing, [&] {
    const Thread &thread = this_thread();
    *context = thread.contexts.empty() ? nullptr : handle_of(thread.contexts.back());
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_set_current(CUcontext context) {
  return driver_call("cuCtxSetCurrent", nothing, [&] {
    std::vector<int> &contexts = this_thread().contexts;
    if (context) {
      if (const CUresult error = usable(context)) return error;
      if (contexts.empty()) contexts.push_back(0);
      contexts.back() = device_of(context)->index;
    } else if (!contexts.empty()) {
      contexts.pop_back();
    }
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_push(CUcontext context) {
  return driver_call("cuCtxPushCurrent", nothing, [&] {
    if (const CUresult error = usable(context)) return error;
    this_thread().contexts.push_back(device_of(context)->index);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_pop(CUcontext *context) {
  return driver_call("cuCtxPopCurrent", nothing, [&] {
    std::vector<int> &contexts = this_thread().contexts;
    if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    if (context) *context = handle_of(contexts.back());
    contexts.pop_back();
    return CUDA_SUCCESS;
  });
}

}  // namespace simulated
