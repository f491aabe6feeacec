// SPDX-License-Identifier: Apache-2.0
// Over simulated GPUs: matrices that are collected, changed and returned on streams of their own. One party is late by
// more than an exchange takes, and the next one must still see all that it has written.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "gpu_order.h"
#include "matrices.h"

namespace order {
namespace {

constexpr int late_ms = 30;

Scenario matrix_scenario(Layout layout) {
  Scenario setup = order_scenario(layout, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  setup.groups = matrix_groups();
  setup.model.grad_op = FSDP_GRAD_OP_SUM;
  setup.model.matrix_bytes = 1024;
  return setup;
}

// The main grads of this rank, as a kernel finds them there.
struct FoundShard {
  uint32_t ordinal;
  uint64_t first;
  std::vector<float> values;
};

// One stream for each part of the step: what comes before, the work on matrices, what comes after.
class Steps {
 public:
  Steps(Rank &rank, Late late, const LibraryStreams &library) : rank_(rank), late_(late) {
    library.delay(late);
    if (late == Late::rank && rank.rank == 1)
      for (const Stream *stream : {&before_, &work_, &after_}) simulated::set_stream_delay(*stream, 500);
  }

  void step() {
    CUDA(cudaStreamSynchronize(before_));
    found_.clear();
    give_whole_grads(rank_);
    if (late_ == Late::updates) nap(before_, late_ms);
    FSDP(fsdp_scale_grads(rank_.model, 2, before_));
    FSDP(fsdp_collect_matrices(rank_.model, nullptr, after_));
    for (;;) {
      fsdp_matrix given = FSDP_MATRIX_INIT;
      FSDP(fsdp_next_matrix(rank_.model, work_, &given));
      if (!given.data) break;
      if (late_ == Late::writers) nap(work_, 5);
      CUDA(simulated::enqueue(work_, [given] { change(given); }));
    }
    FSDP(fsdp_return_matrices(rank_.model, after_));
    FSDP(fsdp_scale_grads(rank_.model, 4, before_));  // comes after the return
    find();
    FSDP(fsdp_publish_weights(rank_.model, after_));
  }

  void add_to(Whole &whole) {
    for (const Stream *stream : {&before_, &work_, &after_}) CUDA(cudaStreamSynchronize(*stream));
    for (const FoundShard &shard : found_) whole.add(shard.ordinal, shard.first, shard.values);
  }

 private:
  static void change(const fsdp_matrix &given) {
    for (uint64_t m = 0; m < given.count; ++m) {
      auto *const data = reinterpret_cast<float *>(static_cast<std::byte *>(given.data) + m * given.stride_bytes);
      const std::vector<float> matrix(data, data + given.rows * given.columns);
      for (uint64_t i = 0; i < matrix.size(); ++i)
        data[i] = changed(matrix, given.rows, given.columns, i / given.columns, i % given.columns,
                          given.batch_index + m, given.split_index);
    }
  }
  void find() {
    for (const fsdp_shard &shard : rank_.shards()) {
      FoundShard &found = found_.emplace_back();
      found.ordinal = ordinal_of(rank_, shard), found.first = shard.element_offset;
      found.values.resize(shard.element_count);
      CUDA(simulated::enqueue(before_, [from = main_grad(shard), &found] {
        std::memcpy(found.values.data(), from, found.values.size() * sizeof(float));
      }));
    }
  }

  Rank &rank_;
  Late late_;
  Stream before_, work_, after_;
  std::deque<FoundShard> found_;
};

std::vector<std::vector<float>> doubled_grads(const Scenario &setup) {
  std::vector<std::vector<float>> grads;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      const auto ordinal = static_cast<uint32_t>(grads.size());
      std::vector<float> &grad = grads.emplace_back(param.count());
      for (uint64_t i = 0; i < grad.size(); ++i) grad[i] = 2 * whole_grad(ordinal, i);
    }
  return grads;
}

class GpuMatrices : public testing::TestWithParam<std::tuple<Layout, Late>> {};

TEST_P(GpuMatrices, WaitForWhateverIsLate) {
  const auto [layout, late] = GetParam();
  const Scenario setup = matrix_scenario(layout);
  Whole whole(setup.groups);
  run_threads(setup, [&, late = late](uint32_t, fsdp_context *context) {
    stream();
    LibraryStreams library;
    Rank rank(context, setup);
    library.find();
    rank.load();
    {
      Steps steps(rank, late, library);
      for (int step = 0; step < 2; ++step) steps.step();
      steps.add_to(whole);
    }
    FSDP(fsdp_close_context(context));
  });
  auto expected = change_alone(setup.groups, doubled_grads(setup));
  for (auto &values : expected)
    for (float &value : values) value *= 4;
  EXPECT_TRUE(same_bits(whole.values(), expected));
}

std::string name_of(const testing::TestParamInfo<std::tuple<Layout, Late>> &tested) {
  std::string name = late_names[static_cast<int>(std::get<1>(tested.param))];
  std::erase(name, ' ');
  return layout_names[static_cast<int>(std::get<0>(tested.param))] + ("_" + name);
}

INSTANTIATE_TEST_SUITE_P(EachLayout, GpuMatrices,
                         testing::Combine(testing::Values(Layout::flat, Layout::hsdp, Layout::hfsdp, Layout::hosts),
                                          testing::Values(Late::nobody, Late::updates, Late::writers, Late::reduces,
                                                          Late::rank)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(OuterAxes, GpuMatrices,
                         testing::Combine(testing::Values(Layout::hsdp, Layout::hfsdp, Layout::hosts),
                                          testing::Values(Late::outer)),
                         name_of);

// Rows go to the file behind late kernels, and the publish must read them there.
TEST(GpuMatricesInAFile, APublishComesAfterReturnedRows) {
  Scenario setup = matrix_scenario(Layout::one);
  setup.ranks = 1;
  setup.groups = {{"all", {{"w", {64, 300}, FSDP_BFLOAT16}}}};
  setup.groups[0].params[0].matrix = FSDP_MATRIX_LAST_TWO;
  setup.model.matrix_bytes = 0;
  setup.model.main_home = FSDP_HOME_FILE;
  setup.model.home_directory = "/var/tmp";
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Stream work;
    std::vector<float> expected = rank.read(0, 0);
    for (float &weight : expected) weight += 4;
    FSDP(fsdp_begin_update(rank.model, work));
    fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
    options.source = "main_weight";
    FSDP(fsdp_collect_matrices(rank.model, &options, work));
    fsdp_matrix given = FSDP_MATRIX_INIT;
    while (FSDP(fsdp_next_matrix(rank.model, work, &given)), given.data) {
      nap(work, late_ms);
      CUDA(simulated::enqueue(work, [given] {
        auto *const weights = static_cast<float *>(given.data);
        for (uint64_t i = 0; i < given.rows * given.columns; ++i) weights[i] += 4;
      }));
    }
    FSDP(fsdp_return_matrices(rank.model, work));
    FSDP(fsdp_publish_weights(rank.model, work));
    CUDA(cudaStreamSynchronize(work));
    EXPECT_EQ(rank.read(0, 0), expected);
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, work));
    CUDA(cudaStreamSynchronize(work));
    const std::vector<float> shown = rank.view(0, 0, FSDP_EVAL);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, work));
    for (size_t i = 0; i < shown.size(); ++i) ASSERT_NEAR(shown[i], expected[i], 0.05F) << i;
  });
}

}  // namespace
}  // namespace order
