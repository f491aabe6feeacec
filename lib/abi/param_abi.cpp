// SPDX-License-Identifier: Apache-2.0
// Parameters: descriptors in and out, views of weights, loads and reads, chunks.
#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/checked.h"
#include "base/dtype.h"

using namespace fsdp;
using namespace fsdp::abi;
using fsdp::memory::PlaneKind;

namespace {

constexpr uint32_t max_dimensions = 16;

// Names a field of one descriptor: "params[3] ('wq').granule".
Field field_of(uint64_t index, const memory::ParamSpec &param, const char *field) {
  return {"params", index, &param.name, field};
}

// Checks the factor of the learning rate, which must be 0 or more.
void check_lr_scale(double lr_scale, const char *call, const Field &field) {
  check_factor(lr_scale, call, field);
  if (lr_scale < 0) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must not be negative", call, field, lr_scale);
}

void read_shape(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.dimension_count > max_dimensions)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, at most {} are allowed", call, field_of(index, param, "dimension_count"),
         given.dimension_count, max_dimensions);
  if (given.dimension_count && !given.shape)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is NULL", call, field_of(index, param, "shape"));
  for (uint32_t d = 0; d < given.dimension_count; ++d) {
    if (given.shape[d] == 0) fail(FSDP_INVALID_ARGUMENT, "{}: {}[{}] is 0", call, field_of(index, param, "shape"), d);
    param.element_count = checked_multiply(param.element_count, given.shape[d], field_of(index, param, "shape"));
    param.shape.push_back(given.shape[d]);
  }
}

// A scalar is one row, whether it says 0 or 1.
void read_rows(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.row_dimensions > std::max(given.dimension_count, 1u))
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} is {}, but must be at most {}, the parameter's number of dimensions (1 for a "
         "scalar)",
         call, field_of(index, param, "row_dimensions"), given.row_dimensions, std::max(given.dimension_count, 1u));
  param.row_dimensions = std::max(given.row_dimensions, 1u);
}

// Reads a box. Its tensor must be countable in 64 bits, and the box must lie inside the tensor.
void read_box(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  const auto field = [&](const char *name) { return field_of(index, param, name); };
  if (!given.global_shape && !given.global_offset) return;
  if (!given.global_shape || !given.global_offset)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is NULL, but {} is given; a box needs both", call,
         field(given.global_shape ? "global_offset" : "global_shape"),
         given.global_shape ? "global_shape" : "global_offset");
  uint64_t count = 1;
  for (uint32_t d = 0; d < given.dimension_count; ++d) {
    const uint64_t size = given.global_shape[d], first = given.global_offset[d];
    if (first > size || param.shape[d] > size - first)
      fail(FSDP_INVALID_ARGUMENT,
           "{}: {}[{}] is {}, which the box exceeds: its shape[{}] is {} and its global_offset[{}] {}", call,
           field("global_shape"), d, size, d, param.shape[d], d, first);
    count = checked_multiply(count, size, field("global_shape"));
  }
  param.global_shape.assign(given.global_shape, given.global_shape + given.dimension_count);
  param.global_offset.assign(given.global_offset, given.global_offset + given.dimension_count);
}

void read_quantization(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.quantization < 0 || given.quantization > FSDP_QUANTIZE_FP8_BLOCK)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} is {}, it must be 0 (none), FSDP_QUANTIZE_FP8 ({}), FSDP_QUANTIZE_MXFP8 ({}) or "
         "FSDP_QUANTIZE_FP8_BLOCK ({})",
         call, field_of(index, param, "quantization"), given.quantization, FSDP_QUANTIZE_FP8 + 0,
         FSDP_QUANTIZE_MXFP8 + 0, FSDP_QUANTIZE_FP8_BLOCK + 0);
  param.quantization = given.quantization;
}

void read_missing_grad(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  param.missing_grad = read_enum(given.missing_grad, FSDP_MISSING_GRAD_ZEROS + 0, FSDP_MISSING_GRAD_SKIP + 0, call,
                                 field_of(index, param, "missing_grad"));
}

void read_optimizer(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  const Field field = field_of(index, param, "optimizer");
  param.optimizer = read_enum(given.optimizer, 0, FSDP_OPTIMIZER_CALLER + 0, call, field);
  if (param.frozen() && param.optimizer)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but no optimizer updates a parameter with FSDP_PARAM_FROZEN; give it 0",
         call, field, param.optimizer);
  if (given.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be 0", call, field_of(index, param, "reserved"), given.reserved);
}

// Checks a parameter of FSDP_UINT8: nothing is computed with bytes.
void check_bytes(const memory::ParamSpec &param, uint64_t index, const char *call) {
  if (!param.frozen())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is FSDP_UINT8 ({}): bytes have no gradient, so it needs FSDP_PARAM_FROZEN",
         call, field_of(index, param, "dtype"), FSDP_UINT8 + 0);
  if (param.quantized())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but its dtype is FSDP_UINT8, and bytes are not quantized", call,
         field_of(index, param, "quantization"), param.quantization);
}

// Pieces are numbered in the order of the parameters, without a gap.
void check_piece(const memory::ParamSpec &param, std::span<const memory::ParamSpec> before, const char *call) {
  const uint32_t least = before.empty() ? 0 : before.back().piece, most = before.empty() ? 0 : least + 1;
  if (param.piece >= least && param.piece <= most) return;
  const Field field = field_of(before.size(), param, "piece");
  if (before.empty())
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but the first parameter of a group is in piece 0", call, field,
         param.piece);
  fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, but after a parameter of piece {} it must be {} or {}", call, field,
       param.piece, least, least, most);
}

memory::ParamSpec read_param(const fsdp_param *at, uint64_t index, const char *call) {
  const fsdp_param given = read_options(at, call, Field("params", index, nullptr, nullptr));
  memory::ParamSpec param;
  param.name = read_name(given.name, 255, call, Field("params", index, nullptr, "name"));
  read_shape(given, index, param, call);
  read_rows(given, index, param, call);
  read_box(given, index, param, call);
  param.dtype = given.dtype == FSDP_UINT8
                    ? FSDP_UINT8 + 0
                    : read_enum(given.dtype, FSDP_FLOAT32 + 0, FSDP_FLOAT16 + 0, call, field_of(index, param, "dtype"));
  check_flags(given.flags, FSDP_PARAM_FROZEN | FSDP_PARAM_NO_DECAY | FSDP_PARAM_LR_ZERO, call,
              field_of(index, param, "flags"));
  param.flags = given.flags;
  param.granule =
      read_enum(given.granule, FSDP_GRANULE_ROW + 0, FSDP_GRANULE_TENSOR + 0, call, field_of(index, param, "granule"));
  if (param.granule == FSDP_GRANULE_BLOCK) {
    if (given.granule_rows == 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is 0, but the granule is FSDP_GRANULE_BLOCK", call,
           field_of(index, param, "granule_rows"));
    param.granule_rows = given.granule_rows;
  }
  check_lr_scale(given.lr_scale, call, field_of(index, param, "lr_scale"));
  param.lr_scale = read_value(given.lr_scale, 1.0, given.flags & FSDP_PARAM_LR_ZERO, "FSDP_PARAM_LR_ZERO", call,
                              field_of(index, param, "lr_scale"));
  param.user_data = given.user_data;
  read_quantization(given, index, param, call);
  read_missing_grad(given, index, param, call);
  read_optimizer(given, index, param, call);
  param.piece = given.piece;
  if (param.dtype == FSDP_UINT8) check_bytes(param, index, call);
  return param;
}

const memory::ParamSpec &param_of(const HandledGroup &group, uint64_t index, const char *call) {
  const memory::GroupSpec &spec = group.model->spec().groups[group.index];
  if (index >= spec.params.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: param_index {} is outside [0, {}) of group '{}'", call, index, spec.params.size(),
         spec.name);
  return spec.params[index];
}

void require_readable(engine::Model &model, engine::Group &group, uint32_t piece, fsdp_phase phase, const char *call) {
  const std::string reason = model.gatherer(call).find_unreadable(group, piece, phase);
  if (!reason.empty()) fail(FSDP_INVALID_STATE, "{}: group '{}' is not readable now; {}", call, group.name(), reason);
}

// A published plane as the engine identifies it.
struct Published {
  PlaneKind kind;
  uint32_t form;
};

Published published(fsdp_plane plane) {
  const bool scales = plane == FSDP_PLANE_ROW_SCALE || plane == FSDP_PLANE_COLUMN_SCALE;
  return {scales ? PlaneKind::compute_scales : PlaneKind::compute, plane >= FSDP_PLANE_COLUMN ? 1u : 0u};
}

// Where the parameter begins in its bucket's plane, in bytes.
uint64_t plane_offset(const engine::Runtime &runtime, const engine::ParamPlace &place, Published which) {
  const engine::Plane &plane = runtime.bucket(place).plane(which.kind, which.form);
  return plane.layout->tensors[place.tensor].full_offset * dtype_size(plane.dtype());
}

// The address of the parameter in the whole plane, for the caller.
std::byte *plane_data(engine::Model &model, engine::Runtime &runtime, engine::Group &group,
                      const engine::ParamPlace &place, fsdp_phase phase, Published which, const char *call) {
  return const_cast<std::byte *>(model.gatherer(call).view(group, phase, place.bucket, which.kind, which.form)) +
         plane_offset(runtime, place, which);
}

fsdp_tensor weight_view(engine::Model &model, engine::Runtime &runtime, engine::Group &group, uint64_t index,
                        fsdp_phase phase, const char *call) {
  const engine::ParamPlace &place = group.places[index];
  const memory::ParamSpec &param = runtime.param(group, index);
  std::byte *const data =
      param.quantized() ? nullptr : plane_data(model, runtime, group, place, phase, {PlaneKind::compute, 0}, call);
  return view_of(runtime.context, data, param.shape, param.dtype, FSDP_TENSOR_READ_ONLY);
}

fsdp_tensor plane_view(engine::Model &model, engine::Runtime &runtime, engine::Group &group, uint64_t index,
                       fsdp_phase phase, Published which, const char *call) {
  const engine::ParamPlace &place = group.places[index];
  const std::vector<uint64_t> &shape = which.kind == PlaneKind::compute ? runtime.param(group, index).shape
                                                                        : group.plan->scale_shapes[index][which.form];
  return view_of(runtime.context, plane_data(model, runtime, group, place, phase, which, call), shape,
                 runtime.bucket(place).plane(which.kind, which.form).dtype(), FSDP_TENSOR_READ_ONLY);
}

void require_quantized(const engine::Runtime &runtime, const engine::Group &group, uint64_t index, bool quantized,
                       const char *call) {
  const memory::ParamSpec &param = runtime.param(group, index);
  if (param.quantized() == quantized) return;
  fail(FSDP_INVALID_ARGUMENT, "{}: parameter '{}' of group '{}' is {}", call, param.name, group.name(),
       quantized ? "not quantized, and has no planes; call fsdp_get_param or fsdp_load_param"
                 : "quantized, its weights are planes; call fsdp_get_plane");
}

// Reads a plane argument, which must be a plane of the parameter.
Published read_plane(const engine::Runtime &runtime, engine::Group &group, uint64_t index, fsdp_plane plane,
                     const char *call) {
  if (plane < FSDP_PLANE_ROW || plane > FSDP_PLANE_COLUMN_SCALE)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a plane (FSDP_PLANE_ROW .. FSDP_PLANE_COLUMN_SCALE)", call, plane);
  require_quantized(runtime, group, index, true, call);
  const Published which = published(plane);
  if (which.form >= runtime.bucket(group.places[index]).plan->forms())
    fail(FSDP_INVALID_ARGUMENT,
         "{}: parameter '{}' of group '{}' has no COLUMN planes, its ROW planes serve all phases", call,
         runtime.param(group, index).name, group.name());
  return which;
}

// Checks that the phase holds the plane.
void require_held(const engine::Runtime &runtime, const engine::Group &group, uint64_t index, fsdp_phase phase,
                  Published which, const char *call) {
  const memory::ParamSpec &param = runtime.param(group, index);
  const bool columns = phase == FSDP_BACKWARD;
  if (group.plan->parts_phases && (which.form == 1) != columns &&
      runtime.bucket(group.places[index]).plan->forms() == 2)
    fail(FSDP_INVALID_STATE,
         "{}: phase {} of group '{}' gathers {} planes; ask for those of parameter '{}', or create the model with "
         "FSDP_PLANES_BOTH",
         call, engine::phase_name(phase), group.name(), columns ? "COLUMN" : "ROW", param.name);
}

// Describes the scales of an MXFP8 plane; the caller of this adds their addresses.
device::Mxfp8Swizzle swizzle_of(const engine::Runtime &runtime, const engine::Group &group, uint64_t index,
                                Published which, const char *call) {
  const memory::ParamSpec &param = runtime.param(group, index);
  if (param.quantization != FSDP_QUANTIZE_MXFP8 || which.kind != PlaneKind::compute_scales)
    fail(
        FSDP_INVALID_ARGUMENT,
        "{}: only FSDP_PLANE_ROW_SCALE and FSDP_PLANE_COLUMN_SCALE of FSDP_QUANTIZE_MXFP8 have such a form, not the {} "
        "plane of parameter '{}' of group '{}', which is {}",
        call, which.kind == PlaneKind::compute ? "codes'" : "scales'", param.name, group.name(),
        quantization_name(param.quantization));
  const std::vector<uint64_t> &shape = group.plan->scale_shapes[index][which.form];
  const uint64_t rows = shape[shape.size() - 2], columns = shape.back();
  const uint64_t scales = std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies<>());
  const auto form = which.form ? device::Mxfp8Form::column : device::Mxfp8Form::row;
  return {nullptr, rows, columns, form, nullptr, scales / (rows * columns)};
}

fsdp_chunk make_chunk(const memory::ModelPlan &plan, const layout::Mesh &mesh, uint32_t group, uint64_t param_index,
                      uint32_t rank) {
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  for (const uint32_t b : plan.groups[group].buckets) {
    const memory::BucketPlan &bucket = plan.buckets[b];
    for (uint32_t t = 0; t < bucket.params.size(); ++t) {
      if (bucket.params[t] != param_index) continue;
      const auto slice = memory::slice_of(bucket.layout, t, bucket.home().owned, mesh, rank);
      const uint64_t row = bucket.layout.tensors[t].row;
      chunk.element_offset = slice.tensor_offset;
      chunk.element_count = slice.count;
      chunk.row_offset = slice.tensor_offset / row;
      chunk.row_count = slice.count / row;
    }
  }
  return chunk;
}

}  // namespace

namespace fsdp::abi {

std::vector<memory::ParamSpec> read_params(const fsdp_param *params, uint64_t count, uint64_t stride,
                                           const char *call) {
  check_stride<fsdp_param>(stride, call, "param_stride", "fsdp_param");
  if (count && !params) fail(FSDP_INVALID_ARGUMENT, "{}: params is NULL, param_count is {}", call, count);
  std::vector<memory::ParamSpec> specs;
  for (uint64_t i = 0; i < count; ++i) {
    const auto *at = reinterpret_cast<const fsdp_param *>(reinterpret_cast<const char *>(params) + i * stride);
    if (at->struct_size > stride)
      fail(FSDP_INVALID_ARGUMENT, "{}: params[{}].struct_size is {}, but param_stride is {}", call, i, at->struct_size,
           stride);
    memory::ParamSpec param = read_param(at, i, call);
    check_piece(param, specs, call);
    specs.push_back(std::move(param));
  }
  return specs;
}

}  // namespace fsdp::abi

extern "C" {

fsdp_status fsdp_find_param(const fsdp_model *model, const char *name, fsdp_group **group, uint64_t *param_index) {
  constexpr auto call = "fsdp_find_param";
  if (group) *group = nullptr;
  return guard([&] {
    const auto impl = acquire(model, call);
    check_pointer(group, call, "group");
    check_pointer(param_index, call, "param_index");
    const std::string wanted = read_name(name, 255, call, "name");
    const std::lock_guard lock(impl->mutex);
    for (size_t g = 0; g < impl->groups.size(); ++g) {
      const auto &params = impl->spec().groups[g].params;
      const auto found =
          std::find_if(params.begin(), params.end(), [&](const auto &param) { return param.name == wanted; });
      if (found == params.end()) continue;
      *group = impl->groups[g];
      *param_index = static_cast<uint64_t>(found - params.begin());
    }
    if (!*group) fail(FSDP_INVALID_ARGUMENT, "{}: no parameter of the model is named '{}'", call, wanted);
  });
}

fsdp_status fsdp_get_param_info(const fsdp_group *group, uint64_t param_index, fsdp_param *param) {
  constexpr auto call = "fsdp_get_param_info";
  return guard([&] {
    const HandledGroup handle = acquire_group(group, call);
    check_output(param, call, "fsdp_param");
    const std::lock_guard lock(handle.model->mutex);
    const memory::ParamSpec &spec = param_of(handle, param_index, call);
    fsdp_param value = FSDP_PARAM_INIT;
    value.name = spec.name.c_str();
    value.shape = spec.shape.data();
    value.dimension_count = static_cast<uint32_t>(spec.shape.size());
    value.dtype = spec.dtype;
    value.flags = spec.flags;
    value.granule = spec.granule;
    value.granule_rows = spec.granule_rows;
    value.row_dimensions = spec.row_dimensions;
    value.lr_scale = spec.lr_scale;
    value.user_data = spec.user_data;
    value.quantization = spec.quantization;
    value.missing_grad = spec.missing_grad;
    value.piece = spec.piece;
    value.optimizer = spec.optimizer;
    if (spec.is_box()) value.global_shape = spec.global_shape.data(), value.global_offset = spec.global_offset.data();
    write_output(param, value);
  });
}

fsdp_status fsdp_load_param(fsdp_group *group, uint64_t param_index, const void *data, fsdp_dtype dtype,
                            uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_load_param";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.params(call).load(impl, param_index, data, dtype, element_count, root);
  });
}

fsdp_status fsdp_read_param(fsdp_group *group, uint64_t param_index, void *data, fsdp_dtype dtype,
                            uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_read_param";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.params(call).read(impl, param_index, data, dtype, element_count, root);
  });
}

fsdp_status fsdp_get_param(fsdp_group *group, uint64_t param_index, fsdp_phase phase, fsdp_tensor *tensor) {
  constexpr auto call = "fsdp_get_param";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_output(tensor, call, "fsdp_tensor");
    check_phase(phase, call);
    runtime.place(impl, param_index, call);
    require_quantized(runtime, impl, param_index, false, call);
    require_readable(model, impl, impl.places[param_index].piece, phase, call);
    write_output(tensor, weight_view(model, runtime, impl, param_index, phase, call));
  });
}

fsdp_status fsdp_get_plane(fsdp_group *group, uint64_t param_index, fsdp_phase phase, fsdp_plane plane,
                           fsdp_tensor *tensor) {
  constexpr auto call = "fsdp_get_plane";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_output(tensor, call, "fsdp_tensor");
    check_phase(phase, call);
    runtime.place(impl, param_index, call);
    const Published which = read_plane(runtime, impl, param_index, plane, call);
    require_held(runtime, impl, param_index, phase, which, call);
    require_readable(model, impl, impl.places[param_index].piece, phase, call);
    write_output(tensor, plane_view(model, runtime, impl, param_index, phase, which, call));
  });
}

fsdp_status fsdp_load_plane(fsdp_group *group, uint64_t param_index, fsdp_plane plane, const void *data,
                            fsdp_dtype dtype, uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_load_plane";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    runtime.place(impl, param_index, call);
    const Published which = read_plane(runtime, impl, param_index, plane, call);
    model.params(call).load_plane(impl, param_index, which.kind, which.form, data, dtype, element_count, root);
  });
}

fsdp_status fsdp_swizzle_scales(fsdp_group *group, uint64_t param_index, fsdp_phase phase, fsdp_plane plane, void *data,
                                uint64_t *size_bytes, fsdp_stream stream) {
  constexpr auto call = "fsdp_swizzle_scales";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_pointer(size_bytes, call, "size_bytes");
    check_phase(phase, call);
    runtime.place(impl, param_index, call);
    const Published which = read_plane(runtime, impl, param_index, plane, call);
    device::Mxfp8Swizzle work = swizzle_of(runtime, impl, param_index, which, call);
    const uint64_t needed = work.bytes();
    const uint64_t given = *size_bytes;
    if (data && given >= needed) {
      require_held(runtime, impl, param_index, phase, which, call);
      require_readable(model, impl, impl.places[param_index].piece, phase, call);
    }
    *size_bytes = needed;
    if (!data) return;
    if (given < needed)
      fail(FSDP_INVALID_ARGUMENT, "{}: *size_bytes is {}, the scales of parameter '{}' of group '{}' need {}", call,
           given, runtime.param(impl, param_index).name, impl.name(), needed);
    const engine::ParamPlace &place = impl.places[param_index];
    work.scales = reinterpret_cast<const uint8_t *>(
        model.gatherer(call).source(impl, phase, place.bucket, which.kind, which.form) +
        plane_offset(runtime, place, which));
    work.to = static_cast<uint8_t *>(data);
    model.gatherer(call).read(impl, place.piece, phase, stream, call,
                              [&](device::Stream &reader) { reader.swizzle_scales(work); });
  });
}

fsdp_status fsdp_get_params(fsdp_group *group, fsdp_phase phase, fsdp_tensor *tensors, uint64_t tensor_count,
                            uint64_t tensor_stride) {
  constexpr auto call = "fsdp_get_params";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_tensors(impl, tensors, tensor_count, tensor_stride, "tensor", call);
    check_phase(phase, call);
    for (uint32_t p = 0; p < impl.piece_count(); ++p) require_readable(model, impl, p, phase, call);
    for (uint64_t i = 0; i < tensor_count; ++i)
      write_element(tensors, i, tensor_stride, weight_view(model, runtime, impl, i, phase, call));
  });
}

fsdp_status fsdp_load_chunk(fsdp_group *group, uint64_t param_index, const void *data, fsdp_dtype dtype,
                            uint64_t row_offset, uint64_t row_count, uint32_t flags) {
  constexpr auto call = "fsdp_load_chunk";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.params(call).load_rows(impl, param_index, data, dtype, row_offset, row_count);
  });
}

fsdp_status fsdp_load_state(fsdp_group *group, uint64_t param_index, const char *name, const void *data,
                            fsdp_dtype dtype, uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_load_state";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.params(call).load_state(impl, param_index, read_name(name, 63, call, "name"), data, dtype, element_count,
                                  root);
  });
}

fsdp_status fsdp_read_state(fsdp_group *group, uint64_t param_index, const char *name, void *data, fsdp_dtype dtype,
                            uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_read_state";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.params(call).read_state(impl, param_index, read_name(name, 63, call, "name"), data, dtype, element_count,
                                  root);
  });
}

fsdp_status fsdp_load_grad(fsdp_group *group, uint64_t param_index, const void *data, fsdp_dtype dtype,
                           uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_load_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.load_grad(impl, param_index, data, dtype, element_count, root);
  });
}

fsdp_status fsdp_read_grad(fsdp_group *group, uint64_t param_index, void *data, fsdp_dtype dtype,
                           uint64_t element_count, int32_t root, uint32_t flags) {
  constexpr auto call = "fsdp_read_grad";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    check_flags(flags, 0, call, "flags");
    model.params(call).read_grad(impl, param_index, data, dtype, element_count, root);
  });
}

fsdp_status fsdp_set_param_lr_scale(fsdp_group *group, uint64_t param_index, double lr_scale) {
  constexpr auto call = "fsdp_set_param_lr_scale";
  return in_group(group, call, [&](HandledModel &model, engine::Runtime &runtime, engine::Group &impl) {
    runtime.place(impl, param_index, call);
    check_lr_scale(lr_scale, call, "lr_scale");
    const std::lock_guard lock(model.mutex);  // other threads may ask for the descriptor
    model.set_lr_scale(impl, param_index, lr_scale);
  });
}

fsdp_status fsdp_set_param_trainable(fsdp_group *group, uint64_t param_index, int32_t trainable) {
  constexpr auto call = "fsdp_set_param_trainable";
  return in_group(group, call, [&](HandledModel &model, engine::Runtime &runtime, engine::Group &impl) {
    runtime.place(impl, param_index, call);
    if (trainable != 0 && trainable != 1)
      fail(FSDP_INVALID_ARGUMENT, "{}: trainable is {}, it must be 0 or 1", call, trainable);
    model.set_trainable(impl, param_index, trainable == 1);
  });
}

fsdp_status fsdp_get_chunk(const fsdp_group *group, uint64_t param_index, uint32_t rank, fsdp_chunk *chunk) {
  constexpr auto call = "fsdp_get_chunk";
  return guard([&] {
    const HandledGroup handle = acquire_group(group, call);
    check_output(chunk, call, "fsdp_chunk");
    param_of(handle, param_index, call);
    const memory::ModelPlan &plan = handle.model->plan(call);
    const memory::ModelSpec &spec = handle.model->spec();
    const layout::Mesh &mesh = spec.mesh_of(spec.groups[handle.index]);
    write_output(chunk, make_chunk(plan, mesh, handle.index, param_index, mesh.index_of(rank, call)));
  });
}

}  // extern "C"
