// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/checked.h"
#include "base/dtype.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

constexpr uint32_t most_dimensions = 16;

// Names a field of one descriptor: "fsdp_create_group: params[3] ('wq').granule".
std::string field_of(uint64_t index, const memory::ParamSpec &param, const char *field) {
  return format_text("params[{}] ('{}').{}", index, param.name, field);
}

void read_shape(const fsdp_param &given, uint64_t index, memory::ParamSpec &param, const char *call) {
  if (given.dimension_count > most_dimensions)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, at most {} are allowed", call, field_of(index, param, "dimension_count"),
         given.dimension_count, most_dimensions);
  if (given.dimension_count && !given.shape)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is NULL", call, field_of(index, param, "shape"));
  for (uint32_t d = 0; d < given.dimension_count; ++d) {
    if (given.shape[d] == 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is 0", call, field_of(index, param, format_text("shape[{}]", d).c_str()));
    param.element_count = checked_multiply(param.element_count, given.shape[d], field_of(index, param, "shape").c_str());
    param.shape.push_back(given.shape[d]);
  }
}

memory::ParamSpec read_param(const fsdp_param *at, uint64_t index, const char *call) {
  const fsdp_param given = read_options(at, call, format_text("params[{}]", index).c_str());
  memory::ParamSpec param;
  param.name = read_name(given.name, 255, call, format_text("params[{}].name", index).c_str());
  read_shape(given, index, param, call);
  param.dtype = read_enum(given.dtype, FSDP_FLOAT32 + 0, FSDP_FLOAT16 + 0, call, field_of(index, param, "dtype").c_str());
  check_flags(given.flags, FSDP_PARAM_FROZEN | FSDP_PARAM_NO_DECAY, call, field_of(index, param, "flags").c_str());
  param.flags = given.flags;
  param.granule = read_enum(given.granule, FSDP_GRANULE_ROW + 0, FSDP_GRANULE_TENSOR + 0, call, field_of(index, param, "granule").c_str());
  if (param.granule == FSDP_GRANULE_BLOCK) {
    if (given.granule_rows == 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is 0, but the granule is FSDP_GRANULE_BLOCK", call, field_of(index, param, "granule_rows"));
    param.granule_rows = given.granule_rows;
  }
  if (!std::isfinite(given.lr_scale) || given.lr_scale < 0)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be finite and not negative", call, field_of(index, param, "lr_scale"),
         given.lr_scale);
  param.lr_scale = given.lr_scale == 0 ? 1.0 : given.lr_scale;
  param.user_data = given.user_data;
  return param;
}

std::vector<memory::ParamSpec> read_params(const fsdp_param *params, uint64_t count, uint64_t stride, const char *call) {
  if (count && !params) fail(FSDP_INVALID_ARGUMENT, "{}: params is NULL, param_count is {}", call, count);
  if (count > 1 && (stride < first_size<fsdp_param> || stride % alignof(fsdp_param)))
    fail(FSDP_INVALID_ARGUMENT, "{}: param_stride is {}; pass sizeof(fsdp_param)", call, stride);
  std::vector<memory::ParamSpec> specs;
  for (uint64_t i = 0; i < count; ++i) {
    const auto *at = reinterpret_cast<const fsdp_param *>(reinterpret_cast<const char *>(params) + i * stride);
    if (count > 1 && at->struct_size > stride)
      fail(FSDP_INVALID_ARGUMENT, "{}: params[{}].struct_size is {}, but param_stride is {}", call, i, at->struct_size, stride);
    specs.push_back(read_param(at, i, call));
  }
  return specs;
}

const memory::ParamSpec &param_of(engine::Model &model, const fsdp_group &group, uint64_t index, const char *call) {
  const memory::GroupSpec &spec = model.spec().groups[group.index];
  if (index >= spec.params.size())
    fail(FSDP_INVALID_ARGUMENT, "{}: param_index {} is outside [0, {}) of group '{}'", call, index, spec.params.size(), spec.name);
  return spec.params[index];
}

fsdp_chunk make_chunk(const memory::ModelPlan &plan, uint32_t group, uint64_t param_index, uint32_t rank) {
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  for (const uint32_t b : plan.groups[group].buckets) {
    const memory::BucketPlan &bucket = plan.buckets[b];
    for (uint32_t t = 0; t < bucket.params.size(); ++t) {
      if (bucket.params[t] != param_index) continue;
      const auto slice = bucket.layout.slice(t, rank);
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

std::string read_name(const char *name, size_t most, const char *call, const char *field) {
  if (!name || !*name) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}", call, field, name ? "empty" : "NULL");
  const std::string text(name, strnlen(name, most + 1));
  if (text.size() > most) fail(FSDP_INVALID_ARGUMENT, "{}: {} is longer than {} bytes: '{}...'", call, field, most, text.substr(0, 40));
  if (!is_utf8(text)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not UTF-8", call, field);
  return text;
}

// Overlong forms and surrogates are refused with the rest.
bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i]);
    const size_t length = lead < 0x80 ? 1 : lead >> 5 == 6 ? 2 : lead >> 4 == 14 ? 3 : lead >> 3 == 30 ? 4 : 0;
    if (length == 0 || i + length > text.size()) return false;
    uint32_t code = length == 1 ? lead : lead & (0x7Fu >> length);
    for (size_t k = 1; k < length; ++k) {
      const auto next = static_cast<unsigned char>(text[i + k]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3F);
    }
    constexpr uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < least[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    i += length;
  }
  return true;
}

}  // namespace fsdp::abi

extern "C" {

fsdp_status fsdp_create_group(fsdp_model *model, const char *name, const fsdp_param *params, uint64_t param_count,
                              uint64_t param_stride, const fsdp_group_options *options, fsdp_group **group) {
  constexpr auto call = "fsdp_create_group";
  if (group) *group = nullptr;
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(group, call, "group");
    const auto given = read_options(options, call, "fsdp_group_options");
    check_flags(given.flags, FSDP_GROUP_RESIDENT, call, "fsdp_group_options.flags");
    memory::GroupSpec spec;
    spec.name = read_name(name, 255, call, "name");
    spec.params = read_params(params, param_count, param_stride, call);
    const engine::GroupDefaults &defaults = impl.defaults();
    spec.strategy = read_enum(given.strategy, defaults.strategy, FSDP_OPTIM_GRADS_PARAMS + 0, call, "fsdp_group_options.strategy");
    spec.grad_dtype = read_enum(given.grad_dtype, defaults.grad_dtype, FSDP_FLOAT16 + 0, call, "fsdp_group_options.grad_dtype");
    spec.reduce_dtype = read_enum(given.reduce_dtype, defaults.reduce_dtype, FSDP_FLOAT16 + 0, call, "fsdp_group_options.reduce_dtype");
    spec.reduce_policy = spec.strategy == FSDP_OPTIM      ? FSDP_REDUCE_LAST
                         : defaults.reduce_policy         ? defaults.reduce_policy
                         : spec.strategy == FSDP_NO_SHARD ? FSDP_REDUCE_LAST + 0
                                                          : FSDP_REDUCE_EACH + 0;
    spec.resident = given.flags & FSDP_GROUP_RESIDENT;
    auto handle = std::make_unique<fsdp_group>();
    handle->held.put(acquire(model, call));
    const std::lock_guard lock(model->mutex);
    // Room first: once the model has the group, nothing may fail. Doubling, or many groups would be moved again and again.
    if (model->groups.size() == model->groups.capacity()) model->groups.reserve(2 * model->groups.size() + 16);
    handle->index = impl.add_group(std::move(spec));
    *group = handle.get();
    model->groups.push_back(std::move(handle));
  });
}

fsdp_status fsdp_get_param_info(const fsdp_group *group, uint64_t param_index, fsdp_param *param) {
  constexpr auto call = "fsdp_get_param_info";
  return guard([&] {
    const fsdp_group &handle = check(group, call);
    check_output(param, call, "fsdp_param");
    const auto model = acquire(group, call);
    const memory::ParamSpec &spec = param_of(*model, handle, param_index, call);
    fsdp_param value = FSDP_PARAM_INIT;
    value.name = spec.name.c_str();
    value.shape = spec.shape.data();
    value.dimension_count = static_cast<uint32_t>(spec.shape.size());
    value.dtype = spec.dtype;
    value.flags = spec.flags;
    value.granule = spec.granule;
    value.granule_rows = spec.granule_rows;
    value.lr_scale = spec.lr_scale;
    value.user_data = spec.user_data;
    write_output(param, value);
  });
}

fsdp_status fsdp_load_param(fsdp_group *group, uint64_t param_index, const void *data, fsdp_dtype dtype,
                            uint64_t element_count, int32_t root) {
  return in_group(group, "fsdp_load_param", [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    model.params().load(impl, param_index, data, dtype, element_count, root);
  });
}

fsdp_status fsdp_read_param(fsdp_group *group, uint64_t param_index, void *data, fsdp_dtype dtype, uint64_t element_count) {
  return in_group(group, "fsdp_read_param", [&](engine::Model &model, engine::Runtime &, engine::Group &impl) {
    model.params().read(impl, param_index, data, dtype, element_count);
  });
}

fsdp_status fsdp_get_param(fsdp_group *group, uint64_t param_index, fsdp_phase phase, fsdp_tensor *tensor) {
  constexpr auto call = "fsdp_get_param";
  return in_group(group, call, [&](engine::Model &model, engine::Runtime &runtime, engine::Group &impl) {
    check_output(tensor, call, "fsdp_tensor");
    check_phase(phase, call);
    const engine::ParamPlace &place = runtime.place(impl, param_index, call);
    if (!model.gatherer().readable(impl, phase))
      fail(FSDP_INVALID_STATE, "{}: group '{}' is not readable now; {}", call, impl.name(),
           runtime.window_open ? "the update window is open: publish first" : "call fsdp_unshard first");
    const memory::ParamSpec &param = runtime.param(impl, param_index);
    fsdp_tensor value = FSDP_TENSOR_INIT;
    value.data = const_cast<std::byte *>(model.gatherer().view(impl, phase, place.bucket)) +
                 runtime.placement(place).full_offset * dtype_size(param.dtype);
    value.shape = param.shape.data();
    value.element_count = param.element_count;
    value.dimension_count = static_cast<uint32_t>(param.shape.size());
    value.dtype = param.dtype;
    write_output(tensor, value);
  });
}

fsdp_status fsdp_get_chunk(const fsdp_group *group, uint64_t param_index, uint32_t rank, fsdp_chunk *chunk) {
  constexpr auto call = "fsdp_get_chunk";
  return guard([&] {
    const fsdp_group &handle = check(group, call);
    check_output(chunk, call, "fsdp_chunk");
    const auto model = acquire(group, call);
    param_of(*model, handle, param_index, call);
    const memory::ModelPlan &plan = model->plan(call);
    const memory::ModelSpec &spec = model->spec();
    if (rank >= spec.mesh.size())
      fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is outside [0, {})", call, rank, spec.mesh.size());
    write_output(chunk, make_chunk(plan, handle.index, param_index, spec.mesh.slot(rank)));
  });
}

}  // extern "C"
