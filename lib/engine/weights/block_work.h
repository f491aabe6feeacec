// SPDX-License-Identifier: Apache-2.0
// The arguments of kernels that make planes of whole blocks, for publishing and for loading.
#pragma once

#include <initializer_list>
#include <variant>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

using BlockWork = std::variant<device::Mxfp8Quantize, device::Fp8BlockQuantize>;

// Rows of the parameter that this rank has, made from adjacent fp32 numbers. It says where they are in the planes: the
// elements, and the scales of any form.
struct BlockRows {
  const Bucket &bucket;
  const memory::ParamSpec &param;
  layout::Slice elements, scales;
  const float *from;
};
BlockWork make_block_work(const memory::ModelSpec &spec, const BlockRows &rows);

void quantize(device::Stream &stream, const BlockWork &work);

// The one walk over everything that this rank keeps: its part of every parameter, in every plane of the wanted kinds.

struct PlaneSlice {
  const Group &group;
  uint32_t param_index;
  uint32_t ordinal;  // number of the parameter in the model
  const Bucket &bucket;
  uint32_t tensor;  // index in the bucket
  const Plane &plane;
  layout::Slice slice;  // the part that this rank owns; its count is 0 if it owns nothing

  const memory::ParamSpec &param() const { return group.spec->params[param_index]; }
  std::byte *data() const { return plane.at(slice); }
};

// Visits group by group in the order of declaration, including frozen parameters. In a group it goes by parameter, and
// then by kind in the plan's order.
template <class Visit>
void for_each_slice(const Runtime &runtime, std::initializer_list<PlaneKind> kinds, Visit &&visit) {
  uint32_t ordinal = 0;
  for (const Group &group : runtime.groups)
    for (uint32_t p = 0; p < group.places.size(); ++p, ++ordinal) {
      const ParamPlace &place = group.places[p];
      const Bucket &bucket = runtime.bucket(place);
      for (const Plane &plane : bucket.planes)
        for (const PlaneKind kind : kinds)
          if (plane.plan->kind == kind)
            visit(PlaneSlice{group, p, ordinal, bucket, place.tensor, plane,
                             runtime.slice_of(plane, place.tensor, plane.plan->owned)});
    }
}

}  // namespace fsdp::engine
