// SPDX-License-Identifier: Apache-2.0
// Tests the layout of main weights and states in fewer bits. The codes of a block and their scale are on one rank. The
// elements of a box keep their numbers in the whole tensor.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "memory/model_plan.h"

namespace fsdp::memory {
namespace {

ParamSpec param(std::vector<uint64_t> shape, fsdp_dtype dtype = FSDP_BFLOAT16) {
  ParamSpec spec;
  spec.name = "w";
  spec.dtype = dtype;
  for (const uint64_t size : shape) spec.element_count *= size;
  spec.shape = std::move(shape);
  return spec;
}

ParamSpec box(std::vector<uint64_t> shape, std::vector<uint64_t> whole, std::vector<uint64_t> offset) {
  ParamSpec spec = param(std::move(shape));
  spec.global_shape = std::move(whole), spec.global_offset = std::move(offset);
  return spec;
}

ParamSpec coded(ParamSpec spec) {
  spec.coded_states = true;
  return spec;
}

// Computes the number of a box's element in the whole tensor from one index at a time.
uint64_t number_of(const ParamSpec &spec, uint64_t element) {
  std::vector<uint64_t> index(spec.shape.size());
  for (size_t d = spec.shape.size(); d-- > 0; element /= spec.shape[d]) index[d] = element % spec.shape[d];
  uint64_t number = 0;
  for (size_t d = 0; d < spec.shape.size(); ++d)
    number = number * spec.global_shape[d] + index[d] + spec.global_offset[d];
  return number;
}

TEST(ElementRuns, HaveTheNumbersOfTheWholeTensor) {
  const ParamSpec boxes[] = {box({3, 5}, {3, 5}, {0, 0}),
                             box({3, 5}, {7, 5}, {2, 0}),
                             box({3, 5}, {3, 9}, {0, 4}),
                             box({3, 5}, {7, 9}, {2, 4}),
                             box({2, 3, 4}, {2, 3, 6}, {0, 0, 1}),
                             box({2, 3, 4}, {2, 5, 4}, {0, 2, 0}),
                             box({2, 3, 4}, {5, 6, 7}, {1, 2, 3}),
                             box({2, 2, 3, 2}, {3, 2, 5, 2}, {1, 0, 1, 0}),
                             box({6}, {20}, {9})};
  for (const ParamSpec &spec : boxes)
    for (uint64_t first = 0; first < spec.element_count; ++first)
      for (uint64_t count = 1; count <= spec.element_count - first; ++count) {
        uint64_t next = 0;
        for (const ElementRun &run : list_runs(spec, first, count)) {
          ASSERT_EQ(run.begin, next);
          for (uint64_t i = 0; i < run.count; ++i)
            ASSERT_EQ(run.first + i / run.length * run.pitch + i % run.length, number_of(spec, first + run.begin + i))
                << first << " " << count << " " << i;
          next += run.count;
        }
        ASSERT_EQ(next, count);
      }
  EXPECT_EQ(list_runs(box({64, 5}, {64, 9}, {0, 4}), 0, 320).size(), 1) << "rows at equal distances are one run";
}

TEST(CodedStates, AreChosenByTheWholeParameter) {
  EXPECT_FALSE(can_code_states(param({4095})));
  EXPECT_TRUE(can_code_states(param({4096})));
  EXPECT_TRUE(can_code_states(param({64, 65})));
  EXPECT_FALSE(can_code_states(param({})));
  ParamSpec frozen = param({4096});
  frozen.flags = FSDP_PARAM_FROZEN;
  EXPECT_FALSE(can_code_states(frozen));
  // In a box the elements of the whole tensor are counted, and the box must not cut the tensor's blocks.
  EXPECT_TRUE(can_code_states(box({1, 256}, {64, 256}, {3, 0})));
  EXPECT_FALSE(can_code_states(box({3, 256}, {8, 256}, {0, 0})));
  EXPECT_TRUE(can_code_states(box({64, 256}, {64, 1024}, {0, 512})));
  EXPECT_FALSE(can_code_states(box({64, 256}, {64, 1024}, {0, 128})));
  EXPECT_FALSE(can_code_states(box({64, 128}, {64, 1024}, {0, 0})));
  EXPECT_TRUE(can_code_states(box({8, 96}, {64, 96}, {8, 0})));
  EXPECT_FALSE(can_code_states(box({8, 96}, {64, 96}, {1, 0})));
  EXPECT_FALSE(can_code_states(box({7, 96}, {64, 96}, {8, 0})));
  EXPECT_TRUE(can_code_states(box({5, 96}, {61, 96}, {56, 0}))) << "what is left at the end is a block of the whole";
}

TEST(CodedStates, KeepABlocksRowsTogether) {
  EXPECT_EQ(raised_granule(coded(param({64, 256}))), 0u);
  EXPECT_EQ(raised_granule(coded(param({64, 96}))), 8u);
  EXPECT_EQ(raised_granule(coded(param({64, 33 * 128}))), 2u);
  EXPECT_EQ(raised_granule(coded(param({5000}))), 256u);
  EXPECT_EQ(raised_granule(param({64, 96})), 0u);
  ParamSpec quantized = coded(param({64, 96}));
  quantized.quantization = FSDP_QUANTIZE_MXFP8;
  EXPECT_EQ(raised_granule(quantized), 32u);
  ParamSpec declared = coded(param({64, 96}));
  declared.granule = FSDP_GRANULE_BLOCK, declared.granule_rows = 12;
  EXPECT_EQ(tensor_of(declared).granule_rows, 24u) << "blocks of 12 rows stay whole";
  EXPECT_EQ(coded_tensor_of(declared).granule_scales, 9u);
  EXPECT_EQ(coded_tensor_of(declared).scale_count, 24u);
  EXPECT_EQ(raised_granule(declared), 24u);
  declared.granule_rows = UINT64_MAX;
  EXPECT_EQ(tensor_of(declared).granule_rows, 64u);
  EXPECT_EQ(raised_granule(declared), 0u);
}

ModelSpec model_of(std::vector<ParamSpec> params, fsdp_main_storage storage, uint32_t ranks) {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(ranks);
  spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
  spec.groups.resize(1);
  spec.groups[0].name = "g";
  spec.groups[0].main_storage = storage;
  for (size_t i = 0; i < params.size(); ++i) params[i].name = "p" + std::to_string(i);
  spec.groups[0].params = std::move(params);
  return spec;
}

// Parameters and ranks are random. The plan keeps its promises, and each rank has exactly the scales of its blocks.
TEST(CodedStates, HaveTheirScalesOnTheSameRank) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<ParamSpec> params;
    for (uint32_t p = random() % 5 + 1; p > 0; --p) {
      std::vector<uint64_t> shape{random() % 90 + 1, random() % 300 + 1};
      if (random() % 3 == 0) shape = {random() % 9000 + 1};
      params.push_back(param(std::move(shape), random() % 4 ? FSDP_BFLOAT16 : FSDP_FLOAT32));
      params.back().coded_states = can_code_states(params.back());
    }
    const ModelSpec spec =
        model_of(std::move(params), static_cast<fsdp_main_storage>(random() % 3 + 1), random() % 7 + 1);
    const ModelPlan plan = plan_model(spec);
    ASSERT_EQ(validate(plan, spec), "") << round;
    for (const BucketPlan &bucket : plan.buckets)
      for (size_t t = 0; bucket.coded_states && t < bucket.params.size(); ++t)
        for (uint32_t rank = 0; rank < spec.mesh().size(); ++rank) {
          const layout::Slice codes = bucket.layout.slice(t, rank), scales = bucket.state_layout->slice(t, rank);
          ASSERT_EQ(codes.tensor_offset % coded_block, 0u);
          ASSERT_EQ(scales.count, (codes.count + coded_block - 1) / coded_block);
          ASSERT_EQ(scales.tensor_offset, codes.count ? codes.tensor_offset / coded_block : 0);
        }
  }
}

// A bucket has states of one kind, and its rows of main weights fit its storage.
TEST(CompactPlan, HasARowForEachPlane) {
  const ModelSpec spec =
      model_of({coded(param({64, 96})), param({40}), coded(param({64, 96}, FSDP_FLOAT32))}, FSDP_MAIN_SPLIT16, 2);
  const ModelPlan plan = plan_model(spec);
  ASSERT_EQ(plan.buckets.size(), 3u);
  for (const BucketPlan &bucket : plan.buckets) {
    const bool is_bf16 = bucket.dtype == FSDP_BFLOAT16;
    EXPECT_EQ(bucket.find(PlaneKind::rest) != nullptr, is_bf16);
    EXPECT_TRUE(bucket.plane(PlaneKind::main).again);
    EXPECT_EQ(bucket.plane(PlaneKind::main).dtype, bucket.dtype);
    EXPECT_EQ(bucket.find(PlaneKind::state_scales, 1) != nullptr, bucket.coded_states);
    EXPECT_EQ(bucket.plane(PlaneKind::state, 1).dtype, bucket.coded_states ? FSDP_UINT8 : FSDP_FLOAT32);
  }
}

}  // namespace
}  // namespace fsdp::memory
