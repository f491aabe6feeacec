// SPDX-License-Identifier: Apache-2.0
// Measures planning time. The target is 10,000 parameters in 10 ms of CPU time.
#include <benchmark/benchmark.h>

#include <random>

#include "layout/flat_layout.h"
#include "memory/pool_plan.h"
#include "memory/visit_order.h"

namespace {

using fsdp::layout::TensorSpec;
using fsdp::memory::ScheduledGroup;
using fsdp::memory::ScheduleSpec;

constexpr uint32_t count = 10000;

// Matrices and vectors have sizes as in models: multiples of 64.
std::vector<TensorSpec> model_tensors() {
  std::mt19937 random(1);
  std::vector<TensorSpec> tensors;
  while (tensors.size() < count) {
    const uint64_t rows = 64 * (1 + random() % 128), columns = 64 * (1 + random() % 64);
    tensors.push_back(random() % 2 ? TensorSpec{{rows, columns}} : TensorSpec{{rows}});
  }
  return tensors;
}

std::vector<TensorSpec> odd_tensors() {
  std::mt19937 random(2);
  std::vector<TensorSpec> tensors;
  while (tensors.size() < count) tensors.push_back({{1 + random() % 4096, 1 + random() % 4096}});
  return tensors;
}

std::vector<TensorSpec> expert_tensors() {
  std::vector<TensorSpec> tensors;
  while (tensors.size() < count) {
    tensors.push_back({{2048, 7168}});
    tensors.push_back({{2048, 7168}});
    tensors.push_back({{7168, 2048}});
  }
  return tensors;
}

void plan_layout(benchmark::State &state, const std::vector<TensorSpec> &tensors) {
  fsdp::layout::FlatLayout layout;
  for (auto _ : state) layout = fsdp::layout::build_flat_layout(tensors, static_cast<uint32_t>(state.range(0)));
  state.counters["padding %"] =
      100.0 * static_cast<double>(layout.full_count - layout.used_count) / static_cast<double>(layout.used_count);
  state.counters["sub-buckets"] = static_cast<double>(layout.sub_buckets.size());
}
BENCHMARK_CAPTURE(plan_layout, model, model_tensors())
    ->Arg(1)
    ->Arg(8)
    ->Arg(256)
    ->Arg(1024)
    ->Arg(16384)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_layout, odd, odd_tensors())->Arg(8)->Arg(256)->Arg(1024)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_layout, experts, expert_tensors())->Arg(8)->Arg(256)->Arg(1024)->Unit(benchmark::kMillisecond);

ScheduleSpec deep_model(bool equal) {
  ScheduleSpec spec;
  for (uint64_t g = 0; g < count; ++g)
    spec.groups.push_back({.buffers = {{equal ? 4096 : 4096 + 64 * (g % 7), 0}}, .grad_bytes = {8192}});
  return spec;
}

void plan_schedule(benchmark::State &state) {
  const ScheduleSpec spec = deep_model(true);
  for (auto _ : state) benchmark::DoNotOptimize(fsdp::memory::build_visit_order(spec));
}
BENCHMARK(plan_schedule)->Unit(benchmark::kMillisecond);

void plan_pool(benchmark::State &state, bool equal) {
  const auto order = fsdp::memory::build_visit_order(deep_model(equal));
  fsdp::memory::PoolPlan plan;
  for (auto _ : state) plan = fsdp::memory::plan_pool(order.gathered, 256);
  state.counters["size / bound"] = static_cast<double>(plan.size_bytes) / static_cast<double>(plan.lower_bound_bytes);
}
BENCHMARK_CAPTURE(plan_pool, equal, true)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(plan_pool, unequal, false)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
