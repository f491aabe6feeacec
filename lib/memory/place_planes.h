// SPDX-License-Identifier: Apache-2.0
// Gives every plane of a model its place in a region. Inside the memory room only.
#pragma once

#include <string>

#include "base/error.h"
#include "memory/grad_parts.h"
#include "memory/model_plan.h"

namespace fsdp::memory {

// An error of the body says of what it is. A text only then: there are thousands of them.
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

// The rows of the region table that a model of this kind has, without bytes.
void name_regions(ModelPlan &plan);
// Of one group whose buckets are made, in this order.
void place_compute(const ModelSpec &spec, ModelPlan &plan, uint32_t group);
void place_grads(const ModelSpec &spec, ModelPlan &plan, uint32_t group);
void place_sent(const ModelSpec &spec, ModelPlan &plan, const PartPlan &part);
void place_optimizer_planes(const ModelSpec &spec, ModelPlan &plan, BucketPlan &bucket);
// Of all groups, when they have their places: what takes turns.
void place_pools(const ModelSpec &spec, const GradCut &cut, ModelPlan &plan);
// What no plane lies in: scratch, staging, messages.
void size_scratch(const ModelSpec &spec, ModelPlan &plan);

}  // namespace fsdp::memory
