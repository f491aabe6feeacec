// SPDX-License-Identifier: Apache-2.0
// What a model plan promises, checked without the code that makes it.
#include <algorithm>
#include <tuple>

#include "base/dtype.h"
#include "base/error.h"
#include "memory/model_plan.h"
#include "memory/quantization.h"

namespace fsdp::memory {
namespace {

std::string check_bucket(const BucketPlan &bucket, const GroupSpec &group) {
  std::vector<layout::TensorSpec> tensors;
  for (const uint32_t index : bucket.params) tensors.push_back(tensor_of(group.params[index]));
  std::string broken = validate(bucket.layout, tensors);
  if (broken.empty() && bucket.quantization)
    broken = scales_whole_tensors(bucket.quantization) ? validate_tensor_scales(bucket.layout, *bucket.scale_layout)
                                                       : validate_scales(bucket.layout, *bucket.scale_layout, tensors);
  return broken.empty() ? broken : format_text("a bucket of group '{}': {}", group.name, broken);
}

std::string check_pool(const char *name, const PoolPlan &pool, std::span<const PoolRequest> requests) {
  const std::string broken = validate(pool, requests);
  return broken.empty() ? broken : format_text("the pool of {}: {}", name, broken);
}

// All planes that lie in a region for ever; pools and buffers that take turns are looked at by themselves.
bool lies_alone(const PlanePlan &plane) {
  return !plane.again && plane.region != RegionId::gathered && plane.region != RegionId::lent_grads &&
         plane.region != RegionId::partial && plane.region != RegionId::rounded && plane.region != RegionId::received;
}

struct Lies {
  RegionId region;
  uint64_t begin, end;
  const BucketPlan *bucket;
};

std::string check_planes(const ModelPlan &plan, const ModelSpec &spec) {
  std::vector<Lies> all;
  for (const BucketPlan &bucket : plan.buckets)
    for (const PlanePlan &plane : bucket.planes) {
      const RegionPlan &region = plan.region(plane.region);
      const uint64_t bytes = bucket.count(plane) * dtype_size(plane.dtype);
      if (plane.offset > region.bytes || bytes > region.bytes - plane.offset)
        return format_text("a plane of group '{}' ends at byte {} of {}, which have {}", spec.groups[bucket.group].name,
                           plane.offset + bytes, region.what, region.bytes);
      const uint64_t turn = region.bytes / partial_turns;
      if (plane.kind == PlaneKind::partial &&
          (plane.offset < plane.index * turn || plane.offset + bytes > (plane.index + 1) * turn))
        return format_text("the partial sums of turn {} of group '{}' lie in those of another turn", plane.index,
                           spec.groups[bucket.group].name);
      if (lies_alone(plane)) all.push_back({plane.region, plane.offset, plane.offset + bytes, &bucket});
    }
  std::ranges::stable_sort(all, {}, [](const Lies &one) { return std::tuple(one.region, one.begin, one.end); });
  for (size_t i = 1; i < all.size(); ++i)
    if (all[i].region == all[i - 1].region && all[i].begin < all[i - 1].end)
      return format_text("planes of the groups '{}' and '{}' share bytes of {}",
                         spec.groups[all[i - 1].bucket->group].name, spec.groups[all[i].bucket->group].name,
                         plan.region(all[i].region).what);
  return {};
}

}  // namespace

std::string validate(const ModelPlan &plan, const ModelSpec &spec) {
  for (const BucketPlan &bucket : plan.buckets)
    if (std::string broken = check_bucket(bucket, spec.groups[bucket.group]); !broken.empty()) return broken;
  if (std::string broken = check_planes(plan, spec); !broken.empty()) return broken;
  if (std::string broken = check_pool("gathered weights", plan.gather_pool, plan.visits.gathered); !broken.empty())
    return broken;
  return check_pool("full gradients", plan.grad_pool, plan.visits.grads);
}

}  // namespace fsdp::memory
