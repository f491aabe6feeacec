// SPDX-License-Identifier: Apache-2.0
// The CUDA calls that a step of a model of 48 layers makes, counted over the simulated CUDA and NCCL's look-alike: a
// table, and bounds. The counts show how much the GPU's streams and the calling thread do besides the math. They do not
// show how long it takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>

#include "device.h"
#include "harness.h"
#include "simulated_cuda/simulated.h"

using namespace harness;

namespace {

constexpr uint32_t counted_ranks = 2;
constexpr size_t layers = 48;

// Two parameters a layer, gradients of 16 bits, one stream; launches are ordered by events, as NCCL before 2.31 needs.
Scenario layers_scenario() {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, counted_ranks, 0);
  setup.context.device = FSDP_DEVICE_CUDA;
  setup.context.device_transport = FSDP_TRANSPORT_NCCL;
  setup.groups.clear();
  for (size_t g = 0; g < layers; ++g) {
    const std::string name = "layer." + std::to_string(g);
    setup.groups.push_back({name, {{name + ".w", {64, 32}}, {name + ".v", {128}}}});
  }
  setup.set_dtype(FSDP_BFLOAT16);
  return setup;
}

enum Kind : size_t { kernels, records, waits, words, word_waits, copies, questions, others, kinds };
constexpr const char *kind_names[kinds] = {"kernels",    "records", "waits",     "words",
                                           "word waits", "copies",  "questions", "others"};
using Counts = std::array<double, kinds>;

uint64_t calls(std::initializer_list<const char *> names) {
  uint64_t count = 0;
  for (const char *name : names) count += simulated::calls(name);
  return count;
}

// The counts of all ranks so far.
Counts count_all() {
  const std::array<uint64_t, kinds> seen = {
      simulated::kernels(),
      calls({"cudaEventRecord"}),
      calls({"cudaStreamWaitEvent"}),
      calls({"cuStreamWriteValue32"}),
      calls({"cuStreamWaitValue32"}),
      calls({"cudaMemcpyAsync", "cudaMemsetAsync"}),
      calls({"cudaStreamGetCaptureInfo"}),
      calls({"cuCtxPushCurrent", "cuCtxPopCurrent", "cudaEventQuery", "cudaStreamQuery", "cudaGetLastError",
             "cudaThreadExchangeStreamCaptureMode", "cudaEventCreateWithFlags", "cudaEventSynchronize",
             "cudaStreamSynchronize", "cudaMalloc", "cudaHostAlloc"}),
  };
  Counts counts;
  std::copy(seen.begin(), seen.end(), counts.begin());
  return counts;
}

struct Row {
  const char *name;
  double times;  // the number of calls by which the counts are divided
  Counts most;
  Counts counts{};
};

// Writes a value that leaves the norm finite. It uses one kernel of the caller, which the counts leave out.
void write_grads(Rank &rank, size_t g) {
  for (size_t p = 0; p < 2; ++p) {
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    FSDP(fsdp_acquire_grad(rank.groups[g], p, 0, stream(), &grad, &accumulate));
    const auto write = [to = static_cast<uint16_t *>(grad.data), elements = grad.element_count] {
      std::fill_n(to, elements, uint16_t{0x3f80});  // 1 in bfloat16
    };
    REQUIRE(simulated::enqueue(static_cast<cudaStream_t>(stream()), write) == cudaSuccess);
  }
}

void visit_all(Rank &rank) {
  for (fsdp_group *group : rank.groups) {
    FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, stream()));
    FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, stream()));
  }
}

void reduce_all_grads(Rank &rank) {
  for (size_t g = layers; g-- > 0;) {
    write_grads(rank, g);
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
  }
}

void meet(Rank &rank) {
  double one = 1;
  FSDP(fsdp_all_reduce_values(rank.context, nullptr, &one, 1, FSDP_VALUE_SUM));
}

std::optional<simulated::Hold> hold;

// All ranks begin and end a part together, and no work of the GPU is done before the part ends. So the counts of waits
// do not depend on how fast the GPU is.
void count(Rank &rank, Row *row, const std::function<void()> &part) {
  REQUIRE(cudaStreamSynchronize(static_cast<cudaStream_t>(stream())) == cudaSuccess);
  meet(rank);
  if (rank.rank == 0) hold.emplace();
  const Counts before = count_all();
  meet(rank);
  part();
  meet(rank);
  if (rank.rank == 0 && row) {
    const Counts after = count_all();
    for (size_t k = 0; k < kinds; ++k) row->counts[k] = (after[k] - before[k]) / counted_ranks / row->times;
  }
  if (rank.rank == 0) hold.reset();
  meet(rank);
}

void step(Rank &rank, std::array<Row, 5> *rows) {
  const auto row = [&](size_t i) { return rows ? &(*rows)[i] : nullptr; };
  count(rank, row(0), [&] { visit_all(rank); });
  count(rank, row(1), [&] { reduce_all_grads(rank); });
  count(rank, row(2), [&] { FSDP(fsdp_finish_grads(rank.model, 0.5, 0, stream())); });
  count(rank, row(3), [&] { FSDP(fsdp_clip_grads(rank.model, nullptr, 1, stream(), nullptr)); });
  count(rank, row(4), [&] { FSDP(fsdp_step_adamw(rank.model, 0.125, nullptr, stream())); });
}

void print(const std::array<Row, 5> &rows) {
  std::printf("%-28s", "of each rank");
  for (const char *name : kind_names) std::printf("%12s", name);
  for (const Row &row : rows) {
    std::printf("\n%-28s", row.name);
    for (const double number : row.counts) std::printf("%12.2f", number);
  }
  std::printf("\n");
}

TEST(GpuCounts, AStepOf48LayersCostsFewCalls) {
  std::array<Row, 5> rows = {
      Row{"unshard and reshard, each", layers, {0, 6, 3, 3, 0, 0, 15, 0}},
      Row{"acquire and reduce, each", layers, {1, 6, 14.5, 4, 0, 1, 29.5, 0}},  // the sum, and its own slice
      Row{"finish with a scale", 1, {1, 5, 4, 4, 0, 0, 9, 0}},
      Row{"clip", 1, {6, 12, 3, 10, 0, 1, 20, 0}},  // 48 sums are a launch of each kernel, 96 two
      Row{"AdamW and publish", 1, {1, 3, 1, 3, 0, 0, 5, 0}},
  };
  const Scenario setup = layers_scenario();
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (int i = 0; i < 2; ++i) step(rank, nullptr);  // makes all that is made only once
    step(rank, &rows);
    REQUIRE(cudaStreamSynchronize(static_cast<cudaStream_t>(stream())) == cudaSuccess);
    FSDP(fsdp_close_context(context));
  });
  rows[1].counts[kernels] -= 2;  // the caller's
  print(rows);
  for (const Row &row : rows)
    for (size_t k = 0; k < kinds; ++k) EXPECT_LE(row.counts[k], row.most[k]) << row.name << ": " << kind_names[k];
}

}  // namespace
