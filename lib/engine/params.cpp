// SPDX-License-Identifier: Apache-2.0
#include "engine/params.h"

#include <algorithm>
#include <cstdio>

#include "base/dtype.h"

namespace fsdp::engine {

Params::Params(Runtime &runtime) : runtime_(runtime) {
  if (runtime.teams.outer) outer_ = runtime.teams.outer->create_message_communicator("outer parameters", false);
}

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

// What rank `rank` of the mesh writes of a parameter. Frozen compute weights do not travel over the outer axis: each outer
// rank writes all of its inner rank's slots.
layout::Slice Params::owned(const ParamPlace &place, uint32_t rank) const {
  const memory::BucketPlan &bucket = runtime_.plan.buckets[place.bucket];
  const layout::Mesh &mesh = runtime_.spec.mesh;
  if (bucket.main_is_whole) {
    const layout::Placement &tensor = bucket.layout.tensors[place.tensor];
    return {0, tensor.full_offset, 0, tensor.count, 0};
  }
  const uint32_t slices = mesh.slices();
  if (bucket.frozen) return bucket.layout.slice(place.tensor, mesh.inner(rank) * slices, slices, slices);
  return bucket.layout.slice(place.tensor, mesh.slot(rank), 1, slices);
}

// Is a part of it on other outer ranks only?
bool Params::travels(const ParamPlace &place) const {
  return runtime_.spec.mesh.slices() > 1 && !runtime_.plan.buckets[place.bucket].frozen;
}

// The ranks whose parts make up the parameter: near ones where outer ranks hold the same.
std::vector<uint32_t> Params::holders(const ParamPlace &place) const {
  const layout::Mesh &mesh = runtime_.spec.mesh;
  const uint32_t first = mesh.outer_index(runtime_.teams.all->rank()) * mesh.inner_size;
  std::vector<uint32_t> ranks;
  if (travels(place))
    for (uint32_t slot = 0; slot < mesh.slots(); ++slot) ranks.push_back(mesh.holder(slot));
  else
    for (uint32_t i = 0; i < mesh.inner_size; ++i) ranks.push_back(first + i);
  return ranks;
}

void Params::store(const ParamPlace &place, const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count) {
  const layout::Slice own = owned(place, runtime_.teams.all->rank());
  const uint64_t begin = std::max(first, own.tensor_offset);
  const uint64_t end = std::min(first + count, own.tensor_offset + own.count);
  if (begin >= end) return;
  const Plane &plane = home(place);
  runtime_.context.device().transfer(plane.at(own) + (begin - own.tensor_offset) * dtype_size(plane.dtype), plane.dtype,
              from + (begin - first) * dtype_size(dtype), dtype, end - begin);
}

// Without a change of dtype, so that the bits stay.
void Params::copy(std::byte *to, const std::byte *from, fsdp_dtype dtype, uint64_t count) {
  if (runtime_.context.on_host()) std::memcpy(to, from, count * dtype_size(dtype));
  else runtime_.context.device().transfer(to, dtype, from, dtype, count);
}

void Params::meet(const comm::Tag &tag, device::Stream &caller) {
  const WaitSpan span(runtime_, Awaited::peers);
  const trace::FlightScope barrier(*runtime_.param_flights, "barrier", 0);
  runtime_.control_comm->await_release(runtime_.control_comm->barrier(tag, caller), caller);
}

// The owner fills its part of the staging memory; where it lies on another outer rank, the outer ranks of its inner index
// bring it into their own. One barrier says that it is there, another that everybody has taken it.
template <class Fill, class Take>
void Params::stage(const Piece &piece, Fill fill, Take take) {
  device::Stream &caller = runtime_.context.device().calling_thread();
  // Ranks must agree on all of it, and those that do not get it as text: what may be cut off comes last.
  char text[64];
  std::snprintf(text, sizeof text, "%s from rank %u as %s of %s", piece.call, runtime_.teams.all->world_rank(piece.shown),
                dtype_name(piece.dtype), piece.name);
  const comm::Tag tag{piece.shown | static_cast<uint32_t>(piece.dtype) << 24, text};
  const uint32_t inner = runtime_.spec.mesh.inner(piece.owner);
  const uint64_t offset = inner * runtime_.plan.staging_part_bytes;
  std::byte *own = runtime_.storage->staging()->writable() + offset;
  if (piece.owner == runtime_.teams.all->rank()) fill(own);
  if (outer_ && piece.travels && inner == runtime_.inner().rank()) {
    const WaitSpan span(runtime_, Awaited::peers);
    outer_->broadcast(own, piece.bytes, runtime_.spec.mesh.outer_index(piece.owner), tag, caller);
  }
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
  runtime_.require_eager(call);
  check(group, param_index, dtype, element_count, call);
  const uint32_t ranks = runtime_.teams.all->size();
  if (root != FSDP_EVERY_RANK && (root < 0 || static_cast<uint32_t>(root) >= ranks))
    fail(FSDP_INVALID_ARGUMENT, "{}: root {} is neither FSDP_EVERY_RANK nor in [0, {})", call, root, ranks);
  const bool here = root == FSDP_EVERY_RANK || static_cast<uint32_t>(root) == runtime_.teams.all->rank();
  if (here && !data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for parameter '{}' on rank {}", call,
         runtime_.param(group, param_index).name, runtime_.teams.all->rank());
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  const auto *bytes = static_cast<const std::byte *>(data);
  if (root == FSDP_EVERY_RANK || ranks == 1) {
    store(place, bytes, dtype, 0, element_count);
    return;
  }
  const uint64_t element = dtype_size(dtype);
  const uint64_t step = runtime_.plan.staging_part_bytes / element;
  for (uint64_t first = 0; first < element_count; first += step) {
    const uint64_t count = std::min(step, element_count - first);
    const auto owner = static_cast<uint32_t>(root);
    stage(
        {call, owner, owner, true, count * element, dtype, runtime_.param(group, param_index).name.c_str()},
        [&](std::byte *to) { copy(to, bytes + first * element, dtype, count); },
        [&](const std::byte *from) { store(place, from, dtype, first, count); });
  }
}

void Params::read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count) {
  constexpr auto call = "fsdp_read_param";
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "read_param", &group, element_count * dtype_size(dtype));
  const ParamPlace place = runtime_.place(group, param_index, call);
  check(group, param_index, dtype, element_count, call);
  if (!data) fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL", call);
  device::Device &device = runtime_.context.device();
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  auto *to = static_cast<std::byte *>(data);
  const Plane &plane = home(place);
  const bool whole = runtime_.plan.buckets[place.bucket].main_is_whole;
  if (whole || runtime_.teams.all->size() == 1) {
    device.transfer(to, dtype, plane.at(owned(place, runtime_.teams.all->rank())), plane.dtype, element_count);
    return;
  }
  const uint64_t step = runtime_.plan.staging_part_bytes / dtype_size(plane.dtype);
  for (const uint32_t r : holders(place)) {
    const layout::Slice slice = owned(place, r);
    for (uint64_t done = 0; done < slice.count; done += step) {
      const uint64_t count = std::min(step, slice.count - done);
      const uint32_t shown = travels(place) ? r : runtime_.spec.mesh.inner(r);
      stage(
          {call, r, shown, travels(place), count * dtype_size(plane.dtype), plane.dtype,
           runtime_.param(group, param_index).name.c_str()},
          [&](std::byte *part) {
            copy(part, plane.at(slice) + done * dtype_size(plane.dtype), plane.dtype, count);
          },
          [&](const std::byte *part) {
            device.transfer(to + (slice.tensor_offset + done) * dtype_size(dtype), dtype, part, plane.dtype, count);
          });
    }
  }
}

}  // namespace fsdp::engine
