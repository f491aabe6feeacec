// SPDX-License-Identifier: Apache-2.0
// The one walk over what this rank keeps: its part of every parameter in every plane of the kinds that are asked for.
#pragma once

#include <initializer_list>

#include "engine/runtime.h"

namespace fsdp::engine {

struct PlaneSlice {
  const Group &group;
  uint32_t param_index;
  uint32_t ordinal;  // of the parameter in the model
  const Bucket &bucket;
  uint32_t tensor;  // in the bucket
  const Plane &plane;
  layout::Slice slice;  // what of it this rank owns; count 0 where it owns nothing

  const memory::ParamSpec &param() const { return group.spec->params[param_index]; }
  std::byte *data() const { return plane.at(slice); }
};

// Group by group in the order of declaration, frozen parameters too; by parameter, then by kind in the plan's order.
template <class Visit>
void for_each_slice(const Runtime &runtime, std::initializer_list<PlaneKind> kinds, Visit &&visit) {
  const layout::Mesh &mesh = runtime.spec.mesh;
  const uint32_t rank = runtime.teams.all->rank();
  uint32_t ordinal = 0;
  for (const Group &group : runtime.groups)
    for (uint32_t p = 0; p < group.places.size(); ++p, ++ordinal) {
      const ParamPlace &place = group.places[p];
      const Bucket &bucket = runtime.bucket(place);
      for (const Plane &plane : bucket.planes)
        for (const PlaneKind kind : kinds)
          if (plane.plan->kind == kind)
            visit(PlaneSlice{group, p, ordinal, bucket, place.tensor, plane,
                             memory::slice_of(*plane.layout, place.tensor, plane.plan->owned, mesh, rank)});
    }
}

}  // namespace fsdp::engine
