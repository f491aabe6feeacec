// SPDX-License-Identifier: Apache-2.0
// What a model plan promises, checked without the code that makes it.
#include "base/error.h"
#include "memory/model_plan.h"

namespace fsdp::memory {
namespace {

std::string check_bucket(const BucketPlan &bucket, const GroupSpec &group) {
  std::vector<layout::TensorSpec> tensors;
  for (const uint32_t index : bucket.params) tensors.push_back(group.params[index].tensor());
  const std::string broken = validate(bucket.layout, tensors);
  return broken.empty() ? broken : format_text("a bucket of group '{}': {}", group.name, broken);
}

std::string check_pool(const char *name, const PoolPlan &pool, std::span<const PoolRequest> requests) {
  const std::string broken = validate(pool, requests);
  return broken.empty() ? broken : format_text("the pool of {}: {}", name, broken);
}

}  // namespace

std::string validate(const ModelPlan &plan, const ModelSpec &spec) {
  for (const BucketPlan &bucket : plan.buckets)
    if (std::string broken = check_bucket(bucket, spec.groups[bucket.group]); !broken.empty()) return broken;
  if (std::string broken = check_pool("gathered weights", plan.gather_pool, plan.visits.gathered); !broken.empty())
    return broken;
  return check_pool("full gradients", plan.grad_pool, plan.visits.grads);
}

}  // namespace fsdp::memory
