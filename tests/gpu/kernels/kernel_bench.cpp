// SPDX-License-Identifier: Apache-2.0
// How fast the CUDA kernels move bytes on a GPU, beside a device-to-device copy of the same run. usage: kernel_bench
// [MILLIONS] (of elements, 256 if not given). Each line: the traffic in bytes per element, GB/s as the median of 15
// runs, and the ratio to the copy, which reads and writes. The last line is target 17: AdamW at 0.90 of the copy or
// more.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "device/cuda/kernels.h"

namespace {

using namespace fsdp::device;
namespace kernels = cuda::kernels;

void check(int error, const char *what) {
  if (error == 0) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

class Timer {
 public:
  Timer() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  cudaStream_t stream() const { return stream_; }

  // Seconds, the median of 15 after 3 to warm up.
  double median(const std::function<int()> &work) {
    std::vector<float> times;
    for (int i = 0; i < 18; ++i) {
      check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      check(work(), "launch");
      check(cudaEventRecord(end_, stream_), "cudaEventRecord");
      check(cudaEventSynchronize(end_), "cudaEventSynchronize");
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
      if (i >= 3) times.push_back(milliseconds);
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2] * 1e-3;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

template <class T>
T *allocate(uint64_t count) {
  void *memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T *>(memory);
}

struct Bench {
  uint64_t count;
  Timer timer;
  double copy = 0;  // GB/s
  float *a = allocate<float>(count), *b = allocate<float>(count), *c = allocate<float>(count),
        *d = allocate<float>(count);
  uint16_t *narrow = allocate<uint16_t>(count);
  double *result = allocate<double>(1);
  void *scratch = allocate<std::byte>(kernels::scratch_bytes);

  double line(const char *name, double bytes_per_element, const std::function<int()> &work) {
    const double speed = static_cast<double>(count) * bytes_per_element / timer.median(work) * 1e-9;
    if (copy == 0) copy = speed;
    std::printf("%-34s %5.1f bytes/element %8.1f GB/s %6.3f of the copy\n", name, bytes_per_element, speed,
                speed / copy);
    return speed / copy;
  }

  RankSum sum(uint32_t ranks, fsdp_dtype source, bool accumulate) {
    const bool wide = source == FSDP_FLOAT32;
    const uint64_t part = ranks == 1 ? count : count / ranks;
    const auto *const base =
        wide ? reinterpret_cast<const std::byte *>(a) : reinterpret_cast<const std::byte *>(narrow);
    return {base, part * (wide ? 4 : 2), ranks, source, source, b, part, 0.5f, accumulate};
  }

  // The arrays cut into equal spans.
  std::vector<AdamWSpan> spans(uint64_t number) {
    std::vector<AdamWSpan> spans;
    const uint64_t part = count / number / 128 * 128;
    for (uint64_t s = 0; s < number; ++s) {
      const uint64_t at = s * part;
      spans.push_back(
          {a + at, b + at, c + at, d + at, narrow + at, FSDP_BFLOAT16, s + 1 == number ? count - at : part});
    }
    return spans;
  }
};

double run(Bench &bench) {
  auto *const stream = bench.timer.stream();
  const uint64_t n = bench.count;
  auto *const a = bench.a, *const b = bench.b;
  auto *const narrow = bench.narrow;
  bench.line("copy (cudaMemcpyAsync)", 8,
             [&] { return cudaMemcpyAsync(a, b, n * 4, cudaMemcpyDeviceToDevice, stream); });
  bench.line("cast fp32 to bf16", 6, [&] { return kernels::cast(stream, narrow, FSDP_BFLOAT16, a, FSDP_FLOAT32, n); });
  bench.line("cast fp32 to fp16", 6, [&] { return kernels::cast(stream, narrow, FSDP_FLOAT16, a, FSDP_FLOAT32, n); });
  bench.line("cast bf16 to fp32", 6, [&] { return kernels::cast(stream, a, FSDP_FLOAT32, narrow, FSDP_BFLOAT16, n); });
  bench.line("cast at odd addresses", 6,
             [&] { return kernels::cast(stream, narrow + 1, FSDP_BFLOAT16, a + 2, FSDP_FLOAT32, n - 4); });
  bench.line("add bf16 to fp32", 10, [&] { return kernels::add(stream, a, FSDP_FLOAT32, narrow, FSDP_BFLOAT16, n); });
  bench.line("scale", 8, [&] { return kernels::scale(stream, a, 0.5f, n); });
  bench.line("rank_sum of 1, fp32", 8, [&] { return kernels::rank_sum(stream, bench.sum(1, FSDP_FLOAT32, false)); });
  bench.line("rank_sum of 1, bf16, accumulate", 10,
             [&] { return kernels::rank_sum(stream, bench.sum(1, FSDP_BFLOAT16, true)); });
  bench.line("rank_sum of 8, fp32", 4.5, [&] { return kernels::rank_sum(stream, bench.sum(8, FSDP_FLOAT32, false)); });
  bench.line("rank_sum of 8, bf16", 2.5, [&] { return kernels::rank_sum(stream, bench.sum(8, FSDP_BFLOAT16, false)); });
  for (const uint64_t granule : {0, 1024, 4096, 14336})
    bench.line(("sum_squares, granule " + std::to_string(granule)).c_str(), 4,
               [&] { return kernels::sum_squares(stream, bench.result, a, n, granule, bench.scratch); });
  bench.line("count_nonfinite", 4,
             [&] { return kernels::count_nonfinite(stream, reinterpret_cast<uint64_t *>(bench.result), a, n); });
  const AdamW step{1e-3f, average_of(0.9), average_of(0.999), 1e-8f, 0.1f, 0.5f, 0.5f, 1, 0};
  bench.line("adamw, 1000 spans, bf16 copy", 30, [&] { return kernels::adamw(stream, step, bench.spans(1000)); });
  return bench.line("adamw, 1 span, bf16 copy", 30, [&] { return kernels::adamw(stream, step, bench.spans(1)); });
}

}  // namespace

int main(int argc, char **argv) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU: %s\n", error != cudaSuccess ? cudaGetErrorString(error) : "the driver reports none");
    return 77;
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Bench bench{(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 256) << 20, {}};
  std::printf("%s, %d multiprocessors, %.0f million elements\n", properties.name, properties.multiProcessorCount,
              static_cast<double>(bench.count) * 1e-6);
  const double ratio = run(bench);
  std::printf("target 17, AdamW at 0.90 of the copy: %.3f, %s\n", ratio, ratio >= 0.9 ? "met" : "missed");
  return 0;
}
