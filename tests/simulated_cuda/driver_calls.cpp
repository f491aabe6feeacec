// SPDX-License-Identifier: Apache-2.0
// Defines the table of driver functions, which code finds with cudaGetDriverEntryPoint, and the functions on streams,
// devices and errors.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"
#include "simulated_cuda/driver.h"

namespace simulated {
namespace {

// This is longer than any test takes. If a value is never written, the device fails and the test does not hang.
constexpr std::chrono::seconds longest_wait{120};

template <class Value>
bool satisfied(Value present, Value wanted, unsigned flags) {
  switch (flags & ~static_cast<unsigned>(CU_STREAM_WAIT_VALUE_FLUSH)) {
    case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<std::make_signed_t<Value>>(present - wanted) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return present == wanted;
    case CU_STREAM_WAIT_VALUE_AND: return (present & wanted) != 0;
    default: return static_cast<Value>(~(present | wanted)) != 0;
  }
}

template <class Value>
void wait_value(Value *address, Value wanted, unsigned flags) {
  const Clock::time_point end = Clock::now() + longest_wait;
  Stream &stream = *this_thread().stream;
  const Device &device = stream.device;
  for (int64_t pause = 10; !satisfied(std::atomic_ref(*address).load(std::memory_order_acquire), wanted, flags);
       pause = std::min<int64_t>(2 * pause, 160)) {
    if (!device.healthy()) return;
    if (Clock::now() > end) return fail_device_of_this_stream(cudaErrorLaunchTimeout);
    const StreamWait mark(stream.waits);
    std::this_thread::sleep_for(std::chrono::microseconds(pause));
  }
}

// Spins, because no sleep is short enough.
void spend(std::chrono::nanoseconds time) {
  const Clock::time_point end = Clock::now() + time;
  while (Clock::now() < end) {
  }
}

// The address must be memory of a device or page-locked memory of the host.
template <class Value>
bool usable(CUdeviceptr address) {
  const Place place = runtime().memory.find(reinterpret_cast<void *>(address), sizeof(Value));
  return place.kind != Place::pageable && place.inside && address % sizeof(Value) == 0;
}

template <class Value>
CUresult enqueue_value(CUstream handle, CUdeviceptr address, bool waits, std::function<void()> run) {
  Stream *stream = runtime().stream(handle);
  if (!stream || &stream->device != &runtime().current()) return CUDA_ERROR_INVALID_HANDLE;
  if (!usable<Value>(address)) return CUDA_ERROR_INVALID_VALUE;
  return static_cast<CUresult>(submit(*stream, std::move(run), cudaGraphNodeTypeKernel, {}, nullptr, waits));
}

template <class Value>
CUresult stream_wait(const char *name, CUstream stream, CUdeviceptr address, Value value, unsigned flags) {
  return driver_call(name, driver_healthy, [&] {
    if (flags & ~(3u | CU_STREAM_WAIT_VALUE_FLUSH)) return CUDA_ERROR_INVALID_VALUE;
    auto *word = reinterpret_cast<Value *>(address);
    return enqueue_value<Value>(stream, address, true, [word, value, flags] { wait_value(word, value, flags); });
  });
}

template <class Value>
CUresult stream_write(const char *name, CUstream stream, CUdeviceptr address, Value value, unsigned flags) {
  return driver_call(name, driver_healthy, [&] {
    if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) return CUDA_ERROR_INVALID_VALUE;
    auto *word = reinterpret_cast<Value *>(address);
    return enqueue_value<Value>(stream, address, false, [word, value] {
      spend(std::chrono::nanoseconds(runtime().timing.word_ns.load(std::memory_order_relaxed)));
      std::atomic_ref(*word).store(value, std::memory_order_release);
    });
  });
}

CUresult CUDAAPI wait_value_32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  return stream_wait<uint32_t>("cuStreamWaitValue32", stream, address, value, flags);
}

CUresult CUDAAPI wait_value_64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  return stream_wait<uint64_t>("cuStreamWaitValue64", stream, address, value, flags);
}

CUresult CUDAAPI write_value_32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
  return stream_write<uint32_t>("cuStreamWriteValue32", stream, address, value, flags);
}

CUresult CUDAAPI write_value_64(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  return stream_write<uint64_t>("cuStreamWriteValue64", stream, address, value, flags);
}

CUresult CUDAAPI device_get(CUdevice *device, int ordinal) {
  return driver_call("cuDeviceGet", nothing, [&] {
    if (!runtime().device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI device_get_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return driver_call("cuDeviceGetAttribute", nothing, [&] {
    if (!runtime().device(device)) return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
      case CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR: *value = 1; return CUDA_SUCCESS;
      case CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES:
      case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = 0; return CUDA_SUCCESS;
      // All other errors have the runtime's numbers.
      default:
        return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device));
    }
  });
}

CUresult CUDAAPI get_error_name(CUresult error, const char **text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI get_error_string(CUresult error, const char **text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

struct Entry {
  const char *name;
  unsigned since;  // the CUDA version of this signature
  void *function;
};

template <class Function>
void *pointer(Function *function) {
  return reinterpret_cast<void *>(function);
}

const Entry entries[] = {
    {"cuStreamWaitValue32", 8000, pointer(wait_value_32)},
    {"cuStreamWaitValue64", 9000, pointer(wait_value_64)},
    {"cuStreamWriteValue32", 8000, pointer(write_value_32)},
    {"cuStreamWriteValue64", 9000, pointer(write_value_64)},
    {"cuDeviceGet", 2000, pointer(device_get)},
    {"cuDeviceGetAttribute", 2000, pointer(device_get_attribute)},
    {"cuGetErrorName", 6000, pointer(get_error_name)},
    {"cuGetErrorString", 6000, pointer(get_error_string)},
    {"cuDevicePrimaryCtxRetain", 7000, pointer(primary_context_retain)},
    {"cuDevicePrimaryCtxRelease", 11000, pointer(primary_context_release)},
    {"cuCtxGetCurrent", 4000, pointer(context_get_current)},
    {"cuCtxSetCurrent", 4000, pointer(context_set_current)},
    {"cuCtxPushCurrent", 4000, pointer(context_push)},
    {"cuCtxPopCurrent", 4000, pointer(context_pop)},
    {"cuMemCreate", 10020, pointer(memory_create)},
    {"cuMemRelease", 10020, pointer(memory_release)},
    {"cuMemRetainAllocationHandle", 11000, pointer(retain_handle)},
    {"cuMemAddressReserve", 10020, pointer(address_reserve)},
    {"cuMemAddressFree", 10020, pointer(address_free)},
    {"cuMemMap", 10020, pointer(memory_map)},
    {"cuMemUnmap", 10020, pointer(memory_unmap)},
    {"cuMemSetAccess", 10020, pointer(memory_set_access)},
    {"cuMemGetAccess", 10020, pointer(memory_get_access)},
    {"cuMemGetAllocationGranularity", 10020, pointer(allocation_granularity)},
    {"cuMemExportToShareableHandle", 10020, pointer(export_handle)},
    {"cuMemImportFromShareableHandle", 10020, pointer(import_handle)},
};

// The table has base names without _v2, as the comment on cudaGetDriverEntryPointByVersion says.
cudaError_t entry_point(const char *name, void **function, unsigned version, cudaDriverEntryPointQueryResult *status) {
  if (!name || !function || version > CUDART_VERSION) return cudaErrorInvalidValue;
  *function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  for (const Entry &entry : entries) {
    if (std::strcmp(entry.name, name) != 0) continue;
    result = version < entry.since ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
    if (result == cudaDriverEntryPointSuccess) *function = entry.function;
  }
  if (status) *status = result;
  return cudaSuccess;
}

}  // namespace
}  // namespace simulated

cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                       unsigned long long, cudaDriverEntryPointQueryResult *status) {
  return simulated::call("cudaGetDriverEntryPointByVersion", simulated::nothing,
                         [&] { return simulated::entry_point(name, function, version, status); });
}

cudaError_t CUDARTAPI cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long,
                                              cudaDriverEntryPointQueryResult *status) {
  return simulated::call("cudaGetDriverEntryPoint", simulated::nothing,
                         [&] { return simulated::entry_point(name, function, CUDART_VERSION, status); });
}
