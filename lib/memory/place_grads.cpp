// SPDX-License-Identifier: Apache-2.0
// Places the planes of gradients: full gradients, main grads, partial sums, sums on their way to the file, and what a
// communicator sends.
#include <algorithm>

#include "base/checked.h"
#include "base/direct_io.h"
#include "base/dtype.h"
#include "memory/place_planes.h"
#include "memory/plane.h"

namespace fsdp::memory {
namespace {

bool keeps_sums_in_place(const ModelSpec &spec, const BucketPlan &bucket) {
  return sums_in_full_grads(spec, spec.groups[bucket.group], bucket.grad_dtype);
}

// Gradients are rounded before they are sent if that makes messages smaller: the sum of rounded addends is the same.
bool is_rounded(const BucketPlan &bucket) {
  return !bucket.frozen && dtype_size(bucket.wire_dtype) < dtype_size(bucket.grad_dtype);
}

fsdp_dtype sent_dtype(const BucketPlan &bucket) { return is_rounded(bucket) ? bucket.wire_dtype : bucket.grad_dtype; }

// Are slices received in a separate buffer? If gradients are rounded into another buffer, their own memory is free for
// received slices, unless the sums are made in it. A single rank receives nothing.
bool is_received_apart(const ModelSpec &spec, const BucketPlan &bucket) {
  if (bucket.frozen || spec.meshes[bucket.mesh].inner_size == 1 || sent_dtype(bucket) == FSDP_FLOAT32) return false;
  return !is_rounded(bucket) || keeps_sums_in_place(spec, bucket);
}

// Places the full gradients of a part one after the other in the part's buffer. If sums stay in place, the main grads
// are the same bytes.
uint64_t add_full_grads(const ModelSpec &spec, ModelPlan &plan, const PartPlan &part) {
  uint64_t size = 0;
  for (const uint32_t b : part.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    PlanePlan grad{.kind = PlaneKind::full_grad, .dtype = bucket.grad_dtype};
    grad.offset = take(size, bucket.bytes(grad, full_grads), full_grads);
    bucket.planes.push_back(grad);
    if (keeps_sums_in_place(spec, bucket))
      bucket.planes.push_back({.kind = PlaneKind::grad,
                               .owned = is_whole(spec, bucket) ? Extent::whole : Extent::shard,
                               .again = true,
                               .offset = grad.offset});
  }
  return size;
}

// Main grads that are whole on every rank are read by peers, so they stay where they are.
void add_main_grads(const ModelSpec &spec, ModelPlan &plan, const GroupPlan &group) {
  for (const uint32_t b : group.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    if (bucket.frozen || keeps_sums_in_place(spec, bucket)) continue;
    PlanePlan grad{.kind = PlaneKind::grad, .extent = Extent::shard, .owned = Extent::shard};
    grad.region = region_at(spec.homes.grad, RegionId::grad);
    if (is_whole(spec, bucket))
      grad.extent = grad.owned = Extent::whole, grad.region = RegionId::kept_grads;
    else if (spec.meshes[bucket.mesh].outer == layout::OuterAxis::optim)
      grad.extent = Extent::group;
    place_kept(plan, bucket, grad, "main grads");
  }
}

// Places the buffers for sums that go to the file. All parts use the same buffers in turn. If the outer axis sums a
// whole group at once, the group's parts lie one after the other in a buffer.
void add_grad_turns(const ModelSpec &spec, ModelPlan &plan, uint32_t g) {
  const uint32_t mesh = spec.groups[g].mesh;
  const bool by_group =
      spec.meshes[mesh].outer == layout::OuterAxis::replicate || spec.meshes[mesh].outer == layout::OuterAxis::optim;
  RegionPlan &region = plan.region(RegionId::grad_turns, mesh);
  uint64_t size = 0, largest = 0;
  for (const PartPlan &part : plan.parts_of(plan.groups[g])) {
    if (!by_group) size = 0;
    for (const uint32_t b : part.buckets) {
      BucketPlan &bucket = plan.buckets[b];
      const auto grad = std::ranges::find_if(
          bucket.planes, [](const PlanePlan &plane) { return plane.kind == PlaneKind::grad && plane.in_file(); });
      if (grad == bucket.planes.end()) continue;
      PlanePlan turn = *grad;
      turn.kind = PlaneKind::grad_turn, turn.region = RegionId::grad_turns;
      turn.offset = take(size, bucket.bytes(turn, region.what), region.what, io_alignment);
      size = round_up(size, io_alignment, region.what);
      for (; turn.index < partial_turns; ++turn.index) bucket.planes.push_back(turn);
    }
    largest = std::max(largest, size);
  }
  region.bytes = std::max(region.bytes, checked_multiply(partial_turns, largest, region.what));
}

// Places the inner sums that the outer axis adds to main grads slot by slot. All parts use the same buffers in turn.
void add_partial_sums(const ModelSpec &spec, ModelPlan &plan, const PartPlan &part) {
  const GroupSpec &group = spec.groups[part.group];
  if (spec.mesh_of(group).outer != layout::OuterAxis::shard) return;
  RegionPlan &region = plan.region(RegionId::partial, group.mesh);
  uint64_t size = 0;
  for (const uint32_t b : part.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    if (keeps_sums_in_place(spec, bucket)) continue;
    PlanePlan sums{
        .kind = PlaneKind::partial, .extent = Extent::group, .owned = Extent::group, .region = RegionId::partial};
    sums.offset = take(size, bucket.bytes(sums, region.what), region.what);
    for (; sums.index < partial_turns; ++sums.index) bucket.planes.push_back(sums);
  }
  region.bytes = std::max(region.bytes,
                          checked_multiply(partial_turns, round_up(size, buffer_alignment, region.what), region.what));
}

}  // namespace

void place_grads(const ModelSpec &spec, ModelPlan &plan, uint32_t g) {
  GroupPlan &group = plan.groups[g];
  group.trainable = spec.groups[g].trainable();
  group.persistent_grad = group.trainable && spec.groups[g].reduce_policy == FSDP_REDUCE_POLICY_LAST;
  for (PartPlan &part : plan.parts_of(group)) {
    const uint64_t size = add_full_grads(spec, plan, part);
    add_partial_sums(spec, plan, part);
    // In debug mode the part has whole pages, so that access to it can be taken away separately.
    part.full_grad.bytes = spec.debug ? round_up(size, page_bytes, full_grads) : size;
    part.full_grad.region = group.persistent_grad ? RegionId::kept_grads : RegionId::lent_grads;
    part.full_grad.mesh = spec.groups[g].mesh;
  }
  add_main_grads(spec, plan, group);
  add_grad_turns(spec, plan, g);
  if (!group.persistent_grad) return;
  for (PartPlan &part : plan.parts_of(group))
    place_full_grad(
        plan, part,
        take(plan.region(RegionId::kept_grads, part.full_grad.mesh), part.full_grad.bytes, grad_alignment(spec)));
}

// Places the buffer into which the communicator rounds gradients before it sends them, and the buffer for gradients of
// other ranks. All parts share the two buffers, because a communicator that rounds or receives apart runs all reduces
// on one stream.
void place_sent(const ModelSpec &spec, ModelPlan &plan, const PartPlan &part) {
  if (!spec.communicates(spec.mesh_of(spec.groups[part.group]))) return;
  uint64_t sizes[2] = {};
  const auto add = [&](BucketPlan &bucket, PlanePlan plane, uint64_t &size) {
    plane.offset = take(size, bucket.bytes(plane, plan.region(plane.region).what), plan.region(plane.region).what);
    bucket.planes.push_back(plane);
  };
  for (const uint32_t b : part.buckets) {
    BucketPlan &bucket = plan.buckets[b];
    if (spec.rounds_gradients_before_sending && is_rounded(bucket))
      add(bucket, {.kind = PlaneKind::rounded, .dtype = bucket.wire_dtype, .region = RegionId::rounded}, sizes[0]);
    if (spec.receives_slices && is_received_apart(spec, bucket))
      add(bucket, {.kind = PlaneKind::received, .dtype = sent_dtype(bucket), .region = RegionId::received}, sizes[1]);
  }
  const auto enlarge = [&](RegionId id, uint64_t size) {
    RegionPlan &region = plan.region(id);
    region.bytes = std::max(region.bytes, round_up(size, buffer_alignment, region.what));
  };
  enlarge(RegionId::rounded, sizes[0]);
  enlarge(RegionId::received, sizes[1]);
}

void drop_received(ModelPlan &plan) {
  for (BucketPlan &bucket : plan.buckets)
    std::erase_if(bucket.planes, [](const PlanePlan &plane) { return plane.kind == PlaneKind::received; });
  plan.region(RegionId::received).bytes = 0;
}

}  // namespace fsdp::memory
