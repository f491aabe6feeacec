// SPDX-License-Identifier: Apache-2.0
// A model's plan keeps the promises of its layouts and pools, and the check that debug mode makes at the seal sees
// which one is broken.
#include "memory/model_plan.h"

#include <gtest/gtest.h>

namespace fsdp::memory {
namespace {

ParamSpec param(const std::string &name, std::vector<uint64_t> shape, fsdp_dtype dtype = FSDP_FLOAT32) {
  ParamSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  spec.dtype = dtype;
  return spec;
}

ModelSpec copied_model() {
  ModelSpec spec;
  spec.mesh = layout::one_axis(3);
  spec.unshard_mode = FSDP_UNSHARD_COPIED;
  for (const std::string name : {"a", "b", "c", "d"}) {
    GroupSpec group;
    group.name = name;
    group.params = {param(name + ".w", {37, 24}), param(name + ".half", {51, 3}, FSDP_BFLOAT16),
                    param(name + ".b", {24})};
    spec.groups.push_back(group);
  }
  return spec;
}

bool contains(const std::string &text, const std::string &part) { return text.find(part) != std::string::npos; }

TEST(ModelPlan, KeepsItsPromises) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_COPIED, FSDP_UNSHARD_MAPPED})
    for (const fsdp_schedule_kind schedule : {FSDP_SCHEDULE_SEQUENTIAL, FSDP_SCHEDULE_INTERLEAVED}) {
      ModelSpec spec = copied_model();
      spec.unshard_mode = mode;
      spec.schedule = schedule;
      EXPECT_EQ(validate(plan_model(spec), spec), "");
    }
}

TEST(ModelPlan, TheCheckNamesWhatIsBroken) {
  const ModelSpec spec = copied_model();
  const ModelPlan good = plan_model(spec);
  ASSERT_GT(good.gather_pool.size_bytes, 0u);
  ASSERT_GT(good.grad_pool.size_bytes, 0u);

  ModelPlan bad = good;
  bad.buckets[2].layout.tensors[0].full_offset += 1;
  EXPECT_TRUE(contains(validate(bad, spec), "a bucket of group 'b': tensor 0 ")) << validate(bad, spec);
  bad = good;
  bad.gather_pool.offsets[1] = bad.gather_pool.offsets[0];  // gathered ahead while 'a' is in use
  EXPECT_TRUE(contains(validate(bad, spec), "the pool of gathered weights: requests 0 and 1 ")) << validate(bad, spec);
  bad = good;
  bad.grad_pool.size_bytes = 0;
  EXPECT_TRUE(contains(validate(bad, spec), "the pool of full gradients: request ")) << validate(bad, spec);
}

// Memory that peers cannot read: a rank keeps its slices alone, and gathers fill pool buffers also where mapping was asked for.
TEST(ModelPlan, DevicesKeepTheirOwnSlicesAlone) {
  ModelSpec spec = copied_model();
  const ModelPlan host = plan_model(spec);
  spec.unshard_mode = FSDP_UNSHARD_MAPPED;
  spec.host_memory = false;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(validate(plan, spec), "");
  EXPECT_EQ(plan.layout_hash, host.layout_hash);
  EXPECT_EQ(plan.gather_pool.size_bytes, host.gather_pool.size_bytes);
  EXPECT_EQ(plan.gather_pool.offsets, host.gather_pool.offsets);
  EXPECT_EQ(plan.shared_compute_bytes, 0u);
  uint64_t end = 0;
  for (const BucketPlan &bucket : plan.buckets) {
    EXPECT_EQ(plan.groups[bucket.group].home, ComputeHome::shard);
    EXPECT_GE(bucket.compute_offset, end);  // of what lies before it
    end = bucket.compute_offset + bucket.inner_count() * (bucket.dtype == FSDP_FLOAT32 ? 4 : 2);
  }
  EXPECT_LE(end, plan.shard_compute_bytes);
  EXPECT_EQ(plan.role_bytes(0, 3)[FSDP_ROLE_COMPUTE], plan.shard_compute_bytes);
  EXPECT_EQ(plan.role_bytes(0, 3), plan.role_bytes(2, 3));
}

TEST(ModelPlan, ARankOfADeviceThatHasAllKeepsItInPlace) {
  ModelSpec spec = copied_model();
  spec.mesh = layout::one_axis(1);
  spec.host_memory = false;
  const ModelPlan plan = plan_model(spec);
  EXPECT_EQ(plan.groups[0].home, ComputeHome::local);
  EXPECT_EQ(plan.gather_bytes, 0u);
  spec.force_communication = true;
  EXPECT_EQ(plan_model(spec).groups[0].home, ComputeHome::shard);
}

// One buffer for all groups, as large as the largest needs; none where nothing is rounded or somebody else rounds.
TEST(ModelPlan, GradientsAreRoundedInABufferOfTheLargestGroup) {
  ModelSpec spec = copied_model();
  spec.host_memory = false;
  spec.rounds_before_sending = true;
  const uint64_t without = plan_model(spec).role_bytes(0, 3)[FSDP_ROLE_REDUCE];
  EXPECT_EQ(plan_model(spec).wire_bytes, 0u);
  for (GroupSpec &group : spec.groups) group.reduce_dtype = FSDP_BFLOAT16;
  const ModelPlan plan = plan_model(spec);
  uint64_t most = 0;
  for (const GroupPlan &group : plan.groups) {
    uint64_t bytes = 0;
    for (const uint32_t b : group.buckets)
      if (plan.buckets[b].grad_dtype == FSDP_FLOAT32) bytes += plan.buckets[b].layout.full_count * 2;
    most = std::max(most, bytes);
  }
  EXPECT_GE(plan.wire_bytes, most);
  EXPECT_LT(plan.wire_bytes, most + 2 * buffer_alignment);
  EXPECT_EQ(plan.role_bytes(0, 3)[FSDP_ROLE_REDUCE], without + plan.wire_bytes);
  spec.rounds_before_sending = false;
  EXPECT_EQ(plan_model(spec).wire_bytes, 0u);
}

}  // namespace
}  // namespace fsdp::memory
