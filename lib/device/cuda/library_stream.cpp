// SPDX-License-Identifier: Apache-2.0
// The library's own streams.
#include "device/cuda/kernels.h"
#include "device/cuda/stream.h"

namespace fsdp::device::cuda {
namespace {

cudaStream_t create(Core &core, const std::string &name) {
  const DeviceScope scope(core);
  int lowest = 0, highest = 0;
  core.check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange", name);
  cudaStream_t stream = nullptr;
  core.check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority",
             name);
  return stream;
}

}  // namespace

LibraryStream::LibraryStream(Core &core, const std::string &name)
    : CudaStream(core, nullptr, "stream '" + name + "'"),
      scratch_(core, "scratch of a stream's kernels"),
      last_(core),
      delay_(core.options, name) {
  stream_ = create(core, name_);
  core.add(*this);
}

LibraryStream::~LibraryStream() {
  core_.remove(*this);
  core_.check.note(cudaStreamDestroy(stream_), "cudaStreamDestroy", name_);
}

// Bounded, and whatever became of the context: memory that its work uses is given back after it.
bool LibraryStream::drain() noexcept {
  try {
    const DeviceScope scope(core_);
    if (capture_id() == 0) last_.record(stream_, 0, name_);
    return await_last(last_, core_);
  } catch (const Error &) {
    return false;  // the GPU is lost, which the context knows
  }
}

// What communicators enqueue past this class is done with the record behind it.
void LibraryStream::record(Event &event) {
  CudaStream::record(event);
  const DeviceScope scope(core_);
  after();
}

void LibraryStream::before() {
  if (core_.options.delay_us == 0) return;
  core_.check(static_cast<cudaError_t>(kernels::delay(stream_, static_cast<uint32_t>(delay_.next_us()))),
              "kernel delay", name_);
}

void LibraryStream::after() {
  if (core_.options.overlap || capture_id() != 0) return;
  last_.record(stream_, 0, name_);
  await_event(last_, core_, core_.waiter);
}

void LibraryStream::sum_squares_in(double *result, const float *values, uint64_t count, uint64_t granule) {
  launch_sum_squares(result, values, count, granule, scratch_.data());
}

}  // namespace fsdp::device::cuda
