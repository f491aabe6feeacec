// SPDX-License-Identifier: Apache-2.0
// Measures what it costs to mark a point in a GPU's stream: an event of CUDA, a word that the stream writes to pinned
// host memory, and an event of the library. The library's event has both, or shares the word of an earlier event. For
// comparison it also measures a wait for an event, and a kernel, which should cost much more. Each is measured on an
// idle stream, and on a busy one on which no enqueued work runs meanwhile.
//
//   host     microseconds that a call takes on the calling thread
//   stream   microseconds by which each makes the stream's work longer
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "device/cuda/driver.h"
#include "device/device.h"

namespace {

using namespace fsdp;
using Clock = std::chrono::steady_clock;

constexpr int marks = 200;  // CUDA keeps about a thousand pieces of work a stream; with more, the host would wait
constexpr uint64_t busy_bytes = uint64_t{1} << 30;
constexpr int fills = 20;  // they take some milliseconds

void check(int error, const char *what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

struct Cost {
  double host_us, stream_us;
};

class Bench {
 public:
  Bench()
      : waiter_(failure_, nullptr, nullptr, 20'000),
        device_(device::create_cuda_device(0, {}, waiter_, failure_)),
        driver_(device::cuda::Checker(failure_)),
        stream_(device_->create_stream("measured")),
        other_(device_->create_stream("other")),
        event_(device_->create_event()),
        others_(device_->create_event()),
        busy_(device_->allocate(busy_bytes, "what keeps a stream busy")) {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    check(cudaEventCreateWithFlags(&plain_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    check(cudaHostAlloc(&word_, 64, cudaHostAllocDefault), "cudaHostAlloc");
  }

  void run() {
    line("cudaEventRecord", [&] { check(cudaEventRecord(plain_, raw()), "cudaEventRecord"); });
    line("cuStreamWriteValue32", [&] {
      check(driver_.stream_write_value(raw(), reinterpret_cast<CUdeviceptr>(word_), 1, CU_STREAM_WRITE_VALUE_DEFAULT),
            "cuStreamWriteValue32");
    });
    line("the library's event, behind work", [&] {
      (void)stream_->handle();  // as if another thread enqueued something
      stream_->record(*event_);
    });
    line("... behind another one", [&] { stream_->record(*event_); });
    line("record, and wait for it elsewhere", [&] {
      (void)other_->handle();
      other_->record(*others_);
      stream_->wait(*others_);
    });
    line("kernel of 128 numbers", [&] { stream_->scale(reinterpret_cast<float *>(busy_->data()), 1, 128); });
  }

 private:
  cudaStream_t raw() const { return static_cast<cudaStream_t>(stream_->handle()); }

  void line(const char *name, const std::function<void()> &mark) {
    const Cost idle = median(mark, false), busy = median(mark, true);
    std::printf("%-34s %8.2f %8.2f %12.2f %8.2f\n", name, idle.host_us, idle.stream_us, busy.host_us, busy.stream_us);
  }

  Cost median(const std::function<void()> &mark, bool busy) {
    std::vector<double> host, stream;
    for (int i = 0; i < 11; ++i) {
      const Cost cost = measure(mark, busy);
      host.push_back(cost.host_us);
      stream.push_back(cost.stream_us);
    }
    std::sort(host.begin(), host.end());
    std::sort(stream.begin(), stream.end());
    return {host[host.size() / 2], stream[stream.size() / 2]};
  }

  Cost measure(const std::function<void()> &mark, bool busy) {
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int i = 0; busy && i < fills; ++i) {
      other_->fill(busy_->data(), 0, busy_bytes);
      stream_->fill(busy_->data(), 0, busy_bytes);
    }
    check(cudaEventRecord(begin_, raw()), "cudaEventRecord");
    const auto start = Clock::now();
    for (int i = 0; i < marks; ++i) mark();
    const std::chrono::duration<double, std::micro> host = Clock::now() - start;
    check(cudaEventRecord(end_, raw()), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return {host.count() / marks, 1e3 * static_cast<double>(milliseconds) / marks};
  }

  Failure failure_;
  Waiter waiter_;
  std::unique_ptr<device::Device> device_;
  device::cuda::Driver driver_;
  std::unique_ptr<device::Stream> stream_, other_;
  std::unique_ptr<device::Event> event_, others_;
  std::unique_ptr<device::Memory> busy_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr, plain_ = nullptr;
  void *word_ = nullptr;
};

}  // namespace

int main() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU: %s\n", error != cudaSuccess ? cudaGetErrorString(error) : "the driver reports none");
    return 77;
  }
  std::printf("%-34s %8s %8s %12s %8s\n", "microseconds", "host", "stream", "host, busy", "stream");
  Bench().run();
  return 0;
}
