// SPDX-License-Identifier: Apache-2.0
// Measures how close the host kernels come to the memory's speed. Counters are the bytes that the program reads and
// writes, without the lines that caches fetch before a write. memcpy in the same run is the reference.
#include <benchmark/benchmark.h>

#include <cstring>
#include <memory>
#include <random>

#include "device/host/host_device.h"
#include "device/host/kernels.h"
#include "device/state_codes.h"

namespace {

using namespace fsdp::device;
namespace kernels = fsdp::device::kernels;

constexpr int64_t small = 1 << 16, large = int64_t{64} << 20;  // bytes

// Fills memory with fp32 ones, which are small normal numbers in the other types.
class Buffer {
 public:
  explicit Buffer(uint64_t bytes) : memory_(bytes, "benchmark") {
    for (uint64_t i = 0; i < bytes / 4; ++i) floats()[i] = 1.0f;
  }
  std::byte *data() { return memory_.data(); }
  float *floats() { return reinterpret_cast<float *>(memory_.data()); }

 private:
  HostMemory memory_;
};

void report(benchmark::State &state, uint64_t bytes) {
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * static_cast<int64_t>(state.iterations()));
}

void memcpy_reference(benchmark::State &state) {
  const auto bytes = static_cast<uint64_t>(state.range(0));
  Buffer to(bytes), from(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  report(state, 2 * bytes);
}
BENCHMARK(memcpy_reference)->Range(small, large);

void copy_bytes(benchmark::State &state) {
  const auto bytes = static_cast<uint64_t>(state.range(0));
  Buffer to(bytes), from(bytes);
  for (auto _ : state) kernels::copy_bytes(to.data(), from.data(), bytes);
  report(state, 2 * bytes);
}
BENCHMARK(copy_bytes)->Range(small, large);

// The arguments are output bytes, ranks and dtype.
void rank_sum(benchmark::State &state) {
  const auto bytes = static_cast<uint64_t>(state.range(0));
  const auto ranks = static_cast<uint32_t>(state.range(1));
  const auto dtype = static_cast<fsdp_dtype>(state.range(2));
  const uint64_t stride = dtype == FSDP_FLOAT32 ? bytes : bytes / 2;
  Buffer out(bytes), from(stride * ranks);
  const RankSum sum{from.data(), stride, ranks, dtype, dtype, out.floats(), bytes / 4, 1.0f / 3, false};
  for (auto _ : state) kernels::rank_sum(sum);
  report(state, bytes + stride * ranks);
}
BENCHMARK(rank_sum)->ArgsProduct({{small, 1 << 20, 4 << 20, 16 << 20, large}, {2}, {FSDP_FLOAT32, FSDP_BFLOAT16}});
BENCHMARK(rank_sum)->ArgsProduct({{large}, {1, 3, 4, 8, 16, 32}, {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16}});

void rank_sum_rounded(benchmark::State &state) {
  Buffer out(large), from(2 * large);
  const RankSum sum{from.data(), large, 2, FSDP_FLOAT32, FSDP_BFLOAT16, out.floats(), large / 4, 1, false};
  for (auto _ : state) kernels::rank_sum(sum);
  report(state, 3 * large);
}
BENCHMARK(rank_sum_rounded);

void cast(benchmark::State &state) {
  const auto count = static_cast<uint64_t>(state.range(0)) / 4;
  const auto to_dtype = static_cast<fsdp_dtype>(state.range(1)), from_dtype = static_cast<fsdp_dtype>(state.range(2));
  Buffer to(count * 4), from(count * 4);
  for (auto _ : state) kernels::cast(to.data(), to_dtype, from.data(), from_dtype, count);
  report(state, count * (to_dtype == FSDP_FLOAT32 || from_dtype == FSDP_FLOAT32 ? 6 : 4));
}
BENCHMARK(cast)->ArgsProduct({{small, large}, {FSDP_BFLOAT16, FSDP_FLOAT16}, {FSDP_FLOAT32}});
BENCHMARK(cast)->ArgsProduct({{small, large}, {FSDP_FLOAT32}, {FSDP_BFLOAT16, FSDP_FLOAT16}});

void adamw(benchmark::State &state) {
  const auto count = static_cast<uint64_t>(state.range(0));
  const auto dtype = static_cast<fsdp_dtype>(state.range(1));
  Buffer weight(count * 4), grad(count * 4), m(count * 4), v(count * 4), compute(count * 4);
  const AdamW step{1e-6f, average_of(0.9), average_of(0.999), 1e-8f, 0.1f, 0.5f, 0.5f, 1, 0};
  const AdamWSpan span{weight.floats(), grad.floats(), m.floats(), v.floats(), dtype ? compute.data() : nullptr,
                       dtype,           count};
  for (auto _ : state) kernels::adamw(step, {&span, 1});
  report(state, count * (dtype == FSDP_BFLOAT16 ? 30 : 28));
}
BENCHMARK(adamw)->ArgsProduct({{16, 1 << 14, large / 4}, {0, FSDP_BFLOAT16}});

// Counts the bytes that are read and written for an element: the gradient, the weight, a bf16 copy of fp32 weights, and
// the states.
uint64_t compact_bytes(const CompactSpan &span) {
  const uint64_t weight = span.form == MainForm::rounded ? 4 : span.form == MainForm::split16 ? 8 : 10;
  return span.count * (4 + weight + (span.exp_avg_scales ? 4 : 16)) + (span.exp_avg_scales ? span.count / 16 : 0);
}

// The arguments are the count, the form of the weights, and whether states are codes.
void compact_adamw(benchmark::State &state) {
  const auto count = static_cast<uint64_t>(state.range(0));
  const auto form = static_cast<MainForm>(state.range(1));
  const bool codes = state.range(2) != 0;
  Buffer weight(count * 4), rest(count * 2), grad(count * 4), m(count * 4), v(count * 4), scales(count + 8);
  const AdamW step{1e-6f, average_of(0.9), average_of(0.999), 1e-8f, 0.1f, 0.5f, 0.5f, 1, 0};
  const bool is_split = form == MainForm::split16;
  const CompactSpan span{weight.data(),
                         is_split ? reinterpret_cast<int16_t *>(rest.data()) : nullptr,
                         grad.floats(),
                         m.data(),
                         v.data(),
                         codes ? scales.floats() : nullptr,
                         codes ? scales.floats() + state_blocks(count) : nullptr,
                         form == MainForm::float32 ? rest.data() : nullptr,
                         FSDP_BFLOAT16,
                         form,
                         0,
                         {0, count, 0},
                         count};
  std::mt19937 random(1);
  for (uint64_t i = 0; i < count; ++i) grad.floats()[i] = static_cast<float>(random()) * 0x1p-32f - 0.5f;
  for (auto _ : state) kernels::compact_adamw(step, {&span, 1});
  report(state, compact_bytes(span));
}
BENCHMARK(compact_adamw)->ArgsProduct({{1 << 14, large / 4}, {0, 1, 2}, {0, 1}});

void round_randomly(benchmark::State &state) {
  Buffer from(large), to(large / 2);
  const RandomRounding work{
      from.floats(), reinterpret_cast<uint16_t *>(to.data()), large / 4, {1, 2, 3}, {0, large / 4, 0}};
  for (auto _ : state) kernels::round_randomly(work);
  report(state, large / 4 * 6);
}
BENCHMARK(round_randomly);

void sum_squares(benchmark::State &state) {
  Buffer values(large);
  for (auto _ : state)
    benchmark::DoNotOptimize(kernels::sum_squares(values.floats(), large / 4, static_cast<uint64_t>(state.range(0))));
  report(state, large);
}
BENCHMARK(sum_squares)->Arg(64)->Arg(1024)->Arg(4096);

void count_nonfinite(benchmark::State &state) {
  Buffer values(large);
  for (auto _ : state) benchmark::DoNotOptimize(kernels::count_nonfinite(values.floats(), large / 4));
  report(state, large);
}
BENCHMARK(count_nonfinite);

void add(benchmark::State &state) {
  Buffer to(large), from(large);
  const auto dtype = static_cast<fsdp_dtype>(state.range(0));
  for (auto _ : state) kernels::add(to.data(), dtype, from.data(), dtype, large / 4);
  report(state, dtype == FSDP_FLOAT32 ? 3 * large : 3 * large / 2);
}
BENCHMARK(add)->Arg(FSDP_FLOAT32)->Arg(FSDP_BFLOAT16);

void scale(benchmark::State &state) {
  Buffer values(large);
  for (auto _ : state) kernels::scale(values.floats(), 1.0000001f, large / 4);
  report(state, 2 * large);
}
BENCHMARK(scale);

}  // namespace

BENCHMARK_MAIN();
