// SPDX-License-Identifier: Apache-2.0
// Implements the runtime's allocation and registration.
#include <cuda_runtime_api.h>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"
#include "simulated_cuda/device_memory.h"

using namespace simulated;  // NOLINT: the functions below are C's

namespace {

// Waits for the device, as the real cudaFree does in practice. In strict mode it does not wait, and work that still
// uses the memory faults.
void finish_device(Device &device) {
  if (!runtime().strict) finish_all_work(device);
}

cudaError_t allocate(void **pointer, size_t bytes) {
  if (!pointer) return cudaErrorInvalidValue;
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  Device &device = runtime().current();
  if (!take(device, bytes)) return cudaErrorMemoryAllocation;
  *pointer = runtime().memory.allocate(device.index, bytes);
  if (!*pointer) give_back(device, bytes);
  return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t release(void *pointer) {
  if (!pointer) return cudaSuccess;
  const Place place = runtime().memory.find(pointer, 1);
  if (place.kind != Place::device || !place.inside || place.begin != reinterpret_cast<uintptr_t>(pointer)) {
    return cudaErrorInvalidValue;
  }
  Device &device = *runtime().device(place.device_index);
  runtime().note_device(device);
  finish_device(device);
  const size_t bytes = runtime().memory.free(pointer);
  if (bytes == 0) return cudaErrorInvalidValue;  // cuMemMap made this memory
  give_back(device, bytes);
  return cudaSuccess;
}

cudaError_t allocate_pinned(void **pointer, size_t bytes) {
  if (!pointer) return cudaErrorInvalidValue;
  *pointer = bytes ? runtime().memory.allocate_pinned(runtime().current().index, bytes) : nullptr;
  return *pointer || bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}

// Waits for the device that was current when the memory was allocated or registered, and for no other device.
void finish_pinned(void *pointer) {
  const Place place = runtime().memory.find(pointer, 1);
  if (place.kind != Place::pinned) return;
  Device &device = *runtime().device(place.device_index);
  runtime().note_device(device);
  finish_device(device);
}

cudaError_t release_pinned(void *pointer) {
  if (!pointer) return cudaSuccess;
  finish_pinned(pointer);
  return runtime().memory.free_pinned(pointer) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t attributes(cudaPointerAttributes *out, const void *pointer) {
  const Place place = runtime().memory.find(pointer, 1);
  *out = {};
  out->device = place.kind == Place::pageable ? cudaInvalidDeviceId : place.device_index;
  if (place.kind == Place::device && !place.inside) return cudaErrorInvalidValue;  // the memory was freed
  void *address = const_cast<void *>(pointer);
  if (place.kind != Place::pageable) out->devicePointer = address;
  if (place.kind != Place::device) out->hostPointer = address;
  out->type = place.kind == Place::device   ? cudaMemoryTypeDevice
              : place.kind == Place::pinned ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

}  // namespace

cudaError_t CUDARTAPI cudaMalloc(void **pointer, size_t bytes) {
  return call("cudaMalloc", no_capture, [&] { return allocate(pointer, bytes); });
}

cudaError_t CUDARTAPI cudaFree(void *pointer) {
  return call("cudaFree", no_capture, [&] { return release(pointer); });
}

cudaError_t CUDARTAPI cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  return call("cudaHostAlloc", no_capture, [&] {
    constexpr unsigned known = cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined;
    return (flags & ~known) ? cudaErrorInvalidValue : allocate_pinned(pointer, bytes);
  });
}

cudaError_t CUDARTAPI cudaMallocHost(void **pointer, size_t bytes) {
  return call("cudaMallocHost", no_capture, [&] { return allocate_pinned(pointer, bytes); });
}

cudaError_t CUDARTAPI cudaFreeHost(void *pointer) {
  return call("cudaFreeHost", no_capture, [&] { return release_pinned(pointer); });
}

cudaError_t CUDARTAPI cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  return call("cudaHostRegister", no_capture, [&] {
    constexpr unsigned known = cudaHostRegisterPortable | cudaHostRegisterMapped | cudaHostRegisterReadOnly;
    if (!pointer || bytes == 0 || (flags & ~known)) return cudaErrorInvalidValue;
    if (runtime().memory.find(pointer, bytes).kind == Place::device) return cudaErrorInvalidValue;
    return runtime().memory.register_pinned(runtime().current().index, pointer, bytes)
               ? cudaSuccess
               : cudaErrorHostMemoryAlreadyRegistered;
  });
}

cudaError_t CUDARTAPI cudaHostUnregister(void *pointer) {
  return call("cudaHostUnregister", no_capture, [&] {
    finish_pinned(pointer);
    return runtime().memory.unregister_pinned(pointer) ? cudaSuccess : cudaErrorHostMemoryNotRegistered;
  });
}

// With unified addressing the device uses the same address.
cudaError_t CUDARTAPI cudaHostGetDevicePointer(void **device_pointer, void *host, unsigned flags) {
  return call("cudaHostGetDevicePointer", healthy_device, [&] {
    if (!device_pointer || flags != 0 || runtime().memory.find(host, 1).kind != Place::pinned) {
      return cudaErrorInvalidValue;
    }
    *device_pointer = host;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer) {
  return call("cudaPointerGetAttributes", healthy_device,
              [&] { return out ? attributes(out, pointer) : cudaErrorInvalidValue; });
}

cudaError_t CUDARTAPI cudaMemGetInfo(size_t *free, size_t *total) {
  return call("cudaMemGetInfo", healthy_device, [&] {
    const Device &device = runtime().current();
    if (free) *free = device.memory - device.allocated.load();
    if (total) *total = device.memory;
    return cudaSuccess;
  });
}
