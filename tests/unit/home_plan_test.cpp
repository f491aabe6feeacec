// SPDX-License-Identifier: Apache-2.0
// Tests sizes of planes at home in a file: of segments, of the file and of turns.
#include "memory/home_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace fsdp::memory {
namespace {

struct Sizes {
  std::vector<uint64_t> element_bytes;
  uint64_t count, turn_bytes;
  uint64_t elements, segments, bytes;  // expected: elements of a segment, number of segments, bytes of the file
};

// Worked out by hand: a segment has as many elements as fit into the turn, in whole pages of every plane.
TEST(HomePlan, SegmentsFillTurnsWithWholePages) {
  const std::vector<uint64_t> two(2, 4), three(3, 4), four(4, 4);
  for (const Sizes &sizes :
       {Sizes{three, 1'000'000, 1 << 20, 87'040, 12, 12'005'376}, Sizes{three, 87'040, 1 << 20, 87'040, 1, 1'044'480},
        Sizes{four, 3'000'001, 4 << 18, 65'536, 46, 48'005'120}, Sizes{two, 1'023, 1 << 20, 131'072, 1, 8'192},
        Sizes{{2, 1, 1}, 100'000, 65'536, 16'384, 7, 200'704 + 2 * 102'400},
        Sizes{{8}, 1'000, 65'536, 8'192, 1, 8'192}}) {
    const uint64_t elements = segment_elements(sizes.element_bytes, sizes.turn_bytes);
    EXPECT_EQ(elements, sizes.elements);
    EXPECT_EQ((sizes.count + elements - 1) / elements, sizes.segments);
    EXPECT_EQ(home_bytes(sizes.element_bytes, sizes.count), sizes.bytes);
    for (const uint64_t size : sizes.element_bytes) EXPECT_EQ(elements * size % io_alignment, 0u);
  }
}

// Many planes may need more than the turn for one page of each.
TEST(HomePlan, ASegmentHasAtLeastAPageOfThePlaneWithTheShortestElements) {
  std::vector<uint64_t> sizes(20, 8);
  sizes.push_back(1);
  EXPECT_EQ(segment_elements(sizes, least_turn_bytes), io_alignment);
}

// ---- whole models ----

ModelSpec model_of(fsdp_dtype dtype, fsdp_main_storage storage, bool coded, uint64_t rows) {
  ModelSpec spec;
  spec.mesh() = layout::one_axis(2);
  spec.homes = {.state = FSDP_HOME_FILE, .main = FSDP_HOME_FILE, .directory = "/", .turn_bytes = 65536, .turns = 3};
  spec.states = {{"exp_avg", FSDP_FLOAT32, true}, {"exp_avg_sq", FSDP_FLOAT32, true}};
  GroupSpec group;
  group.name = "g";
  group.main_storage = storage;
  ParamSpec param;
  param.name = "w";
  param.shape = {rows, 100};
  param.element_count = rows * 100;
  param.dtype = dtype;
  param.optimizer = FSDP_OPTIMIZER_ADAMW;
  param.coded_states = coded;
  group.params.push_back(param);
  spec.groups.push_back(group);
  return spec;
}

uint64_t bytes_of(const ModelPlan &plan, RegionId id) { return plan.region(id).bytes; }

TEST(HomePlan, TheFileHasThePlanesAndMemoryHasTheTurns) {
  const ModelPlan plan = plan_model(model_of(FSDP_BFLOAT16, FSDP_MAIN_FLOAT32, false, 1000));
  const uint64_t shard = plan.buckets[0].layout.shard_count;
  EXPECT_EQ(shard, 50'000u);
  EXPECT_EQ(bytes_of(plan, RegionId::home), home_bytes(std::vector<uint64_t>(3, 4), shard));
  EXPECT_EQ(bytes_of(plan, RegionId::turns), 3 * 3 * 5 * io_alignment);  // 5,120 elements of each plane
  EXPECT_EQ(bytes_of(plan, RegionId::main), 0u);
  EXPECT_EQ(bytes_of(plan, RegionId::optimizer), 0u);
}

TEST(HomePlan, RestsAndCodesAreInTheFileAndScalesInMemory) {
  const ModelPlan plan = plan_model(model_of(FSDP_BFLOAT16, FSDP_MAIN_SPLIT16, true, 1024));
  const uint64_t shard = plan.buckets[0].layout.shard_count;
  EXPECT_EQ(bytes_of(plan, RegionId::home), home_bytes(std::vector<uint64_t>{2, 1, 1}, shard));
  EXPECT_GT(bytes_of(plan, RegionId::optimizer), 0u);
  EXPECT_LE(bytes_of(plan, RegionId::optimizer), 2 * (shard / coded_block + 2) * sizeof(float) + buffer_alignment);
}

layout::Mesh two_by_two(layout::OuterAxis outer) {
  layout::Mesh mesh = layout::one_axis(4);
  mesh.inner_size = mesh.outer_size = 2;
  mesh.outer = outer;
  return mesh;
}

// Two parts of the group: one buffer has room for the larger, or for both where the outer axis adds whole groups.
TEST(HomePlan, TwoBuffersHaveRoomForTheLargestGradsThatGoToTheFileTogether) {
  for (const layout::OuterAxis outer :
       {layout::OuterAxis::none, layout::OuterAxis::replicate, layout::OuterAxis::shard, layout::OuterAxis::optim}) {
    ModelSpec spec = model_of(FSDP_BFLOAT16, FSDP_MAIN_FLOAT32, false, 1000);
    if (outer != layout::OuterAxis::none) spec.mesh() = two_by_two(outer);
    spec.homes.state = spec.homes.main = FSDP_HOME_DEVICE, spec.homes.grad = FSDP_HOME_FILE;
    ParamSpec small = spec.groups[0].params[0];
    small.name = "v", small.shape = {10, 100}, small.element_count = 1000;
    spec.groups[0].params.push_back(small);
    spec.max_pending_bytes = 200'704;  // of full gradients in bf16: the larger parameter alone
    const ModelPlan plan = plan_model(spec);
    ASSERT_EQ(plan.parts.size(), 2u);
    const auto bytes = [&](uint32_t part) {
      const BucketPlan &bucket = plan.buckets[plan.parts[part].buckets[0]];
      return round_up(bucket.bytes(bucket.plane(PlaneKind::grad), "main grads"), io_alignment);
    };
    const bool together = outer == layout::OuterAxis::replicate || outer == layout::OuterAxis::optim;
    EXPECT_EQ(bytes_of(plan, RegionId::grad_turns),
              2 * (together ? bytes(0) + bytes(1) : std::max(bytes(0), bytes(1))));
    EXPECT_EQ(bytes_of(plan, RegionId::home), bytes(0) + bytes(1));
    EXPECT_EQ(bytes_of(plan, RegionId::grad), 0u);
    EXPECT_EQ(validate(plan, spec), "");
  }
}

// With FSDP_OUTER_OPTIM the plane has the slots of both outer ranks, and this rank's are in pieces.
TEST(HomePlan, ASegmentOfGradsInPiecesMayEndInsideOfTwoPagesOfEach) {
  ModelSpec spec = model_of(FSDP_BFLOAT16, FSDP_MAIN_FLOAT32, false, 1000);
  spec.mesh() = two_by_two(layout::OuterAxis::optim);
  spec.homes.state = spec.homes.main = FSDP_HOME_DEVICE, spec.homes.grad = FSDP_HOME_FILE;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(bytes_of(plan, RegionId::turns),
            3 * (65536 + 2 * io_alignment * plan.buckets[0].layout.sub_buckets.size()));
}

TEST(HomePlan, NothingIsAtHomeByDefault) {
  ModelSpec spec = model_of(FSDP_BFLOAT16, FSDP_MAIN_FLOAT32, false, 1000);
  spec.homes = HomeSpec();
  const ModelPlan plan = plan_model(spec);
  for (const RegionId id : {RegionId::home, RegionId::turns, RegionId::host_home}) EXPECT_EQ(bytes_of(plan, id), 0u);
}

TEST(HomePlan, MemoryOfTheHostIsCountedByItself) {
  ModelSpec spec = model_of(FSDP_BFLOAT16, FSDP_MAIN_FLOAT32, false, 1000);
  spec.homes = HomeSpec();
  spec.homes.state = FSDP_HOME_HOST;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(bytes_of(plan, RegionId::host_home), 200'192 + 200'000);
  EXPECT_GT(bytes_of(plan, RegionId::main), 0u);
  EXPECT_EQ(bytes_of(plan, RegionId::turns), 0u);
  EXPECT_TRUE(plan.region(RegionId::host_home).on_host);
}

}  // namespace
}  // namespace fsdp::memory
