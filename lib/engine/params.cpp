// SPDX-License-Identifier: Apache-2.0
#include "engine/params.h"

#include <algorithm>
#include <cstdio>

#include "base/dtype.h"

namespace fsdp::engine {

void Params::check(const Group &group, uint64_t param_index, fsdp_dtype dtype, uint64_t element_count, const char *call) {
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (!dtype_size(dtype)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a dtype", call, dtype);
  if (element_count != param.element_count)
    fail(FSDP_INVALID_ARGUMENT, "{}: parameter '{}' of group '{}' has {} elements, element_count is {}", call, param.name,
         group.name(), param.element_count, element_count);
}

const Plane &Params::home(const ParamPlace &place) const {
  const Bucket &bucket = runtime_.bucket(place);
  return bucket.plan->frozen ? bucket.compute : bucket.main;
}

layout::Slice Params::owned(const ParamPlace &place, uint32_t rank) const {
  const memory::BucketPlan &bucket = runtime_.plan.buckets[place.bucket];
  if (!bucket.main_is_whole) return bucket.layout.slice(place.tensor, rank);
  const layout::Placement &tensor = bucket.layout.tensors[place.tensor];
  return {0, tensor.full_offset, 0, tensor.count};
}

void Params::store(const ParamPlace &place, const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count) {
  const layout::Slice own = owned(place, runtime_.team->rank());
  const uint64_t begin = std::max(first, own.tensor_offset);
  const uint64_t end = std::min(first + count, own.tensor_offset + own.count);
  if (begin >= end) return;
  const Plane &plane = home(place);
  device::Stream &caller = runtime_.context.device().caller_stream(nullptr);
  caller.cast(plane.at(own) + (begin - own.tensor_offset) * dtype_size(plane.dtype), plane.dtype,
              from + (begin - first) * dtype_size(dtype), dtype, end - begin);
}

void Params::meet(const comm::Tag &tag, device::Stream &caller) {
  const WaitSpan span(runtime_, Awaited::peers);
  const trace::FlightScope barrier(*runtime_.param_flights, "barrier", 0);
  runtime_.control_comm->await_release(runtime_.control_comm->barrier(tag, caller), caller);
}

// One barrier says that the owner has filled its part, another that everybody has taken it.
template <class Fill, class Take>
void Params::stage(const char *call, uint32_t owner, fsdp_dtype dtype, const char *name, Fill fill, Take take) {
  device::Stream &caller = runtime_.context.device().caller_stream(nullptr);
  // Ranks must agree on all of it, and those that do not get it as text: what may be cut off comes last.
  char text[64];
  std::snprintf(text, sizeof text, "%s from rank %u as %s of %s", call, runtime_.team->world_rank(owner), dtype_name(dtype), name);
  const comm::Tag tag{owner | static_cast<uint32_t>(dtype) << 24, text};
  const uint64_t offset = owner * runtime_.plan.staging_part_bytes;
  if (owner == runtime_.team->rank()) fill(runtime_.storage->staging()->writable() + offset);
  meet(tag, caller);
  take(runtime_.storage->staging()->data() + offset);
  meet(tag, caller);
}

void Params::load(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  constexpr auto call = "fsdp_load_param";
  const CallSpan span(runtime_, "load_param", &group, element_count * dtype_size(dtype));
  const ParamPlace place = runtime_.place(group, param_index, call);
  runtime_.require_window(call);
  check(group, param_index, dtype, element_count, call);
  const uint32_t ranks = runtime_.team->size();
  if (root != FSDP_EVERY_RANK && (root < 0 || static_cast<uint32_t>(root) >= ranks))
    fail(FSDP_INVALID_ARGUMENT, "{}: root {} is neither FSDP_EVERY_RANK nor in [0, {})", call, root, ranks);
  const bool here = root == FSDP_EVERY_RANK || static_cast<uint32_t>(root) == runtime_.team->rank();
  if (here && !data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for parameter '{}' on rank {}", call,
         runtime_.param(group, param_index).name, runtime_.team->rank());
  const auto *bytes = static_cast<const std::byte *>(data);
  if (root == FSDP_EVERY_RANK || ranks == 1) {
    store(place, bytes, dtype, 0, element_count);
    return;
  }
  const uint64_t element = dtype_size(dtype);
  const uint64_t step = runtime_.plan.staging_part_bytes / element;
  for (uint64_t first = 0; first < element_count; first += step) {
    const uint64_t count = std::min(step, element_count - first);
    stage(
        call, static_cast<uint32_t>(root), dtype, runtime_.param(group, param_index).name.c_str(),
        [&](std::byte *to) { std::memcpy(to, bytes + first * element, count * element); },
        [&](const std::byte *from) { store(place, from, dtype, first, count); });
  }
}

void Params::read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count) {
  constexpr auto call = "fsdp_read_param";
  const CallSpan span(runtime_, "read_param", &group, element_count * dtype_size(dtype));
  const ParamPlace place = runtime_.place(group, param_index, call);
  check(group, param_index, dtype, element_count, call);
  if (!data) fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL", call);
  device::Stream &caller = runtime_.context.device().caller_stream(nullptr);
  auto *to = static_cast<std::byte *>(data);
  const Plane &plane = home(place);
  const bool whole = runtime_.plan.buckets[place.bucket].main_is_whole;
  if (whole || runtime_.team->size() == 1) {
    caller.cast(to, dtype, plane.at(owned(place, runtime_.team->rank())), plane.dtype, element_count);
    return;
  }
  const uint64_t step = runtime_.plan.staging_part_bytes / dtype_size(plane.dtype);
  for (uint32_t r = 0; r < runtime_.team->size(); ++r) {
    const layout::Slice slice = owned(place, r);
    for (uint64_t done = 0; done < slice.count; done += step) {
      const uint64_t count = std::min(step, slice.count - done);
      stage(
          call, r, plane.dtype, runtime_.param(group, param_index).name.c_str(),
          [&](std::byte *part) {
            std::memcpy(part, plane.at(slice) + done * dtype_size(plane.dtype), count * dtype_size(plane.dtype));
          },
          [&](const std::byte *part) {
            caller.cast(to + (slice.tensor_offset + done) * dtype_size(dtype), dtype, part, plane.dtype, count);
          });
    }
  }
}

}  // namespace fsdp::engine
