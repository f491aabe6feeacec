// SPDX-License-Identifier: Apache-2.0
// Gives every plane of a model its place in a region. Inside the memory room only.
#pragma once

#include <string>

#include "base/error.h"
#include "memory/grad_parts.h"
#include "memory/model_plan.h"

namespace fsdp::memory {

// Runs the body and prefixes the text of its error with `kind` and `name`. The prefix is formatted only on an error,
// because there are thousands of calls.
template <class Body>
void plan_part(const char *kind, const std::string &name, Body &&body) {
  try {
    body();
  } catch (Error &error) {
    error.message = format_text("{} '{}': {}", kind, name, error.message);
    throw;
  }
}

template <class Body>
void plan_part(const char *what, Body &&body) {
  try {
    body();
  } catch (Error &error) {
    error.message = format_text("{}: {}", what, error.message);
    throw;
  }
}

inline constexpr auto full_grads = "full gradients";

// Appends `bytes` bytes, aligned, at `end`; returns their offset. `what` names them in errors.
uint64_t take(uint64_t &end, uint64_t bytes, const char *what, uint64_t alignment = buffer_alignment);
uint64_t take(RegionPlan &region, uint64_t bytes, uint64_t alignment = buffer_alignment);
bool is_whole(const ModelSpec &spec, const BucketPlan &bucket);
// Adds a plane at the end of its region. A plane in the file has whole pages of its own.
void place_kept(ModelPlan &plan, BucketPlan &bucket, PlanePlan plane, const char *what);
RegionId region_at(fsdp_home home, RegionId on_device);
uint64_t grad_alignment(const ModelSpec &spec);
void place_full_grad(ModelPlan &plan, PartPlan &part, uint64_t offset);

// Fills the rows of the region table, without their bytes.
void name_regions(ModelPlan &plan, size_t meshes);
// These functions place the planes of one group, whose buckets exist already. They are called in this order.
void place_compute(const ModelSpec &spec, ModelPlan &plan, uint32_t group);
void place_grads(const ModelSpec &spec, ModelPlan &plan, uint32_t group);
void place_sent(const ModelSpec &spec, ModelPlan &plan, const PartPlan &part);
void place_optimizer_planes(const ModelSpec &spec, ModelPlan &plan, BucketPlan &bucket);
// Places the buffers that take turns. Called when all groups have their places.
void place_pools(const ModelSpec &spec, const GradCut &cut, ModelPlan &plan);
// Sets the sizes of regions without planes: scratch, staging, messages.
void size_scratch(const ModelSpec &spec, ModelPlan &plan);

}  // namespace fsdp::memory
