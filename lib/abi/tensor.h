// SPDX-License-Identifier: Apache-2.0
// Views of the library's memory, as callers get them.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>

#include "abi/options.h"
#include "base/dtype.h"
#include "engine/context.h"
#include "engine/group.h"
#include "fsdp.h"

namespace fsdp::abi {

// shape lives as long as what the view belongs to.
inline fsdp_tensor view_of(engine::Context &context, void *data, std::span<const uint64_t> shape, fsdp_dtype dtype,
                           uint32_t flags) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  view.data = data;
  view.shape = shape.data();
  view.element_count = std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
  view.dimension_count = static_cast<uint32_t>(shape.size());
  view.dtype = dtype;
  view.element_size = static_cast<uint32_t>(dtype_size(dtype));
  view.flags = flags;
  view.device = context.device_kind();
  view.device_index = std::max(0, context.device().index());
  return view;
}

// A caller's array of views, one for each parameter of a group.
inline void check_tensors(const engine::Group &group, const fsdp_tensor *tensors, uint64_t count, uint64_t stride,
                          const char *field, const char *call) {
  check_stride<fsdp_tensor>(stride, call, format_text("{}_stride", field).c_str(), "fsdp_tensor");
  if (count != group.places.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: {}_count is {}, group '{}' has {} parameters", call, field, count, group.name(),
         group.places.size());
  if (count && !tensors) fail(FSDP_INVALID_ARGUMENT, "{}: {}s is NULL, {}_count is {}", call, field, field, count);
}

}  // namespace fsdp::abi
