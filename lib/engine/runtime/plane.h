// SPDX-License-Identifier: Apache-2.0
// Where the planes of a bucket are in memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "base/dtype.h"
#include "device/device.h"
#include "memory/model_plan.h"
#include "transport/team.h"

namespace fsdp::engine {

using memory::Extent;
using memory::PlaneKind;

// The memory of a row of the region table. Of parts and common ones, data, view and shown are the same bytes: to write,
// to read, and for the caller, which may have written there what is in no other view.
struct Region {
  std::shared_ptr<device::Memory> memory;  // private; NULL if the caller handed it in
  std::shared_ptr<transport::Arena> arena;
  std::byte *data = nullptr;         // where this rank writes: its part
  const std::byte *view = nullptr;   // where it reads that
  const std::byte *shown = nullptr;  // where the caller does
  uint64_t arena_offset = 0;         // of rank 0's part
  uint64_t stride = 0;               // to the next rank's part; 0: one for all

  transport::Part part() const { return {data, arena.get(), arena_offset, stride}; }
};

// One stored form of elements on this rank.
struct Plane {
  const memory::PlanePlan *plan = nullptr;
  const layout::FlatLayout *layout = nullptr;  // of its numbers
  std::byte *data = nullptr;
  const std::byte *view = nullptr;
  const std::byte *shown = nullptr;
  transport::Part part;  // from the first element on, for collectives

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
  // Where the slices of all slots of an inner rank begin in a sub-bucket; with Extent::shard: of the one that is kept.
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
  std::vector<Plane> planes;                               // as in the plan
  std::array<const Plane *, memory::plane_kinds> first{};  // of each kind; NULL: there is none

  bool has(PlaneKind kind) const { return first[static_cast<size_t>(kind)] != nullptr; }
  const Plane &plane(PlaneKind kind, uint32_t index = 0) const { return first[static_cast<size_t>(kind)][index]; }
  // What is gathered of a published plane into a buffer of the group.
  const Plane &gathered(PlaneKind published, uint32_t form, uint32_t slot) const {
    return *std::ranges::find_if(planes, [&](const Plane &plane) {
      return plane.plan->kind == memory::gathered_from(published) && plane.plan->index == form &&
             plane.plan->slot == slot;
    });
  }
  const Plane &home() const { return plane(plan->home().kind); }
  // Whole main weights, main grads and states on every rank.
  bool is_whole() const { return plan->home().owned == Extent::whole; }
};

}  // namespace fsdp::engine
