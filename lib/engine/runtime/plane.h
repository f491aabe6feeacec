// SPDX-License-Identifier: Apache-2.0
// Where the planes of a bucket are in memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "device/device.h"
#include "memory/model_plan.h"
#include "transport/team.h"

namespace fsdp::engine {

using memory::Extent;
using memory::PlaneKind;

// The memory of one row of the region table. In regions of parts and in common regions, `data`, `view` and `shown` are
// views of the same bytes: for writing, for reading, and for the caller. The caller may have written values into
// `shown` that the other views do not have.
struct Region {
  std::shared_ptr<device::Memory> memory;  // private memory; NULL if the caller passed it in
  std::shared_ptr<transport::Arena> arena;
  std::byte *data = nullptr;         // this rank's part, where this rank writes
  const std::byte *view = nullptr;   // this rank's part, where this rank reads
  const std::byte *shown = nullptr;  // this rank's part, where the caller reads
  uint64_t arena_offset = 0;         // offset of rank 0's part
  uint64_t stride = 0;               // distance to the next rank's part; 0: one part for all

  transport::Part part() const { return {data, arena.get(), arena_offset, stride}; }
};

// One stored form of elements, on this rank.
struct Plane {
  const memory::PlanePlan *plan = nullptr;
  const layout::FlatLayout *layout = nullptr;  // layout of its elements
  std::byte *data = nullptr;
  const std::byte *view = nullptr;
  const std::byte *shown = nullptr;
  transport::Part part;  // the memory, starting at the first element, for collectives

  fsdp_dtype dtype() const { return plan->dtype; }
  std::byte *element(uint64_t index) const { return data + index * dtype_size(plan->dtype); }
  float *fp32(uint64_t index = 0) const { return reinterpret_cast<float *>(data) + index; }
  uint64_t index_of(const layout::Slice &slice) const {
    switch (plan->extent) {
      case Extent::whole: return slice.full_offset;
      case Extent::group: return slice.group_offset;
      default: return slice.shard_offset;
    }
  }
  std::byte *at(const layout::Slice &slice) const { return element(index_of(slice)); }
  // The index at which the slices of an inner rank's slots begin in a sub-bucket. With Extent::shard, the index at
  // which the kept slice begins.
  uint64_t index_of(const layout::SubBucket &sub, uint32_t slices, uint32_t inner_rank) const {
    switch (plan->extent) {
      case Extent::whole: return sub.full_offset + inner_rank * sub.shard_count * slices;
      case Extent::group: return sub.shard_offset * slices;
      default: return sub.shard_offset;
    }
  }
};

struct Bucket {
  const memory::BucketPlan *plan = nullptr;
  std::vector<Plane> planes;                               // in the order of the plan
  std::array<const Plane *, memory::plane_kinds> first{};  // first plane of each kind; NULL: there is none

  bool has(PlaneKind kind) const { return first[static_cast<size_t>(kind)] != nullptr; }
  // The planes of a kind follow one another, but their indices may have gaps: a parameter need not have all states.
  // Throws INTERNAL if the bucket has no such plane.
  const Plane &plane(PlaneKind kind, uint32_t index = 0) const {
    const Plane *found = first[static_cast<size_t>(kind)];
    for (const Plane *const end = planes.data() + planes.size(); found && found != end; ++found) {
      if (found->plan->kind != kind) break;
      if (found->plan->index == index) return *found;
    }
    fail(FSDP_INTERNAL, "a bucket of group number {} has no plane of kind {} with index {}", plan->group,
         static_cast<uint32_t>(kind), index);
  }
  // The gathered copy of a published plane, in a buffer of the group.
  const Plane &gathered(PlaneKind published, uint32_t form, uint32_t slot) const {
    return *std::ranges::find_if(planes, [&](const Plane &plane) {
      return plane.plan->kind == memory::gathered_from(published) && plane.plan->index == form &&
             plane.plan->slot == slot;
    });
  }
  // The memory of main grads: a buffer of this turn if they are at home in a file.
  const Plane &main_grad(uint32_t turn) const {
    return has(PlaneKind::grad_turn) ? plane(PlaneKind::grad_turn, turn) : plane(PlaneKind::grad);
  }
  const Plane &owned_plane() const { return plane(plan->owned_plane().kind); }
  // Does every rank have whole main weights, main grads and states?
  bool is_whole() const { return plan->owned_plane().owned == Extent::whole; }
};

}  // namespace fsdp::engine
