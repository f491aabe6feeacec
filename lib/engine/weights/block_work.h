// SPDX-License-Identifier: Apache-2.0
// What kernels are given to make the planes of whole blocks: of what is published, and of what is loaded.
#pragma once

#include <initializer_list>
#include <variant>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

using BlockWork = std::variant<device::Mxfp8Quantize, device::Fp8BlockQuantize>;

// Rows of the parameter that this rank has, from fp32 numbers that lie behind each other. Where they are in its planes:
// elements, and scales in any form.
struct BlockRows {
  const Bucket &bucket;
  const memory::ParamSpec &param;
  layout::Slice elements, scales;
  const float *from;
};
BlockWork make_block_work(const memory::ModelSpec &spec, const BlockRows &rows);

void quantize(device::Stream &stream, const BlockWork &work);

// The one walk over what this rank keeps: its part of every parameter in every plane of the kinds that are asked for.

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
