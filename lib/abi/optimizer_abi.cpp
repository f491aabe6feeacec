// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"
#include "engine/gradients/adamw_spans.h"
#include "memory/matrix_plan.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

void check_beta(double beta, const char *call, const char *field) {
  if (!(beta >= 0 && beta < 1)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be in [0, 1)", call, field, beta);
}

fsdp_adamw_options read_adamw_options(const fsdp_adamw_options *given, double lr, const char *call) {
  auto options = read_options(given, call, "fsdp_adamw_options");
  check_flags(options.flags, FSDP_ADAMW_BETA1_ZERO | FSDP_ADAMW_BETA2_ZERO | FSDP_ADAMW_EPSILON_ZERO, call,
              "fsdp_adamw_options.flags");
  if (options.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_adamw_options.reserved is {}, it must be 0", call, options.reserved);
  check_beta(options.beta1, call, "beta1");
  check_beta(options.beta2, call, "beta2");
  if (!std::isfinite(options.epsilon) || options.epsilon < 0)
    fail(FSDP_INVALID_ARGUMENT, "{}: epsilon is {}, it must be finite and not negative", call, options.epsilon);
  check_factor(options.weight_decay, call, "weight_decay");
  if (options.weight_decay < 0)
    fail(FSDP_INVALID_ARGUMENT, "{}: weight_decay is {}, it must be finite and not negative", call,
         options.weight_decay);
  check_factor(lr, call, "lr");
  if (options.step > max_steps)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_adamw_options.step is {}, the highest is {}", call, options.step, max_steps);
  const uint32_t flags = options.flags;
  options.beta1 = read_value(options.beta1, 0.9, flags & FSDP_ADAMW_BETA1_ZERO, "FSDP_ADAMW_BETA1_ZERO", call, "beta1");
  options.beta2 =
      read_value(options.beta2, 0.999, flags & FSDP_ADAMW_BETA2_ZERO, "FSDP_ADAMW_BETA2_ZERO", call, "beta2");
  options.epsilon =
      read_value(options.epsilon, 1e-8, flags & FSDP_ADAMW_EPSILON_ZERO, "FSDP_ADAMW_EPSILON_ZERO", call, "epsilon");
  return options;
}

void check_rounded(const engine::Runtime &runtime, const engine::Group &group, const engine::ParamPlace &place,
                   const memory::ParamSpec &param, uint64_t step, const char *call) {
  runtime.step.require_window(call);
  if (runtime.capture_id)
    fail(FSDP_INVALID_STATE, "{}: the model is being captured into a graph, whose replays would all round with step {}",
         call, step);
  const memory::BucketPlan &bucket = runtime.plan.buckets[place.bucket];
  if (bucket.frozen || bucket.main_storage != FSDP_MAIN_NONE)
    fail(FSDP_INVALID_STATE, "{}: parameter '{}' of group '{}' {}; only main weights of FSDP_MAIN_NONE are rounded so",
         call, param.name, group.name(),
         bucket.frozen ? "is FROZEN"
         : bucket.main_storage == FSDP_MAIN_SPLIT16
             ? "has fp32 main weights in two halves, which only fsdp_step_adamw updates"
             : "has fp32 main weights, which take fp32 numbers at fsdp_shard.main_weight");
}

void check_numbers(const float *from, const void *to, uint64_t count, const char *call) {
  check_pointer(from, call, "from");
  check_pointer(to, call, "to");
  const auto first = reinterpret_cast<uintptr_t>(from), second = reinterpret_cast<uintptr_t>(to);
  if (first < second + count * sizeof(uint16_t) && second < first + count * sizeof(float))
    fail(FSDP_INVALID_ARGUMENT, "{}: from and to overlap", call);
}

// Describes `count` elements of a shard from element `first` on. The addresses are left to the call.
fsdp_shard shard_of(HandledModel &model, const engine::Runtime &runtime, const engine::Optimizer &optimizer,
                    const engine::Shard &own, uint64_t first, uint64_t count) {
  const engine::Group &group = runtime.groups[own.group];
  const memory::ParamSpec &param = runtime.param(group, own.param_index);
  const uint64_t row = runtime.placement(group.places[own.param_index]).row;
  fsdp_shard value = FSDP_SHARD_INIT;
  value.group = model.group_handle(own.group);
  value.param_index = own.param_index;
  value.name = param.name.c_str();
  value.main_weight_dtype = own.main_weight_dtype();
  value.main_grad_dtype = FSDP_FLOAT32;
  value.element_offset = own.slice.tensor_offset + first;
  value.element_count = count;
  value.row_offset = value.element_offset / row;
  value.row_count = (value.element_offset + count - 1) / row + 1 - value.row_offset;
  value.lr_scale = param.lr_scale;
  value.flags = param.flags | (optimizer.is_kept(own) ? FSDP_PARAM_FROZEN + 0u : 0u);
  value.state_count = model.spec().state_count(param);
  return value;
}

}  // namespace

extern "C" {

fsdp_status fsdp_get_shard_count(const fsdp_model *model, uint64_t *shard_count) {
  constexpr auto call = "fsdp_get_shard_count";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.runtime(call);
    *check_pointer(shard_count, call, "shard_count") = impl.optimizer(call).shards().size();
  });
}

fsdp_status fsdp_get_shard(const fsdp_model *model, uint64_t shard_index, fsdp_shard *shard) {
  constexpr auto call = "fsdp_get_shard";
  return in_model(model, call, [&](HandledModel &impl) {
    const engine::Runtime &runtime = impl.runtime(call);
    check_output(shard, call, "fsdp_shard");
    const engine::Shard &own = impl.optimizer(call).shard(shard_index, call);
    fsdp_shard value = shard_of(impl, runtime, impl.optimizer(call), own, 0, own.slice.count);
    value.main_weight = runtime.storage->is_in_file(own.main_weight()) ? nullptr : own.main_weight();
    value.main_grad = runtime.storage->is_in_file(own.main_grad()) ? nullptr : own.main_grad();
    write_output(shard, value);
  });
}

fsdp_status fsdp_get_shard_state(const fsdp_model *model, uint64_t shard_index, const char *name, fsdp_tensor *state) {
  constexpr auto call = "fsdp_get_shard_state";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.runtime(call);
    check_output(state, call, "fsdp_tensor");
    check_pointer(name, call, "name");
    const engine::Shard &own = impl.optimizer(call).shard(shard_index, call);
    const engine::StatePart part = impl.optimizer(call).state(own, name, call);
    write_output(state, view_of(impl.context(), part.data, {part.count, 1}, part.dtype, 0));
  });
}

fsdp_status fsdp_next_shard_chunk(fsdp_model *model, fsdp_stream stream, fsdp_shard *chunk) {
  constexpr auto call = "fsdp_next_shard_chunk";
  return in_model(model, call, [&](HandledModel &impl) {
    check_output(chunk, call, "fsdp_shard");
    const engine::ShardChunk *given = impl.chunks(call).next(stream);
    fsdp_shard value = FSDP_SHARD_INIT;
    if (given) {
      value = shard_of(impl, impl.runtime(call), impl.optimizer(call), *given->shard, given->first, given->count);
      value.main_weight = given->main_weight;
      value.main_grad = given->main_grad;
    }
    write_output(chunk, value);
  });
}

fsdp_status fsdp_get_shard_chunk_state(fsdp_model *model, const char *name, fsdp_tensor *state) {
  constexpr auto call = "fsdp_get_shard_chunk_state";
  return in_model(model, call, [&](engine::Model &impl) {
    check_output(state, call, "fsdp_tensor");
    check_pointer(name, call, "name");
    const engine::StatePart part = impl.chunks(call).state(name, call);
    write_output(state, view_of(impl.context(), part.data, {part.count, 1}, part.dtype, 0));
  });
}

fsdp_status fsdp_get_grad_norm(fsdp_model *model, const fsdp_mesh *mesh, fsdp_stream stream, double *norm) {
  constexpr auto call = "fsdp_get_grad_norm";
  return in_model(model, call, [&](engine::Model &impl) {
    device::Stream &caller = impl.update(call).require_norm(stream, norm || mesh, call);
    impl.optimizer(call).grad_norm(mesh_of(mesh, impl.context(), call).get(), caller, norm);
  });
}

fsdp_status fsdp_get_last_norm(const fsdp_model *model, double *norm) {
  constexpr auto call = "fsdp_get_last_norm";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.runtime(call);
    check_pointer(norm, call, "norm");
    const auto found = impl.optimizer(call).last_norm();
    if (!found)
      fail(FSDP_INVALID_STATE, "{}: no norm was measured yet; call fsdp_get_grad_norm or fsdp_clip_grads first", call);
    *norm = *found;
  });
}

fsdp_status fsdp_get_param_grad_norms(fsdp_model *model, fsdp_stream stream, double *norms, uint64_t norm_count) {
  constexpr auto call = "fsdp_get_param_grad_norms";
  return in_model(model, call, [&](engine::Model &impl) {
    if (norm_count) check_pointer(norms, call, "norms");
    impl.optimizer(call).param_grad_norms(impl.update(call).require_measurable(stream, call), norms, norm_count);
  });
}

fsdp_status fsdp_get_param_weight_norms(fsdp_model *model, fsdp_stream stream, double *norms, uint64_t norm_count) {
  constexpr auto call = "fsdp_get_param_weight_norms";
  return in_model(model, call, [&](engine::Model &impl) {
    if (norm_count) check_pointer(norms, call, "norms");
    impl.optimizer(call).param_weight_norms(impl.update(call).require_readable(stream, call), norms, norm_count);
  });
}

fsdp_status fsdp_count_zero_grads(fsdp_model *model, fsdp_stream stream, uint64_t *zero_count) {
  constexpr auto call = "fsdp_count_zero_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(zero_count, call, "zero_count");
    *zero_count = impl.optimizer(call).count_zero_grads(impl.update(call).require_measurable(stream, call));
  });
}

fsdp_status fsdp_scale_grads(fsdp_model *model, double factor, fsdp_stream stream) {
  constexpr auto call = "fsdp_scale_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    check_factor(factor, call, "factor");
    impl.update(call).require_grads(call);
    impl.optimizer(call).scale_grads(factor, impl.runtime(call).caller_stream(stream, call));
  });
}

fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_mesh *mesh, double max_norm, fsdp_stream stream,
                            double *norm) {
  constexpr auto call = "fsdp_clip_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    device::Stream &caller = impl.update(call).require_norm(stream, norm || mesh, call);
    impl.optimizer(call).clip_grads(mesh_of(mesh, impl.context(), call).get(), max_norm, caller, norm);
  });
}

fsdp_status fsdp_check_grads(fsdp_model *model, fsdp_stream stream, int32_t *found, const char **name) {
  constexpr auto call = "fsdp_check_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(found, call, "found");
    const char *culprit = impl.optimizer(call).find_nonfinite(impl.update(call).require_measurable(stream, call));
    *found = culprit != nullptr;
    if (name) *name = culprit;
  });
}

fsdp_status fsdp_step_adamw(fsdp_model *model, double lr, const fsdp_adamw_options *options, fsdp_stream stream) {
  constexpr auto call = "fsdp_step_adamw";
  return in_model(model, call, [&](engine::Model &impl) {
    impl.update(call).step_adamw(lr, read_adamw_options(options, lr, call), stream);
  });
}

fsdp_status fsdp_round_stochastic(fsdp_group *group, uint64_t param_index, uint64_t element_offset, const float *from,
                                  void *to, uint64_t count, uint64_t step, fsdp_stream stream) {
  constexpr auto call = "fsdp_round_stochastic";
  return in_group(group, call, [&](engine::Model &, engine::Runtime &runtime, engine::Group &impl) {
    const engine::ParamPlace place = runtime.place(impl, param_index, call);
    const memory::ParamSpec &param = runtime.param(impl, param_index);
    check_rounded(runtime, impl, place, param, step, call);
    if (element_offset > param.element_count || count > param.element_count - element_offset)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} elements from {} on of parameter '{}' of group '{}', which has {}", call,
           count, element_offset, param.name, impl.name(), param.element_count);
    if (!count) return;
    check_numbers(from, to, count, call);
    device::RandomRounding numbers{};
    numbers.from = from, numbers.to = static_cast<uint16_t *>(to), numbers.count = count;
    engine::round_randomly(runtime, param, numbers, element_offset, step, runtime.caller_stream(stream, call));
  });
}

fsdp_status fsdp_apply_grads(fsdp_model *model, const fsdp_grad *grads, uint64_t grad_count, uint64_t grad_stride,
                             double lr, double max_norm, const fsdp_adamw_options *options, fsdp_stream stream,
                             double *norm) {
  constexpr auto call = "fsdp_apply_grads";
  return in_model(model, call, [&](engine::Model &impl) {
    const auto array = read_array(grads, grad_count, grad_stride, call, "grad", "fsdp_grad");
    if (!std::isfinite(max_norm) || max_norm < 0)
      fail(FSDP_INVALID_ARGUMENT, "{}: max_norm is {}, it must be 0 (no clipping) or above", call, max_norm);
    const auto checked = read_adamw_options(options, lr, call);
    impl.update(call).apply_grads(array, lr, max_norm, checked, stream, norm);
  });
}

}  // extern "C"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

fsdp_matrix_options read_matrix_options(const fsdp_matrix_options *given, const char *call) {
  auto options = read_options(given, call, "fsdp_matrix_options");
  if (options.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_matrix_options.reserved is {}, it must be 0", call, options.reserved);
  options.dtype = read_enum(options.dtype, FSDP_FLOAT32 + 0, FSDP_FLOAT16 + 0, call, "fsdp_matrix_options.dtype");
  return options;
}

// A matrix without data tells the caller that there are no more.
fsdp_matrix matrix_of(HandledModel &model, const engine::GivenMatrices &given) {
  const memory::Matrix &first = *given.first;
  fsdp_matrix view = FSDP_MATRIX_INIT;
  view.group = model.group_handle(first.group);
  view.name = model.spec().groups[first.group].params[first.param].name.c_str();
  view.param_index = first.param;
  view.batch_index = first.batch;
  view.split_index = first.split;
  view.row_offset = first.row_offset;
  view.rows = first.rows;
  view.columns = first.columns;
  view.count = given.count;
  view.stride_bytes = given.stride_bytes;
  view.data = given.data;
  view.dtype = given.dtype;
  return view;
}

}  // namespace

extern "C" {

fsdp_status fsdp_collect_matrices(fsdp_model *model, const fsdp_matrix_options *options, fsdp_stream stream) {
  constexpr auto call = "fsdp_collect_matrices";
  return in_model(model, call, [&](engine::Model &impl) {
    const fsdp_matrix_options given = read_matrix_options(options, call);
    impl.update(call).collect_matrices(given.source, given.target, given.dtype, stream);
  });
}

fsdp_status fsdp_next_matrix(fsdp_model *model, fsdp_stream stream, fsdp_matrix *matrix) {
  constexpr auto call = "fsdp_next_matrix";
  return in_model(model, call, [&](HandledModel &impl) {
    check_output(matrix, call, "fsdp_matrix");
    const auto given = impl.update(call).next_matrix(stream);
    fsdp_matrix none = FSDP_MATRIX_INIT;
    write_output(matrix, given ? matrix_of(impl, *given) : none);
  });
}

fsdp_status fsdp_return_matrices(fsdp_model *model, fsdp_stream stream) {
  constexpr auto call = "fsdp_return_matrices";
  return in_model(model, call, [&](engine::Model &impl) { impl.update(call).return_matrices(stream); });
}

fsdp_status fsdp_get_matrix_plan(const fsdp_model *model, char *buffer, uint64_t *size_bytes) {
  constexpr auto call = "fsdp_get_matrix_plan";
  return in_model(model, call, [&](engine::Model &impl) {
    write_text(memory::describe_matrices(impl.spec(), impl.plan(call)), buffer, size_bytes, call);
  });
}

}  // extern "C"
