// SPDX-License-Identifier: Apache-2.0
// Implements the copies and fills of the runtime. They return as "API synchronization behavior" in the manual of CUDA's
// runtime says.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <mutex>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"

using namespace simulated;  // NOLINT: the functions below are C's

namespace {

struct Copy {
  char *to;
  size_t to_pitch;
  const char *from;
  size_t from_pitch;
  size_t width, height;

  size_t to_bytes() const { return (height - 1) * to_pitch + width; }
  size_t from_bytes() const { return (height - 1) * from_pitch + width; }
  void run() const {
    if (to_bytes() == width * height && from_bytes() == width * height) {
      std::memmove(to, from, width * height);
      return;
    }
    for (size_t row = 0; row < height; ++row) std::memcpy(to + row * to_pitch, from + row * from_pitch, width);
  }
};

// Returns whether the caller's direction fits the addresses. A page-locked address counts as an address of the host and
// of the device.
bool fits(cudaMemcpyKind kind, const Place &to, const Place &from) {
  const auto host = [](const Place &place) { return place.kind != Place::device; };
  const auto device = [](const Place &place) { return place.kind != Place::pageable; };
  switch (kind) {
    case cudaMemcpyHostToHost: return host(to) && host(from);
    case cudaMemcpyHostToDevice: return device(to) && host(from);
    case cudaMemcpyDeviceToHost: return host(to) && device(from);
    case cudaMemcpyDeviceToDevice: return device(to) && device(from);
    case cudaMemcpyDefault: return true;
  }
  return false;
}

// If memory was freed after the call, the copy is an illegal access.
bool alive(const Copy &copy) {
  const Memory &memory = runtime().memory;
  return memory.find(copy.to, copy.to_bytes()).inside && memory.find(copy.from, copy.from_bytes()).inside;
}

std::function<void()> piece(const Copy &copy) {
  return [copy] {
    if (alive(copy)) {
      copy.run();
    } else {
      fail_device_of_this_stream(cudaErrorIllegalAddress);
    }
  };
}

// Reads the source now and writes the destination later. So the caller may change the source, but cannot rely on the
// destination yet.
std::function<void()> staged(const Copy &copy) {
  auto bytes = std::make_shared<std::vector<char>>(copy.from, copy.from + copy.from_bytes());
  return [copy, bytes] {
    Copy late = copy;
    late.from = bytes->data();
    if (runtime().memory.find(late.to, late.to_bytes()).inside) {
      late.run();
    } else {
      fail_device_of_this_stream(cudaErrorIllegalAddress);
    }
  };
}

enum class Returns { at_once, when_done };

struct Way {
  bool through_staging = false;
  Returns returns = Returns::at_once;
};

Way way_of(const Place &to, const Place &from, bool synchronous) {
  const bool to_device = to.kind == Place::device, from_device = from.kind == Place::device;
  if (to_device && from_device) return {};  // cudaMemcpy does not wait for it either
  if (!to_device && !from_device) return {false, Returns::when_done};
  if (to_device && from.kind == Place::pageable) return {true, Returns::at_once};
  if (from_device && to.kind == Place::pageable) return {false, Returns::when_done};
  return {false, synchronous ? Returns::when_done : Returns::at_once};
}

bool hides_work(const Place &to, const Place &from) {
  return (to.kind == Place::device && from.kind == Place::pageable) ||
         (from.kind == Place::device && to.kind == Place::pageable);
}

// The driver copies pageable memory through its own buffers, one copy of the process at a time. A copy that waits for
// its stream delays all other copies. These include copies of streams that it waits for (seen on an H100, driver
// 580.159).
std::unique_lock<std::mutex> take_driver_buffer(bool pageable) {
  static std::mutex buffer;
  return pageable ? std::unique_lock(buffer) : std::unique_lock<std::mutex>();
}

cudaError_t enqueue_copy(Stream &stream, const Copy &copy, Way way, bool pageable, bool capturing) {
  const auto buffer = take_driver_buffer(pageable && !capturing);
  Work *work = nullptr;
  const cudaError_t error =
      submit(stream, way.through_staging ? staged(copy) : piece(copy), cudaGraphNodeTypeMemcpy, {}, &work);
  if (error != cudaSuccess || capturing || way.returns == Returns::at_once) return error;
  work->wait();
  return stream.device.error();
}

cudaError_t copy_on(cudaStream_t handle, const Copy &copy, cudaMemcpyKind kind, bool synchronous) {
  Stream *stream = runtime().stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  if (copy.width > copy.to_pitch || copy.width > copy.from_pitch) return cudaErrorInvalidValue;
  const Place to = runtime().memory.find(copy.to, copy.to_bytes());
  const Place from = runtime().memory.find(copy.from, copy.from_bytes());
  if (!copy.to || !copy.from || !to.inside || !from.inside) return cudaErrorInvalidValue;
  if (!fits(kind, to, from)) return cudaErrorInvalidMemcpyDirection;
  const bool capturing = is_capturing(*stream);
  const bool pageable = hides_work(to, from);
  if (pageable) {
    ++runtime().pageable_copies;
    if (capturing) return refuse_capture(*stream);
  }
  if (const cudaError_t error = synchronous ? refuse_capture(*stream) : cudaSuccess) return error;
  return enqueue_copy(*stream, copy, way_of(to, from, synchronous), pageable, capturing);
}

Copy row(void *to, const void *from, size_t bytes) {
  return {static_cast<char *>(to), bytes, static_cast<const char *>(from), bytes, bytes, 1};
}

cudaError_t fill_on(cudaStream_t handle, void *to, int value, size_t bytes) {
  Stream *stream = runtime().stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const Place place = runtime().memory.find(to, bytes);
  if (place.kind == Place::pageable || !place.inside) return cudaErrorInvalidValue;
  const auto run = [to, value, bytes] {
    if (runtime().memory.find(to, bytes).inside) {
      std::memset(to, value, bytes);
    } else {
      fail_device_of_this_stream(cudaErrorIllegalAddress);
    }
  };
  return submit(*stream, run, cudaGraphNodeTypeMemset);
}

}  // namespace

cudaError_t CUDARTAPI cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
  return call("cudaMemcpyAsync", healthy_device, [&] { return copy_on(stream, row(to, from, bytes), kind, false); });
}

cudaError_t CUDARTAPI cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                        size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return call("cudaMemcpy2DAsync", healthy_device, [&] {
    const Copy copy{static_cast<char *>(to), to_pitch, static_cast<const char *>(from), from_pitch, width, height};
    return copy_on(stream, copy, kind, false);
  });
}

cudaError_t CUDARTAPI cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                          cudaStream_t stream) {
  return call("cudaMemcpyPeerAsync", healthy_device, [&] {
    if (!runtime().device(to_device) || !runtime().device(from_device)) return cudaErrorInvalidDevice;
    return copy_on(stream, row(to, from, bytes), cudaMemcpyDeviceToDevice, false);
  });
}

cudaError_t CUDARTAPI cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", no_capture, [&] { return copy_on(cudaStreamLegacy, row(to, from, bytes), kind, true); });
}

cudaError_t CUDARTAPI cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", healthy_device, [&] { return fill_on(stream, to, value, bytes); });
}

// The call does not wait for the fill, like the real call on device memory.
cudaError_t CUDARTAPI cudaMemset(void *to, int value, size_t bytes) {
  return call("cudaMemset", no_capture, [&] { return fill_on(cudaStreamLegacy, to, value, bytes); });
}
