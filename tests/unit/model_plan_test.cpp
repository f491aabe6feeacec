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

}  // namespace
}  // namespace fsdp::memory
