// SPDX-License-Identifier: Apache-2.0
// Tests stacks of matrices that ranks divide inside matrices. No block of a quantization or of a state in codes is cut,
// and scales are those of the matrices.
#include <gtest/gtest.h>

#include "base/error.h"
#include "memory/model_plan.h"

namespace fsdp::memory {
namespace {

ParamSpec stack(std::vector<uint64_t> shape, uint32_t row_dimensions, fsdp_quantization quantization = 0) {
  ParamSpec spec;
  spec.name = "experts";
  spec.dtype = FSDP_BFLOAT16;
  for (const uint64_t size : shape) spec.element_count *= size;
  spec.shape = std::move(shape);
  spec.row_dimensions = row_dimensions;
  spec.quantization = quantization;
  return spec;
}

ModelSpec model_of(std::vector<ParamSpec> params, uint32_t ranks) {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(ranks);
  spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
  spec.groups.resize(1);
  spec.groups[0].name = "g";
  spec.groups[0].params = std::move(params);
  return spec;
}

const layout::FlatLayout &layout_of(const ModelPlan &plan) { return plan.buckets.at(0).layout; }

// A whole number of blocks lies between the start of a matrix and each boundary inside it.
void expect_whole_blocks(const ModelPlan &plan, const ParamSpec &param, uint64_t rows_of_block) {
  const uint64_t columns = param.shape.back(), rows = param.shape[param.shape.size() - 2];
  for (uint32_t rank = 0; rank < layout_of(plan).ranks; ++rank) {
    const layout::Slice slice = layout_of(plan).slice(0, rank);
    for (const uint64_t cut : {slice.tensor_offset, slice.tensor_offset + slice.count}) {
      EXPECT_EQ(cut % columns, 0u) << "a boundary is inside a row of a matrix";
      EXPECT_EQ(cut / columns % rows % rows_of_block, 0u) << "a boundary is inside a block";
    }
  }
}

TEST(StackPlan, CutsNoBlockOfAQuantization) {
  for (const auto &[quantization, block] : {std::pair{FSDP_QUANTIZE_MXFP8 + 0, 32}, {FSDP_QUANTIZE_FP8_BLOCK + 0, 128}})
    for (const uint32_t rows : {1u, 2u, 3u, 4u})
      for (const uint64_t matrix_rows : {128, 384})
        for (uint32_t ranks = 1; ranks < 30; ranks += 1 + ranks / 5)
          for (const bool coded : {false, true}) {
            ParamSpec param = stack({2, 3, matrix_rows, 96}, rows, quantization);
            param.coded_states = coded;
            const ModelSpec spec = model_of({param}, ranks);
            ASSERT_TRUE(find_violations(spec).empty());
            const ModelPlan plan = plan_model(spec);
            EXPECT_EQ(validate(plan, spec), "");
            expect_whole_blocks(plan, param, static_cast<uint64_t>(block));
          }
}

TEST(StackPlan, DividesQuantizedStacksAmongMoreRanksThanMatrices) {
  for (const auto &[quantization, granule] :
       {std::pair{FSDP_QUANTIZE_MXFP8 + 0, 32u * 256}, {FSDP_QUANTIZE_FP8_BLOCK + 0, 128u * 256}}) {
    const ModelPlan plan = plan_model(model_of({stack({2, 512, 256}, 2, quantization)}, 8));
    EXPECT_EQ(layout_of(plan).tensors[0].granule, granule);
    EXPECT_EQ(plan.padding_count, 0u);
    EXPECT_EQ(
        plan.groups[0].scale_shapes[0][0],
        (quantization == FSDP_QUANTIZE_MXFP8 ? std::vector<uint64_t>{2, 512, 8} : std::vector<uint64_t>{2, 4, 2}));
    EXPECT_EQ(plan_model(model_of({stack({2, 512, 256}, 1, quantization)}, 8)).padding_count, 3u * 2 * 512 * 256);
  }
}

TEST(StackPlan, KeepsBlocksOfStatesInCodesTogether) {
  for (const uint64_t columns : {24, 100, 256, 384})
    for (const uint32_t rows : {1u, 2u, 3u})
      for (const uint32_t ranks : {1u, 3u, 8u, 21u}) {
        ParamSpec param = stack({4, 30, columns}, rows);
        param.coded_states = true;
        const ModelSpec spec = model_of({param}, ranks);
        const ModelPlan plan = plan_model(spec);
        EXPECT_EQ(validate(plan, spec), "");
        for (uint32_t rank = 0; rank < ranks; ++rank)
          EXPECT_EQ(layout_of(plan).slice(0, rank).tensor_offset % coded_block, 0u);
      }
}

// The declared granule has rows of row_dimensions.
TEST(StackPlan, CountsRowsOfAGranuleInMatrices) {
  ParamSpec param = stack({4, 64, 96}, 2, FSDP_QUANTIZE_MXFP8);
  param.granule = FSDP_GRANULE_BLOCK;
  param.granule_rows = 64;
  EXPECT_TRUE(find_violations(model_of({param}, 2)).empty());
  EXPECT_EQ(tensor_of(param).granule_rows, 64u);
  param.granule_rows = 48;
  EXPECT_EQ(find_violations(model_of({param}, 2)),
            (std::vector<std::string>{"parameter 'experts' of group 'g': FSDP_QUANTIZE_MXFP8 needs granules of a "
                                      "multiple of 32 rows of 96 elements, but granule_rows is 48"}));
  param.row_dimensions = 1;  // each row is a matrix
  EXPECT_TRUE(find_violations(model_of({param}, 2)).empty());
  EXPECT_EQ(raised_granule(stack({4, 64, 96}, 1, FSDP_QUANTIZE_MXFP8)), 0u);
  EXPECT_EQ(raised_granule(stack({4, 64, 96}, 2, FSDP_QUANTIZE_MXFP8)), 32u);
  EXPECT_EQ(raised_granule(stack({4, 64, 96}, 3, FSDP_QUANTIZE_MXFP8)), 32u * 96);
}

TEST(StackPlan, RefusesMatricesThatAreNotWholeBlocks) {
  EXPECT_EQ(find_violations(model_of({stack({4, 200, 96}, 2, FSDP_QUANTIZE_FP8_BLOCK)}, 2)),
            (std::vector<std::string>{"parameter 'experts' of group 'g': FSDP_QUANTIZE_FP8_BLOCK needs matrices of a "
                                      "multiple of 128 rows where there are several, but shape[1] is 200; pad the "
                                      "matrices, or declare each one as a parameter"}));
  EXPECT_EQ(find_violations(model_of({stack({4, 48, 96}, 2, FSDP_QUANTIZE_MXFP8)}, 2)),
            (std::vector<std::string>{"parameter 'experts' of group 'g': FSDP_QUANTIZE_MXFP8 needs matrices of a "
                                      "multiple of 32 rows, but shape[1] is 48; pad the matrices"}));
}

// FlatLayout.HashIsPinned has the hashes of layouts without row_dimensions.
TEST(StackPlan, HasAnotherHashForOtherRows) {
  const ModelPlan plain = plan_model(model_of({stack({4, 6, 10}, 1)}, 3));
  const ModelPlan divided = plan_model(model_of({stack({4, 6, 10}, 2)}, 3));
  EXPECT_NE(plain.layout_hash, divided.layout_hash);
}

}  // namespace
}  // namespace fsdp::memory
