// SPDX-License-Identifier: Apache-2.0
// Parameters: reads and returns descriptors, views of weights, loads and reads, chunks.
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

// The offset in bytes of the parameter in its bucket's plane.
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

// Describes the scales of an MXFP8 plane; the caller of this function adds their addresses.
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
      const auto slice = memory::slice_of(bucket.layout, t, bucket.owned_plane().owned, mesh, rank);
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
    if (!spec.matrix_splits.empty()) {
      value.matrix = FSDP_MATRIX_LAST_TWO;
      value.matrix_splits = spec.matrix_splits.data();
      value.matrix_split_count = spec.matrix_splits.size();
    }
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
    model.optimizer(call).settle_grads();
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
