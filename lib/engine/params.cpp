// SPDX-License-Identifier: Apache-2.0
#include "engine/params.h"

#include <algorithm>
#include <cstdio>

#include "base/dtype.h"

namespace fsdp::engine {

Params::Params(Runtime &runtime) : runtime_(runtime) {
  if (runtime.teams.outer)
    outer_ = runtime.teams.outer->create_collectives("outer parameters", comm::Shape::messages(false));
}

void Params::check(const Group &group, uint64_t param_index, fsdp_dtype dtype, uint64_t element_count,
                   const char *call) {
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (!is_number(dtype)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a dtype", call, dtype);
  if (element_count != param.element_count)
    fail(FSDP_INVALID_ARGUMENT, "{}: parameter '{}' of group '{}' has {} elements, element_count is {}", call,
         param.name, group.name(), param.element_count, element_count);
}

std::optional<uint32_t> Params::find_root(int32_t root, const char *call) const {
  if (root == FSDP_EVERY_RANK) return std::nullopt;
  const auto &ranks = runtime_.spec.mesh.ranks;
  const auto found = root < 0 ? ranks.end() : std::find(ranks.begin(), ranks.end(), static_cast<uint32_t>(root));
  if (found == ranks.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: root {} is neither FSDP_EVERY_RANK nor one of the {} ranks of the model's mesh",
         call, root, ranks.size());
  return static_cast<uint32_t>(found - ranks.begin());
}

layout::Slice Params::owned(const ParamPlace &place, uint32_t rank) const {
  const memory::BucketPlan &bucket = runtime_.plan.buckets[place.bucket];
  return memory::slice_of(bucket.layout, place.tensor, bucket.home().owned, runtime_.spec.mesh, rank);
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

void Params::store(const Tensor &tensor, const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count) {
  const layout::Slice own = owned(tensor.place, runtime_.teams.all->rank());
  const uint64_t begin = std::max(first, own.tensor_offset);
  const uint64_t end = std::min(first + count, own.tensor_offset + own.count);
  if (begin >= end) return;
  const Plane &plane = tensor.plane;
  runtime_.context.device().transfer(plane.at(own) + (begin - own.tensor_offset) * dtype_size(plane.dtype()),
                                     plane.dtype(), from + (begin - first) * dtype_size(dtype), dtype, end - begin);
}

// Without a change of dtype, so that the bits stay.
void Params::copy(std::byte *to, const std::byte *from, fsdp_dtype dtype, uint64_t count) {
  runtime_.context.device().transfer(to, dtype, from, dtype, count);
}

void Params::meet(const comm::Tag &tag, device::Stream &caller) {
  const WaitSpan span(runtime_, WaitKind::peers);
  const trace::FlightScope barrier(*runtime_.flights.params, "barrier", 0);
  runtime_.control_comm->await_release(runtime_.control_comm->barrier(tag, caller), caller);
}

// The owner fills its part of the staging memory; where it lies on another outer rank, the outer ranks of its inner
// index bring it into their own. One barrier says that it is there, another that everybody has taken it.
template <class Fill, class Take>
void Params::stage(const ShownBytes &piece, Fill fill, Take take) {
  device::Stream &caller = runtime_.context.device().calling_thread();
  // Ranks must agree on all of it, and those that do not get it as text: what may be cut off comes last.
  char text[64];
  std::snprintf(text, sizeof text, "%s from rank %u as %s of %s", piece.call,
                runtime_.teams.all->world_rank(piece.shown), dtype_name(piece.dtype), piece.name);
  const comm::Tag tag{piece.shown | static_cast<uint32_t>(piece.dtype) << 24, text};
  const uint32_t inner = runtime_.spec.mesh.inner(piece.owner);
  std::byte *own = runtime_.storage->own_part(memory::RegionId::staging);
  if (piece.owner == runtime_.teams.all->rank()) fill(own);
  if (outer_ && piece.travels && inner == runtime_.inner().rank()) {
    const WaitSpan span(runtime_, WaitKind::peers);
    outer_->broadcast(comm::Part::alone(own), piece.bytes, runtime_.spec.mesh.outer_index(piece.owner), tag, caller);
  }
  meet(tag, caller);
  take(runtime_.storage->part_of(memory::RegionId::staging, inner));
  meet(tag, caller);
}

Params::Tensor Params::weights_of(Group &group, uint64_t param_index, const char *call) {
  const ParamPlace place = runtime_.place(group, param_index, call);
  return {call, place, runtime_.bucket(place).home(), runtime_.param(group, param_index).name};
}

Params::Tensor Params::state_of(Group &group, uint64_t param_index, const std::string &state, const char *call) {
  const ParamPlace place = runtime_.place(group, param_index, call);
  const std::string &name = runtime_.param(group, param_index).name;
  if (runtime_.param(group, param_index).frozen())
    fail(FSDP_INVALID_STATE, "{}: parameter '{}' of group '{}' is FROZEN and has no optimizer state", call, name,
         group.name());
  const auto &states = runtime_.spec.states;
  const auto found = std::find_if(states.begin(), states.end(), [&](const auto &known) { return known.name == state; });
  if (found == states.end()) fail(FSDP_INVALID_ARGUMENT, "{}: the model has no optimizer state '{}'", call, state);
  const auto index = static_cast<uint32_t>(found - states.begin());
  return {call, place, runtime_.bucket(place).plane(PlaneKind::state, index), format_text("{} of {}", state, name)};
}

void Params::load_rows(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t row_offset,
                       uint64_t row_count) {
  constexpr auto call = "fsdp_load_chunk";
  const Tensor tensor = weights_of(group, param_index, call);
  runtime_.step.require_window(call);
  runtime_.require_eager(call);
  const uint64_t row = runtime_.placement(tensor.place).row;
  check(group, param_index, dtype, runtime_.param(group, param_index).element_count, call);
  const layout::Slice own = owned(tensor.place, runtime_.teams.all->rank());
  const uint64_t first = own.tensor_offset / row, end = first + own.count / row;
  if (row_offset < first || row_offset > end || row_count > end - row_offset)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} rows from {} on of parameter '{}' are not all this rank's; rank {} has rows [{}, {})", call, row_count,
         row_offset, tensor.name, runtime_.context.rank(), first, end);
  if (row_count == 0) return;
  if (!data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for {} rows of parameter '{}'", call, row_count, tensor.name);
  const CallSpan span(runtime_, "load_chunk", &group, row_count * row * dtype_size(dtype));
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  store(tensor, static_cast<const std::byte *>(data), dtype, row_offset * row, row_count * row);
}

void Params::load(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  load(group, param_index, weights_of(group, param_index, "fsdp_load_param"), data, dtype, element_count, root);
}

void Params::load_state(Group &group, uint64_t param_index, const std::string &state, const void *data,
                        fsdp_dtype dtype, uint64_t element_count, int32_t root) {
  load(group, param_index, state_of(group, param_index, state, "fsdp_load_state"), data, dtype, element_count, root);
}

void Params::read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  read(group, param_index, weights_of(group, param_index, "fsdp_read_param"), data, dtype, element_count, root);
}

void Params::read_state(Group &group, uint64_t param_index, const std::string &state, void *data, fsdp_dtype dtype,
                        uint64_t element_count, int32_t root) {
  read(group, param_index, state_of(group, param_index, state, "fsdp_read_state"), data, dtype, element_count, root);
}

void Params::load(Group &group, uint64_t param_index, const Tensor &tensor, const void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root) {
  const char *const call = tensor.call;
  const CallSpan span(runtime_, "load_param", &group, element_count * dtype_size(dtype));
  runtime_.step.require_window(call);
  runtime_.require_eager(call);
  check(group, param_index, dtype, element_count, call);
  const auto owner = find_root(root, call);
  if ((!owner || *owner == runtime_.teams.all->rank()) && !data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for parameter '{}' on rank {}", call,
         runtime_.param(group, param_index).name, runtime_.context.rank());
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  const auto *bytes = static_cast<const std::byte *>(data);
  if (!owner || runtime_.teams.all->size() == 1) {
    store(tensor, bytes, dtype, 0, element_count);
    return;
  }
  const uint64_t element = dtype_size(dtype);
  const uint64_t step = runtime_.plan.region(memory::RegionId::staging).bytes / element;
  for (uint64_t first = 0; first < element_count; first += step) {
    const uint64_t count = std::min(step, element_count - first);
    stage(
        {call, *owner, *owner, true, count * element, dtype, tensor.name.c_str()},
        [&](std::byte *to) { copy(to, bytes + first * element, dtype, count); },
        [&](const std::byte *from) { store(tensor, from, dtype, first, count); });
  }
}

void Params::read(Group &group, uint64_t param_index, const Tensor &tensor, void *data, fsdp_dtype dtype,
                  uint64_t element_count, int32_t root) {
  const char *const call = tensor.call;
  runtime_.require_eager(call);
  const CallSpan span(runtime_, "read_param", &group, element_count * dtype_size(dtype));
  const ParamPlace &place = tensor.place;
  check(group, param_index, dtype, element_count, call);
  const auto reader = find_root(root, call);
  const bool reads = !reader || *reader == runtime_.teams.all->rank();
  if (reads && !data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for parameter '{}' on rank {}", call,
         runtime_.param(group, param_index).name, runtime_.context.rank());
  device::Device &device = runtime_.context.device();
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  auto *to = static_cast<std::byte *>(data);
  const Plane &plane = tensor.plane;
  if (runtime_.bucket(place).is_whole() || runtime_.teams.all->size() == 1) {
    if (reads)
      device.transfer(to, dtype, plane.at(owned(place, runtime_.teams.all->rank())), plane.dtype(), element_count);
    return;
  }
  const uint64_t step = runtime_.plan.region(memory::RegionId::staging).bytes / dtype_size(plane.dtype());
  for (const uint32_t r : holders(place)) {
    const layout::Slice slice = owned(place, r);
    for (uint64_t done = 0; done < slice.count; done += step) {
      const uint64_t count = std::min(step, slice.count - done);
      const uint32_t shown = travels(place) ? r : runtime_.spec.mesh.inner(r);
      stage(
          {call, r, shown, travels(place), count * dtype_size(plane.dtype()), plane.dtype(), tensor.name.c_str()},
          [&](std::byte *part) {
            copy(part, plane.at(slice) + done * dtype_size(plane.dtype()), plane.dtype(), count);
          },
          [&](const std::byte *part) {
            if (reads)
              device.transfer(to + (slice.tensor_offset + done) * dtype_size(dtype), dtype, part, plane.dtype(), count);
          });
    }
  }
}

}  // namespace fsdp::engine
