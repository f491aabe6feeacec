// SPDX-License-Identifier: Apache-2.0
// The library's own streams.
#include <chrono>
#include <thread>

#include "device/cuda/kernels.h"
#include "device/cuda/stream.h"

namespace fsdp::device::cuda {
namespace {

cudaStream_t create(Core &core, const std::string &name) {
  const QuietScope scope(core);
  int lowest = 0, highest = 0;
  core.check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange", name);
  cudaStream_t stream = nullptr;
  core.check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority",
             name);
  return stream;
}

}  // namespace

LibraryStream::LibraryStream(Core &core, const std::string &name)
    : CudaStream(core, nullptr, "stream '" + name + "'", true),
      scratch_(core, "scratch of a stream's kernels"),
      last_(core),
      delay_(core.options, name) {
  stream_ = create(core, name_);
  core.add(*this);
  ++core.streams;
}

// CUDA may wait for a stream that is not done.
LibraryStream::~LibraryStream() {
  core_.remove(*this);
  --core_.streams;
  const bool captured = core_.is_captured(stream_), marked = !captured && mark();
  const Remnant remnant{Remnant::stream, stream_};
  if (captured || (!marked && !is_known_to_be_done()))
    core_.lose_track(stream_);
  else if (!marked || await_last(last_, core_))
    core_.end(remnant);
  else
    core_.give_back(remnant);
}

// While an earlier mark of a GPU that seems stuck is not reached there is no use in another one; the stream's queue
// might be full in the end, where CUDA waits.
bool LibraryStream::mark() noexcept {
  if (core_.patience_ms() == 0 && !last_.done()) return true;
  try {
    const DeviceScope scope(core_);
    if (capture_id() == 0) last_.record(stream_, 0, name_);
    return true;
  } catch (const Error &) {
    return false;
  }
}

// Where no event could be put behind its work.
bool LibraryStream::is_known_to_be_done() noexcept {
  const QuietScope scope(core_, std::nothrow);
  if (!scope) return false;
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(core_.patience_ms());
  cudaError_t code = cudaStreamQuery(stream_);
  for (; code == cudaErrorNotReady && std::chrono::steady_clock::now() < end; code = cudaStreamQuery(stream_))
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  core_.check.note(code, "cudaStreamQuery", name_);
  return code == cudaSuccess;
}

void LibraryStream::load_kernels() {
  const char *const what = "loading the library's kernels";
  const QuietScope scope(core_);
  core_.check(static_cast<cudaError_t>(kernels::prepare(stream_, scratch_.data())), "a kernel", what);
  last_.record(stream_, 0, what);
  await_event(last_, core_, core_.waiter);
}

// What communicators enqueue past this class is done with the record behind it.
void LibraryStream::record(Event &event) {
  CudaStream::record(event);
  const DeviceScope scope(core_);
  after();
}

void LibraryStream::before() {
  if (core_.options.delay_us == 0) return;
  forget_word();
  core_.check(static_cast<cudaError_t>(kernels::delay(stream_, static_cast<uint32_t>(delay_.next_us()))),
              "kernel delay", name_);
}

void LibraryStream::after() {
  if (core_.options.overlap || capture_id() != 0) return;
  last_.record(stream_, 0, name_);
  await_event(last_, core_, core_.waiter);
}

void LibraryStream::sum_squares_in(std::span<const SquaresSpan> spans) { launch_sum_squares(spans, scratch_.data()); }

}  // namespace fsdp::device::cuda
