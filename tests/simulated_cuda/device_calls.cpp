// SPDX-License-Identifier: Apache-2.0
// Implements the runtime's calls about devices. They report attributes like those of an H100, so that code for an H100
// runs.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <map>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"

using namespace simulated;  // NOLINT: the functions below are C's

namespace {

constexpr int bus_of_first = 16;

// An attribute that is not listed returns cudaErrorInvalidValue, so that no test relies on a guess.
const std::map<cudaDeviceAttr, int> device_attributes{
    {cudaDevAttrMaxThreadsPerBlock, 1024},
    {cudaDevAttrMaxBlockDimX, 1024},
    {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647},
    {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrTotalConstantMemory, 65536},
    {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMultiProcessorCount, 4},  // few processors keep grids small
    {cudaDevAttrIntegrated, 0},
    {cudaDevAttrCanMapHostMemory, 1},
    {cudaDevAttrComputeMode, cudaComputeModeDefault},
    {cudaDevAttrConcurrentKernels, 1},
    {cudaDevAttrEccEnabled, 1},
    {cudaDevAttrPciDomainId, 0},
    {cudaDevAttrPciDeviceId, 0},
    {cudaDevAttrAsyncEngineCount, 3},
    {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrStreamPrioritiesSupported, 1},
    {cudaDevAttrManagedMemory, 0},
    {cudaDevAttrPageableMemoryAccess, 0},
    {cudaDevAttrConcurrentManagedAccess, 0},
    {cudaDevAttrHostNativeAtomicSupported, 0},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, 1},
    {cudaDevAttrHostRegisterSupported, 1},
    {cudaDevAttrMemoryPoolsSupported, 0},
    {cudaDevAttrGPUDirectRDMASupported, 0},
};

// Slices of one GPU report the place of that GPU.
int bus_of(int index) { return bus_of_first + index / runtime().slices; }

void describe(cudaDeviceProp &properties, const Device &device) {
  properties = {};
  std::snprintf(properties.name, sizeof(properties.name), "simulated CUDA device %d", device.index);
  for (size_t byte = 0; byte < sizeof(properties.uuid.bytes); ++byte) properties.uuid.bytes[byte] = 0;
  properties.uuid.bytes[0] = static_cast<char>(device.index + 1);
  properties.totalGlobalMem = device.memory;
  properties.sharedMemPerBlock = 49152;
  properties.warpSize = 32;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsPerMultiProcessor = 2048;
  properties.multiProcessorCount = device_attributes.at(cudaDevAttrMultiProcessorCount);
  properties.major = runtime().capability;
  properties.asyncEngineCount = 3;
  properties.unifiedAddressing = 1;
  properties.canMapHostMemory = 1;
  properties.concurrentKernels = 1;
  properties.hostRegisterSupported = 1;
  properties.canUseHostPointerForRegisteredMem = 1;
  properties.pciBusID = bus_of(device.index);
}

}  // namespace

cudaError_t CUDARTAPI cudaGetDeviceCount(int *count) {
  return call("cudaGetDeviceCount", nothing, [&] {
    if (!count) return cudaErrorInvalidValue;
    *count = runtime().device_count();
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t CUDARTAPI cudaGetDevice(int *device) {
  return call("cudaGetDevice", nothing, [&] {
    if (runtime().device_count() == 0) return cudaErrorNoDevice;
    *device = current_device(this_thread());
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaSetDevice(int device) {
  return call("cudaSetDevice", nothing, [&] {
    if (runtime().device_count() == 0) return cudaErrorNoDevice;
    if (!runtime().device(device)) return cudaErrorInvalidDevice;
    Thread &thread = this_thread();
    thread.chosen = device;
    if (thread.contexts.empty()) thread.contexts.push_back(device);
    thread.contexts.back() = device;
    Device &chosen = runtime().current();
    chosen.used = true;
    return chosen.error();
  });
}

cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", no_capture, [&] {
    Device &device = runtime().current();
    if (const cudaError_t error = refuse_capture(device)) return error;
    finish_all_work(device);
    return device.error();
  });
}

cudaError_t CUDARTAPI cudaDriverGetVersion(int *version) {
  return call("cudaDriverGetVersion", nothing, [&] {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaRuntimeGetVersion(int *version) {
  return call("cudaRuntimeGetVersion", nothing, [&] {
    *version = CUDART_VERSION;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp *properties, int index) {
  return call("cudaGetDeviceProperties", no_context, [&] {
    const Device *device = runtime().device(index);
    if (!device) return cudaErrorInvalidDevice;
    describe(*properties, *device);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int index) {
  return call("cudaDeviceGetAttribute", no_context, [&] {
    if (!runtime().device(index)) return cudaErrorInvalidDevice;
    const auto found = device_attributes.find(attribute);
    if (attribute == cudaDevAttrPciBusId) {
      *value = bus_of(index);
    } else if (attribute == cudaDevAttrComputeCapabilityMajor) {
      *value = runtime().capability;
    } else if (found != device_attributes.end()) {
      *value = found->second;
    } else {
      return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceGetPCIBusId(char *text, int length, int index) {
  return call("cudaDeviceGetPCIBusId", no_context, [&] {
    if (!runtime().device(index)) return cudaErrorInvalidDevice;
    if (!text || length < 13) return cudaErrorInvalidValue;
    std::snprintf(text, static_cast<size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(bus_of(index)));
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer", no_context, [&] {
    if (!runtime().device(device) || !runtime().device(peer)) return cudaErrorInvalidDevice;
    *can = device != peer && runtime().peers;
    return cudaSuccess;
  });
}
