// SPDX-License-Identifier: Apache-2.0
// Implements the runtime's streams.
#include <cuda_runtime_api.h>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"

using namespace simulated;  // NOLINT: the functions below are C's

namespace {

constexpr int greatest_priority = -5;

cudaError_t create(cudaStream_t *stream, unsigned flags, int priority) {
  if (!stream || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
  auto [handle, created] = runtime().create_stream(runtime().current(), flags != cudaStreamNonBlocking);
  created->flags = flags;
  created->maker = this_thread().number;
  created->priority = std::min(0, std::max(greatest_priority, priority));  // clamped, as documented
  *stream = handle;
  return cudaSuccess;
}

cudaError_t finished(const std::vector<Work *> &works, bool wait) {
  for (const Work *work : works) {
    if (wait) work->wait();
    if (!work->done()) return cudaErrorNotReady;
  }
  return cudaSuccess;
}

cudaError_t finish_stream(cudaStream_t handle, bool wait) {
  Stream *stream = runtime().stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (const cudaError_t error = refuse_capture(*stream)) return error;
  const cudaError_t result = finished(outstanding(*stream), wait);
  if (const cudaError_t error = stream->device.error()) return error;
  return result;
}

}  // namespace

cudaError_t CUDARTAPI cudaStreamCreate(cudaStream_t *stream) {
  return call("cudaStreamCreate", no_capture, [&] { return create(stream, cudaStreamDefault, 0); });
}

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  return call("cudaStreamCreateWithFlags", no_capture, [&] { return create(stream, flags, 0); });
}

cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return call("cudaStreamCreateWithPriority", no_capture, [&] { return create(stream, flags, priority); });
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  return call("cudaDeviceGetStreamPriorityRange", healthy_device, [&] {
    if (least) *least = 0;
    if (greatest) *greatest = greatest_priority;
    return cudaSuccess;
  });
}

// Returns at once. The queued work is still done.
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t handle) {
  return call("cudaStreamDestroy", healthy_device, [&] {
    if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
      return cudaErrorInvalidResourceHandle;
    }
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (const cudaError_t error = refuse_capture(*stream)) return error;
    runtime().streams.remove(handle);
    stream->close();
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaStreamQuery(cudaStream_t stream) {
  return call("cudaStreamQuery", no_capture, [&] { return finish_stream(stream, false); });
}

cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  return call("cudaStreamSynchronize", no_capture, [&] { return finish_stream(stream, true); });
}

cudaError_t CUDARTAPI cudaStreamGetFlags(cudaStream_t handle, unsigned *flags) {
  return call("cudaStreamGetFlags", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *flags = stream->flags;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaStreamGetPriority(cudaStream_t handle, int *priority) {
  return call("cudaStreamGetPriority", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *priority = stream->priority;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaStreamGetDevice(cudaStream_t handle, int *device) {
  return call("cudaStreamGetDevice", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *device = stream->device.index;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaStreamGetId(cudaStream_t handle, unsigned long long *id) {
  return call("cudaStreamGetId", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *id = stream->number;
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags) {
  return call("cudaStreamWaitEvent", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    const Event *event = runtime().event(event_handle);
    if (!stream || !event) return cudaErrorInvalidResourceHandle;
    if (flags == cudaEventWaitExternal) return cudaErrorNotSupported;  // not simulated
    if (flags != cudaEventWaitDefault) return cudaErrorInvalidValue;
    return wait_event(*stream, *event);
  });
}

// The host function may not call CUDA, so every CUDA call in it returns cudaErrorNotPermitted.
cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data) {
  return call("cudaLaunchHostFunc", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (!function) return cudaErrorInvalidValue;
    const auto run = [function, data] {
      this_thread().in_host_function = true;
      function(data);
      this_thread().in_host_function = false;
    };
    return submit(*stream, run, cudaGraphNodeTypeHost);
  });
}
