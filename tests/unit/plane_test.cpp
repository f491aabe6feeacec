// SPDX-License-Identifier: Apache-2.0
// Planes of a bucket are found by kind and index, and the indices of a kind may have gaps.
#include "engine/runtime/plane.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace fsdp::engine {
namespace {

// Makes a bucket with main weights and with states 2 and 4 of a model. The model's other states do not belong to the
// bucket.
struct BucketWithGaps {
  BucketWithGaps() {
    plan.group = 7;
    plan.planes = {
        {.kind = PlaneKind::main}, {.kind = PlaneKind::state, .index = 2}, {.kind = PlaneKind::state, .index = 4}};
    bucket.plan = &plan;
    for (const memory::PlanePlan &plane : plan.planes) bucket.planes.emplace_back().plan = &plane;
    bucket.first[static_cast<size_t>(PlaneKind::main)] = &bucket.planes[0];
    bucket.first[static_cast<size_t>(PlaneKind::state)] = &bucket.planes[1];
  }

  memory::BucketPlan plan;
  Bucket bucket;
};

TEST(Bucket, FindsPlanesByTheirIndex) {
  const BucketWithGaps made;
  EXPECT_EQ(&made.bucket.plane(PlaneKind::main), &made.bucket.planes[0]);
  EXPECT_EQ(&made.bucket.plane(PlaneKind::state, 2), &made.bucket.planes[1]);
  EXPECT_EQ(&made.bucket.plane(PlaneKind::state, 4), &made.bucket.planes[2]);
}

TEST(Bucket, NamesAPlaneThatItDoesNotHave) {
  const BucketWithGaps made;
  const auto message = [&](PlaneKind kind, uint32_t index) {
    const auto error = capture_error([&] { made.bucket.plane(kind, index); });
    return error && error->status == FSDP_INTERNAL ? error->message : "";
  };
  EXPECT_EQ(message(PlaneKind::main, 1), "a bucket of group number 7 has no plane of kind 4 with index 1");
  EXPECT_EQ(message(PlaneKind::state, 0), "a bucket of group number 7 has no plane of kind 6 with index 0");
  EXPECT_EQ(message(PlaneKind::state, 3), "a bucket of group number 7 has no plane of kind 6 with index 3");
  EXPECT_EQ(message(PlaneKind::state, 5), "a bucket of group number 7 has no plane of kind 6 with index 5");
  EXPECT_EQ(message(PlaneKind::rest, 0), "a bucket of group number 7 has no plane of kind 5 with index 0");
}

}  // namespace
}  // namespace fsdp::engine
