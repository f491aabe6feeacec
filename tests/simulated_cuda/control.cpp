// SPDX-License-Identifier: Apache-2.0
// Implements simulated.h.
#include "simulated_cuda/simulated.h"

#include <algorithm>
#include <utility>

#include "simulated_cuda/call.h"
#include "simulated_cuda/capture.h"

namespace simulated {
namespace {

// Returns whether a test wants this kernel to fail.
bool is_faulty() {
  std::atomic<uint64_t> &left = runtime().faulty_kernel;
  uint64_t count = left.load();
  while (count > 0 && !left.compare_exchange_weak(count, count - 1)) {
  }
  return count == 1;
}

void run_faulty() { fail_device(static_cast<cudaError_t>(runtime().kernel_fault.load())); }

}  // namespace

void reset() { runtime().reset(); }
void set_device_count(int count) { runtime().set_devices(std::clamp(count, 0, max_devices)); }
void set_queues(uint64_t count) { runtime().set_queues(count); }
void set_fair_queues(bool fair) { runtime().fair_queues = fair; }
void set_device_memory(uint64_t bytes) { runtime().set_memory(bytes); }
void set_fabric(bool allowed) { runtime().fabric = allowed; }
void set_files(bool allowed) { runtime().files = allowed; }
void set_compute_capability(int major) { runtime().capability = major; }
void set_slices(int of_gpu) { runtime().slices = std::max(1, of_gpu); }
void set_peers(bool peers) { runtime().peers = peers; }
void set_strict(bool strict) { runtime().strict = strict; }

void set_delay(uint32_t longest_us, uint64_t seed) {
  runtime().timing.seed = seed;
  runtime().timing.longest_us = longest_us;
}

void set_word_cost(uint32_t ns) { runtime().timing.word_ns = ns; }

void set_stream_room(uint64_t pieces) { runtime().stream_room = pieces; }

void set_stream_delay(cudaStream_t handle, uint32_t us) {
  if (Stream *stream = runtime().streams.find(handle)) stream->delay_us = us;
}

bool waits(cudaStream_t handle) {
  const Stream *stream = runtime().stream(handle);
  return stream && stream->waits.load(std::memory_order_relaxed);
}

std::vector<cudaStream_t> streams_of_this_thread() {
  const uint64_t maker = this_thread().number;
  std::vector<std::pair<uint64_t, cudaStream_t>> found;
  runtime().streams.for_each([&](cudaStream_t handle, const Stream &stream) {
    if (stream.maker == maker) found.emplace_back(stream.number, handle);
  });
  std::sort(found.begin(), found.end());
  std::vector<cudaStream_t> handles;
  for (const auto &[number, handle] : found) handles.push_back(handle);
  return handles;
}

Hold::Hold() { ++runtime().timing.holds; }

Hold::~Hold() {
  --runtime().timing.holds;
  futex_wake_all(runtime().timing.holds);
}

void fail_call(const char *name, uint64_t nth, int error) { runtime().calls.plan(name, nth, error); }

void fail_kernel(uint64_t nth, cudaError_t error) {
  runtime().kernel_fault = error;
  runtime().faulty_kernel = nth;
}

void fail_device(cudaError_t error) { fail_device_of_this_stream(error); }

uint64_t calls(const char *name) { return runtime().calls.counted(name); }
void reset_calls() { runtime().calls.forget_counts(); }
uint64_t kernels() { return runtime().kernels; }
uint64_t pageable_copies() { return runtime().pageable_copies; }

uint64_t allocated_bytes() {
  uint64_t bytes = 0;
  for (int index = 0; index < runtime().device_count(); ++index) bytes += runtime().device(index)->allocated;
  return bytes;
}

uint64_t pinned_bytes() { return runtime().memory.pinned_bytes(); }

uint64_t live_handles() {
  uint64_t count = 0;
  runtime().events.for_each_live([&](const Event &) { ++count; });
  runtime().streams.for_each_live([&](const Stream &stream) { count += stream.flags == cudaStreamNonBlocking; });
  return count;
}

uint64_t foreign_calls() { return runtime().foreign_calls; }
uint64_t implicit_contexts() { return runtime().implicit_contexts; }

bool is_device(const void *pointer, size_t bytes) {
  const Place place = runtime().memory.find(pointer, bytes);
  return place.kind == Place::device && place.inside;
}

bool is_pinned(const void *pointer, size_t bytes) {
  const Place place = runtime().memory.find(pointer, bytes);
  return place.kind == Place::pinned && place.inside;
}

bool share_queue(cudaStream_t one, cudaStream_t other) {
  const Stream *first = runtime().streams.find(one), *second = runtime().streams.find(other);
  return first && second && first->queue() && first->queue() == second->queue();
}

int device_of(const void *pointer) {
  const Place place = runtime().memory.find(pointer, 1);
  return place.kind == Place::device && place.inside ? place.device_index : -1;
}

// As in a real launch, the stream must belong to the calling thread's current device.
cudaError_t enqueue(cudaStream_t handle, std::function<void()> kernel) {
  return call("cudaLaunchKernel", healthy_device, [&] {
    Stream *stream = runtime().stream(handle);
    if (!stream || &stream->device != &runtime().current()) return cudaErrorInvalidResourceHandle;
    ++runtime().kernels;
    return submit(*stream, is_faulty() ? run_faulty : std::move(kernel));
  });
}

}  // namespace simulated
