// SPDX-License-Identifier: Apache-2.0
#include "engine/weights/params.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "base/error.h"
#include "engine/weights/quantized_params.h"
#include "memory/plane.h"
#include "transport/exchange.h"

namespace fsdp::engine {

Params::Params(Runtime &runtime) : runtime_(runtime) {
  for (const MeshComms &mesh_comms : runtime.comms)
    outer_.push_back(mesh_comms.teams.outer ? mesh_comms.teams.outer->create_collectives(
                                                  "outer parameters", transport::Shape::messages(false))
                                            : nullptr);
}

// Checks the dtype. Numbers may have any dtype of numbers; other data must have the stored dtype.
void Params::check(const Group &group, const Tensor &tensor, fsdp_dtype dtype, uint64_t element_count) const {
  const fsdp_dtype exact = tensor.stored                   ? tensor.plane.dtype()
                           : is_number(tensor.param.dtype) ? 0
                                                           : tensor.param.dtype;
  if (exact ? dtype != exact : !is_number(dtype))
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a dtype of {} of group '{}', which {}", tensor.call, dtype, tensor.name,
         group.name(),
         exact ? format_text("is {} ({})", dtype_name(exact), exact)
               : format_text("takes float32 ({}), bfloat16 ({}) and float16 ({})", FSDP_FLOAT32 + 0, FSDP_BFLOAT16 + 0,
                             FSDP_FLOAT16 + 0));
  if (element_count != tensor.count())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} '{}' of group '{}' has {} elements, element_count is {}", tensor.call,
         tensor.stored ? "plane" : "parameter", tensor.stored ? tensor.name : tensor.param.name, group.name(),
         tensor.count(), element_count);
}

void Params::check_data(const Tensor &tensor, const void *data, std::optional<uint32_t> root) const {
  if ((!root || *root == comms_of(tensor).rank()) && !data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for {} on rank {}", tensor.call,
         tensor.stored ? tensor.name : format_text("parameter '{}'", tensor.param.name), runtime_.context.rank());
}

std::optional<uint32_t> Params::find_root(int32_t root, const Tensor &tensor) const {
  if (root == FSDP_EVERY_RANK) return std::nullopt;
  const auto &ranks = comms_of(tensor).mesh.ranks;
  const auto found = root < 0 ? ranks.end() : std::find(ranks.begin(), ranks.end(), static_cast<uint32_t>(root));
  if (found == ranks.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: root {} is neither FSDP_EVERY_RANK nor one of the {} ranks of the {} mesh",
         tensor.call, root, ranks.size(), tensor.plane.plan->mesh ? "group's" : "model's");
  return static_cast<uint32_t>(found - ranks.begin());
}

layout::Slice Params::owned(const Tensor &tensor, uint32_t rank) const {
  return memory::slice_of(*tensor.plane.layout, tensor.place.tensor, tensor.plane.plan->owned, comms_of(tensor).mesh,
                          rank);
}

// Must parts of the parameter come from other outer ranks?
bool Params::travels(const Tensor &tensor) const {
  return comms_of(tensor).mesh.slices() > 1 && !runtime_.plan.buckets[tensor.place.bucket].frozen;
}

// The ranks that together have the whole parameter. If outer ranks hold the same parts, these are the ranks of this
// inner axis.
std::vector<uint32_t> Params::holders(const Tensor &tensor) const {
  const layout::Mesh &mesh = comms_of(tensor).mesh;
  const uint32_t first = mesh.outer_index(comms_of(tensor).rank()) * mesh.inner_size;
  std::vector<uint32_t> ranks;
  if (travels(tensor))
    for (uint32_t slot = 0; slot < mesh.slots(); ++slot) ranks.push_back(mesh.holder(slot));
  else
    for (uint32_t i = 0; i < mesh.inner_size; ++i) ranks.push_back(first + i);
  return ranks;
}

std::optional<CompactNumbers> Params::compact_numbers(const Tensor &tensor, bool together) {
  const Bucket &bucket = runtime_.bucket(tensor.place);
  if (tensor.stored || !CompactNumbers::has(bucket, tensor.plane)) return {};
  std::optional<CompactNumbers> numbers;
  attempt(tensor, together,
          [&] { numbers.emplace(runtime_, bucket, tensor.plane, tensor.place.tensor, tensor.count()); });
  return numbers;
}

void Params::store(const Tensor &tensor, std::optional<CompactNumbers> &compact, const std::byte *from,
                   fsdp_dtype dtype, uint64_t first, uint64_t count) {
  const layout::Slice own = owned(tensor, comms_of(tensor).rank());
  const uint64_t begin = std::max(first, own.tensor_offset);
  const uint64_t end = std::min(first + count, own.tensor_offset + own.count);
  if (begin >= end) return;
  if (compact)
    return compact->write_from(begin - own.tensor_offset, end - begin, from + (begin - first) * dtype_size(dtype),
                               dtype);
  const Plane &plane = tensor.plane;
  runtime_.storage->transfer(plane.at(own) + (begin - own.tensor_offset) * dtype_size(plane.dtype()), plane.dtype(),
                             from + (begin - first) * dtype_size(dtype), dtype, end - begin);
}

// Copies without a change of dtype, so that the bits stay the same.
void Params::copy(std::byte *to, const std::byte *from, fsdp_dtype dtype, uint64_t count) {
  runtime_.storage->transfer(to, dtype, from, dtype, count);
}

void Params::meet(transport::Collectives &control, const transport::Tag &tag, device::Stream &caller) {
  const WaitSpan span(runtime_, WaitKind::peers);
  const trace::FlightScope barrier(*runtime_.flights.params, "barrier", 0);
  control.await_release(control.barrier(tag, caller), caller);
}

// The owner fills its part of the staging memory. If the owner is on another outer rank, the outer ranks with its inner
// index copy the part into their own memory. The first barrier tells that the part is there, and the second that all
// ranks have taken it.
template <class Fill, class Take>
void Params::stage(const ShownBytes &piece, Fill fill, Take take) {
  const Tensor &tensor = piece.tensor;
  const MeshComms &comms = comms_of(tensor);
  const uint32_t mesh = tensor.plane.plan->mesh;
  device::Stream &caller = runtime_.context.device().calling_thread();
  // Ranks compare the whole text. An error shows the text and may cut off its end.
  const std::string text = format_text("{} from rank {} of {}{}", tensor.call, comms.teams.all->world_rank(piece.shown),
                                       tensor.name, piece.dtype ? format_text(" as {}", dtype_name(piece.dtype)) : "");
  const transport::Tag tag{piece.shown | static_cast<uint32_t>(piece.dtype) << 24, text.c_str()};
  const uint32_t inner = comms.mesh.inner(piece.owner);
  std::byte *own = runtime_.storage->own_part(memory::RegionId::staging, mesh);
  if (piece.owner == comms.rank()) fill(own);
  if (outer_[mesh] && piece.travels && inner == comms.inner().rank()) {
    const WaitSpan span(runtime_, WaitKind::peers);
    outer_[mesh]->broadcast(transport::Part::alone(own), piece.bytes, comms.mesh.outer_index(piece.owner), tag, caller);
  }
  meet(*comms.control, tag, caller);
  take(runtime_.storage->part_of(memory::RegionId::staging, mesh, inner));
  meet(*comms.control, tag, caller);
}

Params::Tensor Params::weights_of(Group &group, uint64_t param_index, const char *call) {
  const ParamPlace place = runtime_.place(group, param_index, call);
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  return {call, place, runtime_.bucket(place).owned_plane(), param, param.name};
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
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (!runtime_.spec.has_state(param, *found))
    fail(FSDP_INVALID_ARGUMENT, "{}: parameter '{}' of group '{}' has no optimizer state '{}': {}", call, name,
         group.name(), state,
         param.by_caller() ? "the caller updates it (FSDP_OPTIMIZER_CALLER)"
                           : "AdamW updates it, and the state is for parameters with FSDP_OPTIMIZER_CALLER");
  const auto index = static_cast<uint32_t>(found - states.begin());
  return {call, place, runtime_.bucket(place).plane(PlaneKind::state, index), runtime_.param(group, param_index),
          format_text("{} of {}", state, name)};
}

Params::Tensor Params::grad_of(Group &group, uint64_t param_index, const char *call) {
  const ParamPlace place = runtime_.place(group, param_index, call);
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (param.frozen())
    fail(FSDP_INVALID_STATE, "{}: parameter '{}' of group '{}' is FROZEN and has no gradient", call, param.name,
         group.name());
  runtime_.step.require_grads(call);
  runtime_.step.require_returned(call);
  return {call, place, runtime_.bucket(place).plane(PlaneKind::grad), param,
          format_text("the gradient of {}", param.name)};
}

void Params::load_rows(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t row_offset,
                       uint64_t row_count) {
  constexpr auto call = "fsdp_load_chunk";
  const Tensor tensor = weights_of(group, param_index, call);
  runtime_.step.require_window(call);
  runtime_.step.require_returned(call);
  runtime_.require_eager(call);
  const uint64_t row = runtime_.placement(tensor.place).row;
  check(group, tensor, dtype, tensor.count());
  const layout::Slice own = owned(tensor, comms_of(tensor).rank());
  const uint64_t first = own.tensor_offset / row, end = first + own.count / row;
  if (row_offset < first || row_offset > end || row_count > end - row_offset)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} rows from {} on of parameter '{}' are not all this rank's; rank {} has rows [{}, {})", call, row_count,
         row_offset, tensor.name, runtime_.context.rank(), first, end);
  if (row_count == 0) return;
  if (tensor.is_converted()) check_blocks(tensor, row_offset, row_count);
  if (!data)
    fail(FSDP_INVALID_ARGUMENT, "{}: data is NULL for {} rows of parameter '{}'", call, row_count, tensor.name);
  const CallSpan span(runtime_, "load_chunk", &group, row_count * row * dtype_size(dtype));
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  const auto *from = static_cast<const std::byte *>(data);
  if (!tensor.is_converted()) {
    auto compact = compact_numbers(tensor, false);
    return store(tensor, compact, from, dtype, row_offset * row, row_count * row);
  }
  const uint64_t skipped = row_offset * row - own.tensor_offset;
  FrozenLoad rows(runtime_, tensor.param, tensor.place,
                  {own.tensor_offset + skipped, own.full_offset + skipped, own.shard_offset + skipped, row_count * row,
                   own.group_offset + skipped});
  rows.take(from, dtype, row_offset * row, row_count * row);
  rows.store();
}

// Checks that only whole blocks are written, because the scale of a block depends on all of its numbers.
void Params::check_blocks(const Tensor &tensor, uint64_t row_offset, uint64_t row_count) const {
  const uint64_t block = memory::block_rows(tensor.param), end = row_offset + row_count;
  if (!block)
    fail(FSDP_UNSUPPORTED,
         "{}: parameter '{}' is FROZEN and has one scale (FSDP_QUANTIZE_FP8), which is made of all of its rows; call "
         "fsdp_load_param",
         tensor.call, tensor.name);
  if (row_offset % block || (end % block && end != tensor.param.rows()))
    fail(FSDP_INVALID_ARGUMENT,
         "{}: rows [{}, {}) of parameter '{}' are not whole blocks of {} rows, of which its planes are made",
         tensor.call, row_offset, end, tensor.name, block);
}

void Params::load(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  load(group, weights_of(group, param_index, "fsdp_load_param"), data, dtype, element_count, root);
}

void Params::load_state(Group &group, uint64_t param_index, const std::string &state, const void *data,
                        fsdp_dtype dtype, uint64_t element_count, int32_t root) {
  load(group, state_of(group, param_index, state, "fsdp_load_state"), data, dtype, element_count, root);
}

void Params::read(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  read(group, weights_of(group, param_index, "fsdp_read_param"), data, dtype, element_count, root);
}

void Params::read_state(Group &group, uint64_t param_index, const std::string &state, void *data, fsdp_dtype dtype,
                        uint64_t element_count, int32_t root) {
  read(group, state_of(group, param_index, state, "fsdp_read_state"), data, dtype, element_count, root);
}

void Params::load_grad(Group &group, uint64_t param_index, const void *data, fsdp_dtype dtype, uint64_t element_count,
                       int32_t root) {
  const Tensor tensor = grad_of(group, param_index, "fsdp_load_grad");
  if (!tensor.param.trained)
    fail(FSDP_INVALID_STATE,
         "{}: parameter '{}' of group '{}' is not trained now, and its gradient stays zeros; call "
         "fsdp_set_param_trainable between steps to train it again",
         tensor.call, tensor.param.name, group.name());
  load(group, tensor, data, dtype, element_count, root);
}

void Params::read_grad(Group &group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count,
                       int32_t root) {
  read(group, grad_of(group, param_index, "fsdp_read_grad"), data, dtype, element_count, root);
}

void Params::load_plane(Group &group, uint64_t param_index, PlaneKind kind, uint32_t form, const void *data,
                        fsdp_dtype dtype, uint64_t element_count, int32_t root) {
  constexpr auto call = "fsdp_load_plane";
  const ParamPlace place = runtime_.place(group, param_index, call);
  const memory::ParamSpec &param = runtime_.param(group, param_index);
  if (!param.frozen())
    fail(FSDP_INVALID_STATE,
         "{}: parameter '{}' of group '{}' is trained: its planes are made of its main weights when these are "
         "published; "
         "call fsdp_load_param",
         call, param.name, group.name());
  const Plane &plane = runtime_.bucket(place).plane(kind, form);
  load(group, {call, place, plane, param, format_text("{} of {}", memory::plane_name(*plane.plan), param.name), true},
       data, dtype, element_count, root);
}

void Params::load(const Group &group, const Tensor &tensor, const void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  const char *const call = tensor.call;
  const CallSpan span(runtime_, tensor.stored ? "load_plane" : "load_param", &group, element_count * dtype_size(dtype));
  runtime_.step.require_window(call);
  runtime_.step.require_returned(call);
  runtime_.require_eager(call);
  const auto owner = find_root(root, tensor);
  if (owner && comms_of(tensor).teams.all->size() > 1) {
    dtype = offered(group, tensor, data, dtype, element_count, *owner);
  } else {
    check(group, tensor, dtype, element_count);
    check_data(tensor, data, owner);
  }
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  const auto *bytes = static_cast<const std::byte *>(data);
  if (tensor.is_converted()) return load_converted(tensor, bytes, dtype, owner);
  auto compact = compact_numbers(tensor, owner && comms_of(tensor).teams.all->size() > 1);
  bring(tensor, bytes, dtype, owner, [&](const std::byte *from, uint64_t first, uint64_t count) {
    store(tensor, compact, from, dtype, first, count);
  });
}

// The dtype of the root's data. Other ranks need not pass data. If they do, dtype and count are compared with the
// root's.
fsdp_dtype Params::offered(const Group &group, const Tensor &tensor, const void *data, fsdp_dtype dtype,
                           uint64_t element_count, uint32_t root) {
  struct Offer {
    fsdp_dtype dtype = 0;
    WireError<400> error;
  } offer;
  const bool is_root = root == comms_of(tensor).rank();
  const auto root_rank = static_cast<int32_t>(comms_of(tensor).teams.all->world_rank(root));
  // An error thrown here would leave the root waiting; the root may have the same error.
  std::optional<Error> refused = capture_error([&] {
    if (data || is_root) check(group, tensor, dtype, element_count);
    check_data(tensor, data, root);
    offer.dtype = dtype;
  });
  if (refused) {
    if (is_root) refused->rank = root_rank;
    offer.error = WireError<400>(*refused);
  }
  stage(
      {tensor, root, root, true, sizeof offer, 0}, [&](std::byte *to) { std::memcpy(to, &offer, sizeof offer); },
      [&](const std::byte *from) { std::memcpy(static_cast<void *>(&offer), from, sizeof offer); });
  if (refused) throw *refused;
  if (offer.error.failed())
    fail_rank(offer.error.status, root_rank, "{}: the root, rank {}, has no data: {}", tensor.call, root_rank,
              offer.error.text.view());
  return data ? dtype : offer.dtype;
}

template <class Take>
void Params::bring(const Tensor &tensor, const std::byte *data, fsdp_dtype dtype, std::optional<uint32_t> root,
                   Take take) {
  const uint64_t all = tensor.count(), element = dtype_size(dtype);
  if (!root || comms_of(tensor).teams.all->size() == 1) return take(data, 0, all);
  const uint64_t step = runtime_.plan.region(memory::RegionId::staging, tensor.plane.plan->mesh).bytes / element;
  for (uint64_t first = 0; first < all; first += step) {
    const uint64_t count = std::min(step, all - first);
    stage(
        {tensor, *root, *root, true, count * element, dtype},
        [&](std::byte *to) { copy(to, data + first * element, dtype, count); },
        [&](const std::byte *from) { take(from, first, count); });
  }
}

void Params::attempt(const Tensor &tensor, bool together, const std::function<void()> &step) {
  if (!together) return step();
  const WaitSpan span(runtime_, WaitKind::peers);
  transport::attempt_together(*comms_of(tensor).teams.all, format_text("{} of '{}'", tensor.call, tensor.name), step);
}

void Params::load_converted(const Tensor &tensor, const std::byte *data, fsdp_dtype dtype,
                            std::optional<uint32_t> root) {
  std::optional<FrozenLoad> numbers;
  attempt(tensor, root && comms_of(tensor).teams.all->size() > 1,
          [&] { numbers.emplace(runtime_, tensor.param, tensor.place, owned(tensor, comms_of(tensor).rank())); });
  bring(tensor, data, dtype, root,
        [&](const std::byte *from, uint64_t first, uint64_t count) { numbers->take(from, dtype, first, count); });
  numbers->store();
}

void Params::read(const Group &group, const Tensor &tensor, void *data, fsdp_dtype dtype, uint64_t element_count,
                  int32_t root) {
  const char *const call = tensor.call;
  runtime_.require_eager(call);
  runtime_.step.require_returned(call);
  const CallSpan span(runtime_, "read_param", &group, element_count * dtype_size(dtype));
  check(group, tensor, dtype, element_count);
  const auto reader = find_root(root, tensor);
  check_data(tensor, data, reader);
  const bool reads = !reader || *reader == comms_of(tensor).rank();
  runtime_.join_window(runtime_.caller_stream(nullptr, call));
  auto *to = static_cast<std::byte *>(data);
  if (tensor.is_converted())
    read_converted(tensor, to, dtype, reads);
  else
    copy_out(tensor, to, dtype, reads);
}

// Reads whole planes and converts them to numbers here, because a rank that stores the codes may not store their scale.
void Params::read_converted(const Tensor &tensor, std::byte *to, fsdp_dtype dtype, bool reads) {
  const Bucket &bucket = runtime_.bucket(tensor.place);
  const Tensor codes{tensor.call, tensor.place, bucket.plane(PlaneKind::compute), tensor.param, tensor.name, true};
  const Tensor scales{tensor.call,  tensor.place, bucket.plane(PlaneKind::compute_scales),
                      tensor.param, tensor.name,  true};
  const fsdp_dtype scale_dtype = scales.plane.dtype();
  const uint64_t scale_bytes = scales.count() * dtype_size(scale_dtype);
  std::unique_ptr<device::Memory> memory;
  device::Device &device = runtime_.context.device();
  attempt(tensor, !is_here(tensor), [&] {
    if (reads) memory = device.allocate_host(scale_bytes + codes.count(), "planes that are read");
  });
  std::byte *const data = memory ? memory->data() : nullptr;
  copy_out(scales, data, scale_dtype, reads);
  copy_out(codes, reads ? data + scale_bytes : nullptr, FSDP_FLOAT8_E4M3, reads);
  if (reads) dequantize(device, tensor.param, {data + scale_bytes, data, scale_dtype}, to, dtype);
}

bool Params::is_here(const Tensor &tensor) const {
  return tensor.plane.plan->owned == Extent::whole || comms_of(tensor).teams.all->size() == 1;
}

void Params::copy_out(const Tensor &tensor, std::byte *to, fsdp_dtype dtype, bool reads) {
  device::Device &device = runtime_.context.device();
  const Plane &plane = tensor.plane;
  auto compact = compact_numbers(tensor, !is_here(tensor));
  if (is_here(tensor)) {
    if (reads && compact)
      compact->read_as(0, tensor.count(), to, dtype);
    else if (reads)
      runtime_.storage->transfer(to, dtype, plane.at(owned(tensor, comms_of(tensor).rank())), plane.dtype(),
                                 tensor.count());
    return;
  }
  const fsdp_dtype shown_dtype = compact ? FSDP_FLOAT32 + 0 : plane.dtype();
  const uint64_t element = dtype_size(shown_dtype);
  const uint64_t step = runtime_.plan.region(memory::RegionId::staging, tensor.plane.plan->mesh).bytes / element;
  for (const uint32_t r : holders(tensor)) {
    const layout::Slice slice = owned(tensor, r);
    for (uint64_t done = 0; done < slice.count; done += step) {
      const uint64_t count = std::min(step, slice.count - done);
      const uint32_t shown = travels(tensor) ? r : comms_of(tensor).mesh.inner(r);
      stage(
          {tensor, r, shown, travels(tensor), count * element, shown_dtype},
          [&](std::byte *part) {
            if (compact)
              compact->read_as(done, count, part, shown_dtype);
            else
              copy(part, plane.at(slice) + done * element, shown_dtype, count);
          },
          [&](const std::byte *part) {
            if (reads)
              device.transfer(to + (slice.tensor_offset + done) * dtype_size(dtype), dtype, part, shown_dtype, count);
          });
    }
  }
}

}  // namespace fsdp::engine
