// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

void check_beta(double beta, const char *call, const char *field) {
  if (!(beta >= 0 && beta < 1)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be in [0, 1)", call, field, beta);
}

fsdp_adamw_options read_adamw_options(const fsdp_adamw_options *given, double lr, const char *call) {
  const auto options = read_options(given, call, "fsdp_adamw_options");
  check_flags(options.flags, FSDP_ADAMW_BETA1_ZERO, call, "fsdp_adamw_options.flags");
  check_flags(options.reserved, 0, call, "fsdp_adamw_options.reserved");
  check_beta(options.beta1, call, "beta1");
  check_beta(options.beta2, call, "beta2");
  if ((options.flags & FSDP_ADAMW_BETA1_ZERO) && options.beta1 != 0)
    fail(FSDP_INVALID_ARGUMENT, "{}: FSDP_ADAMW_BETA1_ZERO contradicts beta1 {}", call, options.beta1);
  if (!std::isfinite(options.epsilon) || options.epsilon < 0)
    fail(FSDP_INVALID_ARGUMENT, "{}: epsilon is {}, it must be finite and not negative", call, options.epsilon);
  if (!std::isfinite(options.weight_decay) || options.weight_decay < 0)
    fail(FSDP_INVALID_ARGUMENT, "{}: weight_decay is {}, it must be finite and not negative", call, options.weight_decay);
  if (!std::isfinite(lr)) fail(FSDP_INVALID_ARGUMENT, "{}: lr is {}, it must be finite", call, lr);
  return options;
}

// The group handle that the caller got from fsdp_create_group.
fsdp_group *group_handle(fsdp_model *model, uint32_t index, const char *call) {
  const std::lock_guard lock(model->mutex);
  if (index >= model->groups.size()) fail(FSDP_INVALID_HANDLE, "{}: the model was destroyed by another thread", call);
  return model->groups[index].get();
}

}  // namespace

extern "C" {

fsdp_status fsdp_get_shard_count(fsdp_model *model, uint64_t *shard_count) {
  constexpr auto call = "fsdp_get_shard_count";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.runtime(call);
    *check_pointer(shard_count, call, "shard_count") = impl.optimizer().shards().size();
  });
}

fsdp_status fsdp_get_shard(fsdp_model *model, uint64_t shard_index, fsdp_shard *shard) {
  constexpr auto call = "fsdp_get_shard";
  return in_model(model, call, [&](engine::Model &impl) {
    const engine::Runtime &runtime = impl.runtime(call);
    check_output(shard, call, "fsdp_shard");
    const engine::Shard &own = impl.optimizer().shard(shard_index, call);
    const engine::Group &group = runtime.groups[own.group];
    const memory::ParamSpec &param = runtime.param(group, own.param_index);
    const uint64_t row = runtime.placement(group.places[own.param_index]).row;
    fsdp_shard value = FSDP_SHARD_INIT;
    value.group = group_handle(model, own.group, call);
    value.param_index = own.param_index;
    value.name = param.name.c_str();
    value.main_weight = impl.optimizer().main_weight(own);
    value.main_grad = impl.optimizer().main_grad(own);
    value.element_offset = own.slice.tensor_offset;
    value.element_count = own.slice.count;
    value.row_offset = own.slice.tensor_offset / row;
    value.row_count = own.slice.count / row;
    value.lr_scale = param.lr_scale;
    value.flags = param.flags;
    value.state_count = static_cast<uint32_t>(impl.spec().states.size());
    write_output(shard, value);
  });
}

fsdp_status fsdp_get_shard_state(fsdp_model *model, uint64_t shard_index, const char *name, fsdp_tensor *state) {
  constexpr auto call = "fsdp_get_shard_state";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.runtime(call);
    check_output(state, call, "fsdp_tensor");
    check_pointer(name, call, "name");
    const engine::Shard &own = impl.optimizer().shard(shard_index, call);
    const engine::Plane &plane = impl.optimizer().state(own, name, call);
    fsdp_tensor value = FSDP_TENSOR_INIT;
    value.data = plane.at(own.slice);
    value.shape = &own.slice.count;
    value.element_count = own.slice.count;
    value.dimension_count = 1;
    value.dtype = plane.dtype;
    write_output(state, value);
  });
}

fsdp_status fsdp_get_grad_norm(fsdp_model *model, fsdp_stream stream, double *norm) {
  constexpr auto call = "fsdp_get_grad_norm";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(norm, call, "norm");
    *norm = impl.optimizer().grad_norm(impl.require_measurable(stream, call));
  });
}

fsdp_status fsdp_get_param_grad_norms(fsdp_model *model, fsdp_stream stream, double *norms, uint64_t norm_count) {
  constexpr auto call = "fsdp_get_param_grad_norms";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(norms, call, "norms");
    impl.optimizer().param_grad_norms(impl.require_measurable(stream, call), norms, norm_count);
  });
}

fsdp_status fsdp_scale_grads(fsdp_model *model, double factor, fsdp_stream stream) {
  constexpr auto call = "fsdp_scale_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    if (!std::isfinite(factor)) fail(FSDP_INVALID_ARGUMENT, "{}: factor is {}, it must be finite", call, factor);
    impl.require_grads(call);
    impl.optimizer().scale_grads(factor, impl.runtime(call).caller_stream(stream, call));
  });
}

fsdp_status fsdp_clip_grads(fsdp_model *model, double max_norm, fsdp_stream stream, double *norm) {
  constexpr auto call = "fsdp_clip_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    const double found = impl.optimizer().clip_grads(max_norm, impl.require_measurable(stream, call));
    if (norm) *norm = found;
  });
}

fsdp_status fsdp_check_grads(fsdp_model *model, fsdp_stream stream, int32_t *found, const char **name) {
  constexpr auto call = "fsdp_check_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(found, call, "found");
    const char *culprit = impl.optimizer().find_nonfinite(impl.require_measurable(stream, call));
    *found = culprit != nullptr;
    if (name) *name = culprit;
  });
}

fsdp_status fsdp_step_adamw(fsdp_model *model, double lr, const fsdp_adamw_options *options, fsdp_stream stream) {
  constexpr auto call = "fsdp_step_adamw";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.step_adamw(lr, read_adamw_options(options, lr, call), stream);
  });
}

fsdp_status fsdp_apply_grads(fsdp_model *model, const fsdp_grad *grads, uint64_t grad_count, double lr, double max_norm,
                             const fsdp_adamw_options *options, fsdp_stream stream, double *norm) {
  constexpr auto call = "fsdp_apply_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    if (grad_count) check_pointer(grads, call, "grads");
    if (!std::isfinite(max_norm) || max_norm < 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: max_norm is {}, it must be 0 (no clipping) or above", call, max_norm);
    const auto checked = read_adamw_options(options, lr, call);
    const double found = impl.apply_grads(grads, grad_count, lr, max_norm, checked, stream, norm != nullptr);
    if (norm) *norm = found;
  });
}

}  // extern "C"
