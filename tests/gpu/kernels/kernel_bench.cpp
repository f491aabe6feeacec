// SPDX-License-Identifier: Apache-2.0
// Measures how fast the CUDA kernels move bytes on a GPU, beside a device-to-device copy of the same run. usage:
// kernel_bench [MILLIONS] (of elements, 256 if not given; a multiple of 32). Each line has the traffic in bytes per
// element, GB/s as the median of 15 runs, and the ratio to the copy, which reads and writes. The last line is target
// 17: AdamW at 0.90 of the copy or more.
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

  // Returns seconds: the median of 15 runs, after 3 to warm up.
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

  // Cuts the arrays into equal spans.
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

// Treats all elements as matrices of one size. Their codes and scales are in the other arrays.
class Matrices {
 public:
  Matrices(const Bench &bench, uint64_t number)
      : bench_(bench), number_(number), size_(bench.count / number), columns_(number == 1 ? 16384 : 4096) {}

  std::vector<Mxfp8Quantize> mxfp8(bool via_bf16) const {
    return make<Mxfp8Quantize>([&](uint64_t at) {
      return Mxfp8Quantize{bench_.a + at,       size_ / columns_, columns_,
                           ScaleRule::round_up, via_bf16,         codes() + at,
                           scales() + at / 32,  columns() + at,   scales() + (bench_.count + at) / 32};
    });
  }
  std::vector<Fp8BlockQuantize> blocks(bool via_bf16) const {
    return make<Fp8BlockQuantize>([&](uint64_t at) {
      return Fp8BlockQuantize{bench_.a + at, size_ / columns_,    columns_, false, via_bf16,
                              codes() + at,  bench_.d + at / 4096};
    });
  }
  std::vector<AmaxSpan> amaxes() const {
    return make<AmaxSpan>([&](uint64_t at) { return AmaxSpan{bench_.d + at / size_, bench_.a + at, size_, false}; });
  }
  std::vector<Fp8Quantize> whole() const {
    return make<Fp8Quantize>([&](uint64_t at) {
      return Fp8Quantize{bench_.a + at, size_, false, bench_.d + at / size_, codes() + at};
    });
  }
  uint64_t *counts() const { return reinterpret_cast<uint64_t *>(bench_.d + bench_.count / 2); }

  uint8_t *codes() const { return reinterpret_cast<uint8_t *>(bench_.c); }
  uint8_t *columns() const { return codes() + bench_.count; }
  uint8_t *scales() const { return codes() + 2 * bench_.count; }

 private:
  template <class Work, class Make>
  std::vector<Work> make(const Make &one) const {
    std::vector<Work> works;
    for (uint64_t i = 0; i < number_; ++i) works.push_back(one(i * size_));
    return works;
  }

  const Bench &bench_;
  const uint64_t number_, size_, columns_;
};

// Returns the bytes of an element and of its share of the scales. MXFP8 has two planes of codes, with a scale for 32 of
// them.
constexpr double mxfp8_bytes = 4 + 2 * (1 + 1 / 32.0), fp8_bytes = 4 + 1;

void quantize(Bench &bench, uint64_t number) {
  auto *const stream = bench.timer.stream();
  const Matrices matrices(bench, number);
  const std::string of = ", " + std::to_string(number) + (number == 1 ? " tensor" : " tensors");
  for (const bool via_bf16 : {false, true}) {
    const std::string by = of + (via_bf16 ? ", by bf16" : "");
    bench.line(("mxfp8" + by).c_str(), mxfp8_bytes,
               [&] { return kernels::quantize_mxfp8(stream, matrices.mxfp8(via_bf16), nullptr); });
    bench.line(("fp8 blocks" + by).c_str(), fp8_bytes,
               [&] { return kernels::quantize_fp8_blocks(stream, matrices.blocks(via_bf16), nullptr); });
  }
  bench.line(("mxfp8, counted" + of).c_str(), mxfp8_bytes,
             [&] { return kernels::quantize_mxfp8(stream, matrices.mxfp8(false), matrices.counts()); });
  bench.line(("fp8 blocks, counted" + of).c_str(), fp8_bytes,
             [&] { return kernels::quantize_fp8_blocks(stream, matrices.blocks(false), matrices.counts()); });
  bench.line(("find_amaxes" + of).c_str(), 4, [&] { return kernels::find_amaxes(stream, matrices.amaxes()); });
  bench.line(("fp8, one scale" + of).c_str(), fp8_bytes,
             [&] { return kernels::quantize_fp8(stream, matrices.whole()); });
}

void read_8_bits(Bench &bench) {
  auto *const stream = bench.timer.stream();
  const Matrices matrix(bench, 1);
  const uint64_t n = bench.count, columns = 16384;
  const uint8_t *const codes = matrix.codes(), *const scales = matrix.scales();
  bench.line("cast fp32 to e4m3", fp8_bytes,
             [&] { return kernels::cast_to_float8(stream, matrix.codes(), Float8::e4m3, bench.a, FSDP_FLOAT32, n); });
  bench.line("cast e4m3 to bf16", 3,
             [&] { return kernels::cast_from_float8(stream, bench.narrow, FSDP_BFLOAT16, codes, Float8::e4m3, n); });
  for (const Mxfp8Form form : {Mxfp8Form::row, Mxfp8Form::column})
    bench.line(form == Mxfp8Form::row ? "mxfp8 ROW to bf16" : "mxfp8 COL to bf16", 3 + 1 / 32.0, [&] {
      return kernels::dequantize_mxfp8(stream, bench.narrow, FSDP_BFLOAT16,
                                       {codes, scales, n / columns, columns, form});
    });
  bench.line("fp8, one scale, to bf16", 3, [&] {
    return kernels::dequantize_fp8(stream, bench.narrow, FSDP_BFLOAT16, {codes, n, bench.d});
  });
  bench.line("fp8 blocks to bf16", 3, [&] {
    return kernels::dequantize_fp8_blocks(stream, bench.narrow, FSDP_BFLOAT16, {codes, bench.d, n / columns, columns});
  });
  const Mxfp8Swizzle swizzle{scales, n / columns, columns / 32, Mxfp8Form::row, matrix.columns()};
  bench.line("swizzle_scales", 2 / 32.0, [&] { return kernels::swizzle_scales(stream, swizzle); });
}

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
  for (const uint64_t number : {1, 256}) quantize(bench, number);
  read_8_bits(bench);
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
