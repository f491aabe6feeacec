// SPDX-License-Identifier: Apache-2.0
// Implements the runtime's events.
#include <cuda_runtime_api.h>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"

using namespace simulated;  // NOLINT: the functions below are C's

namespace {

constexpr unsigned known_flags =
    cudaEventBlockingSync | cudaEventDisableTiming;  // cudaEventInterprocess is not simulated

cudaError_t create(cudaEvent_t *event, unsigned flags) {
  if (!event) return cudaErrorInvalidValue;
  if (flags & ~known_flags) return (flags & cudaEventInterprocess) ? cudaErrorNotSupported : cudaErrorInvalidValue;
  *event = runtime().events.create(runtime().current(), !(flags & cudaEventDisableTiming)).first;
  return cudaSuccess;
}

cudaError_t record(cudaEvent_t handle, cudaStream_t stream_handle) {
  Event *event = runtime().event(handle);
  Stream *stream = runtime().stream(stream_handle);
  if (!event || !stream) return cudaErrorInvalidResourceHandle;
  return record_event(*event, *stream);
}

cudaError_t finish_event(cudaEvent_t handle, bool wait) {
  const Event *event = runtime().event(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  const Recorded recorded = event->recorded();
  if (const cudaError_t error = refuse_captured(recorded)) return error;
  if (const cudaError_t error = refuse_unsafe_call()) return error;
  if (recorded.work && wait) recorded.work->wait();
  const bool done = !recorded.work || recorded.work->done();
  if (const cudaError_t error = event->device.error()) return error;
  return done ? cudaSuccess : cudaErrorNotReady;
}

// For an event that is done, the answer is known without asking the device.
cudaError_t query(cudaEvent_t handle) {
  const Event *event = runtime().event(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  const Recorded recorded = event->recorded();
  if (recorded.capture || (recorded.work && !recorded.work->done())) return finish_event(handle, false);
  return refuse_unsafe_call();
}

cudaError_t elapsed(float *ms, const Event &start, const Event &end) {
  const Recorded first = start.recorded(), second = end.recorded();
  if (const cudaError_t error = refuse_captured(first)) return error;
  if (const cudaError_t error = refuse_captured(second)) return error;
  if (!start.timing || !end.timing || &start.device != &end.device || !first.work || !second.work) {
    return cudaErrorInvalidResourceHandle;
  }
  if (!first.work->done() || !second.work->done()) return cudaErrorNotReady;
  *ms = std::chrono::duration<float, std::milli>(second.work->end - first.work->end).count();
  return cudaSuccess;
}

}  // namespace

cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t *event) {
  return call("cudaEventCreate", healthy_device, [&] { return create(event, cudaEventDefault); });
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  return call("cudaEventCreateWithFlags", healthy_device, [&] { return create(event, flags); });
}

cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  return call("cudaEventDestroy", healthy_device, [&] {
    if (!runtime().event(event)) return cudaErrorInvalidResourceHandle;
    runtime().events.remove(event);
    return cudaSuccess;
  });
}

cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call("cudaEventRecord", healthy_device, [&] { return record(event, stream); });
}

cudaError_t CUDARTAPI cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return call("cudaEventRecordWithFlags", healthy_device, [&] {
    if (flags == cudaEventRecordExternal) return cudaErrorNotSupported;  // not simulated
    return flags == cudaEventRecordDefault ? record(event, stream) : cudaErrorInvalidValue;
  });
}

cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  return call("cudaEventQuery", any_device, [&] { return query(event); });
}

cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  return call("cudaEventSynchronize", healthy_device, [&] { return finish_event(event, true); });
}

cudaError_t CUDARTAPI cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end) {
  return call("cudaEventElapsedTime", healthy_device, [&] {
    const Event *first = runtime().event(start), *second = runtime().event(end);
    if (!first || !second) return cudaErrorInvalidResourceHandle;
    return ms ? elapsed(ms, *first, *second) : cudaErrorInvalidValue;
  });
}
