// SPDX-License-Identifier: Apache-2.0
// The driver's contexts: one for each device, and for each thread a stack of them.
#include "simulated_cuda/call.h"
#include "simulated_cuda/driver.h"

namespace simulated {
namespace {

constexpr uintptr_t first_context = 0x55000000;

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(first_context + 16 * static_cast<uintptr_t>(device)); }

int device_of_context(CUcontext context) {
  return static_cast<int>((reinterpret_cast<uintptr_t>(context) - first_context) / 16);
}

}  // namespace

CUresult CUDAAPI primary_context_retain(CUcontext *context, CUdevice device) {
  return driver_call("cuDevicePrimaryCtxRetain", healthy_device, [&] {
    if (!runtime().device(device)) return CUDA_ERROR_INVALID_DEVICE;
    ++runtime().retained_contexts;
    *context = context_of(device);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI primary_context_release(CUdevice) {
  return driver_call("cuDevicePrimaryCtxRelease", nothing, [&] {
    if (runtime().retained_contexts.load() == 0) return CUDA_ERROR_INVALID_CONTEXT;
    --runtime().retained_contexts;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_get_current(CUcontext *context) {
  return driver_call("cuCtxGetCurrent", nothing, [&] {
    *context = this_thread().has_context ? context_of(this_thread().device) : nullptr;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_push(CUcontext context) {
  return driver_call("cuCtxPushCurrent", nothing, [&] {
    Thread &thread = this_thread();
    const int device = device_of_context(context);
    if (!runtime().device(device)) return CUDA_ERROR_INVALID_CONTEXT;
    thread.below.push_back({thread.device, thread.has_context});
    thread.device = device;
    thread.has_context = true;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI context_pop(CUcontext *context) {
  return driver_call("cuCtxPopCurrent", nothing, [&] {
    Thread &thread = this_thread();
    if (thread.below.empty()) return CUDA_ERROR_INVALID_CONTEXT;
    *context = context_of(thread.device);
    thread.device = thread.below.back().device;
    thread.has_context = thread.below.back().has_context;
    thread.below.pop_back();
    return CUDA_SUCCESS;
  });
}

}  // namespace simulated
