// SPDX-License-Identifier: Apache-2.0
#include "abi/boundary.h"
#include "abi/options.h"
#include "base/text.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace fsdp::abi {

std::string read_name(const char *name, size_t most, const char *call, const Field &field) {
  if (!name || !*name) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}", call, field, name ? "empty" : "NULL");
  const std::string text(name, strnlen(name, most + 1));
  if (text.size() > most)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is longer than {} bytes: '{}...'", call, field, most, text.substr(0, 40));
  if (!is_utf8(text)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not UTF-8", call, field);
  return text;
}

void set_outer_strategy(fsdp_outer_strategy strategy, layout::Mesh &mesh, const char *call, const Field &field) {
  if (strategy == FSDP_OUTER_NO_SHARD) return;
  if (mesh.replicate_size == 1)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: {} FSDP_OUTER_OPTIM shards optimizer state over replicas, but the mesh has one; "
         "make a mesh with replicate_size above 1",
         call, field);
  mesh.outer = layout::OuterAxis::optim;
}

double read_grad_factor(fsdp_grad_op op, double factor, const char *call, const Field &field) {
  if (op != FSDP_GRAD_OP_FACTOR) return 1.0;
  check_factor(factor, call, field);
  if (factor == 0) fail(FSDP_INVALID_ARGUMENT, "{}: {} is {}, it must be finite and not 0", call, field, factor);
  return factor;
}

namespace {

// Checks that a group's mesh has this rank and only ranks of the model.
void check_group_mesh(const layout::Mesh &mesh, const layout::Mesh &model_mesh, uint32_t rank, const std::string &group,
                      const char *call) {
  if (std::ranges::find(mesh.ranks, rank) == mesh.ranks.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is not in the mesh that it names for group '{}', which has the ranks {}",
         call, rank, group, fmt::join(mesh.ranks, ", "));
  std::vector<uint32_t> known = model_mesh.ranks;
  std::ranges::sort(known);
  for (const uint32_t other : mesh.ranks)
    if (!std::ranges::binary_search(known, other))
      fail(FSDP_INVALID_ARGUMENT,
           "{}: the mesh of group '{}' has rank {}, which is not in the model's mesh; make the model with a mesh that "
           "has the ranks of all its groups",
           call, group, other);
}

// Returns the group's mesh with its outer strategy set.
layout::Mesh read_group_mesh(const fsdp_group_options &given, HandledModel &model, const std::string &group,
                             const char *call) {
  constexpr auto field = "fsdp_group_options.outer_strategy";
  const layout::Mesh &model_mesh = model.spec().mesh();
  const auto named = abi::mesh_of(given.mesh, model.context(), call);
  layout::Mesh mesh = named ? *named : model_mesh;
  if (named) check_group_mesh(mesh, model_mesh, model.context().rank(), group, call);
  const bool divides = model_mesh.outer == layout::OuterAxis::optim && mesh.replicate_size > 1;
  const auto strategy = read_enum(given.outer_strategy, divides ? FSDP_OUTER_OPTIM + 0 : FSDP_OUTER_NO_SHARD + 0,
                                  FSDP_OUTER_OPTIM + 0, call, field);
  if (mesh.outer == layout::OuterAxis::optim) mesh.outer = layout::OuterAxis::replicate;
  set_outer_strategy(strategy, mesh, call, field);
  return mesh;
}

}  // namespace

}  // namespace fsdp::abi

extern "C" {

fsdp_status fsdp_create_group(fsdp_model *model, const char *name, const fsdp_param *params, uint64_t param_count,
                              uint64_t param_stride, const fsdp_group_options *options, fsdp_group **group) {
  constexpr auto call = "fsdp_create_group";
  if (group) *group = nullptr;
  return in_model(model, call, [&](HandledModel &impl) {
    check_pointer(group, call, "group");
    const auto given = read_options(options, call, "fsdp_group_options");
    check_flags(given.flags, FSDP_GROUP_RESIDENT | FSDP_GROUP_ROOT, call, "fsdp_group_options.flags");
    memory::GroupSpec spec;
    spec.name = read_name(name, 255, call, "name");
    spec.params = read_params(params, param_count, param_stride, call);
    const engine::GroupDefaults &defaults = impl.declaration().defaults();
    spec.strategy = read_enum(given.strategy, defaults.strategy, FSDP_STRATEGY_OPTIM_GRADS_PARAMS + 0, call,
                              "fsdp_group_options.strategy");
    spec.grad_dtype =
        read_enum(given.grad_dtype, defaults.grad_dtype, FSDP_FLOAT16 + 0, call, "fsdp_group_options.grad_dtype");
    spec.reduce_dtype =
        read_enum(given.reduce_dtype, defaults.reduce_dtype, FSDP_FLOAT16 + 0, call, "fsdp_group_options.reduce_dtype");
    spec.reduce_policy = spec.strategy == FSDP_STRATEGY_OPTIM      ? FSDP_REDUCE_POLICY_LAST
                         : defaults.reduce_policy                  ? defaults.reduce_policy
                         : spec.strategy == FSDP_STRATEGY_NO_SHARD ? FSDP_REDUCE_POLICY_LAST + 0
                                                                   : FSDP_REDUCE_POLICY_EACH + 0;
    spec.main_storage = read_enum(given.main_storage, defaults.main_storage, FSDP_MAIN_NONE + 0, call,
                                  "fsdp_group_options.main_storage");
    spec.backward_weights =
        read_enum(given.backward_weights, FSDP_BACKWARD_WEIGHTS_GATHERED + 0, FSDP_BACKWARD_WEIGHTS_NONE + 0, call,
                  "fsdp_group_options.backward_weights") == FSDP_BACKWARD_WEIGHTS_GATHERED;
    spec.resident = given.flags & FSDP_GROUP_RESIDENT;
    spec.root = given.flags & FSDP_GROUP_ROOT;
    if (spec.resident && !spec.backward_weights)
      fail(FSDP_INVALID_ARGUMENT,
           "{}: group '{}' has FSDP_GROUP_RESIDENT, which keeps weights for BACKWARD, and FSDP_BACKWARD_WEIGHTS_NONE; "
           "leave out one of the two",
           call, spec.name);
    spec.grad_op = read_enum(given.grad_op, 0, FSDP_GRAD_OP_FACTOR + 0, call, "fsdp_group_options.grad_op");
    spec.grad_factor = read_grad_factor(spec.grad_op, given.grad_factor, call, "fsdp_group_options.grad_factor");
    // A value equal to the model's is stored as 0, so that ranks may declare it in either way.
    if (impl.spec().grad_op == spec.grad_op && impl.spec().grad_factor == spec.grad_factor)
      spec.grad_op = 0, spec.grad_factor = 1.0;
    layout::Mesh mesh = read_group_mesh(given, impl, spec.name, call);
    const std::lock_guard lock(impl.mutex);
    if (impl.ended) refuse_handle(model, call, "model");
    // Memory is reserved first, because nothing may fail once the model has the group. The capacity doubles, because
    // otherwise many groups would be moved again and again.
    if (impl.groups.size() == impl.groups.capacity()) impl.groups.reserve(2 * impl.groups.size() + 16);
    NewHandle<fsdp_group> handle(acquire(model, call), static_cast<uint32_t>(impl.groups.size()));
    impl.declaration().add_group(std::move(spec), std::move(mesh));
    impl.groups.push_back(*group = handle.give_out());
  });
}

fsdp_status fsdp_get_group_count(const fsdp_model *model, uint64_t *group_count) {
  constexpr auto call = "fsdp_get_group_count";
  return guard([&] {
    const auto impl = acquire(model, call);
    check_pointer(group_count, call, "group_count");
    const std::lock_guard lock(impl->mutex);
    *group_count = impl->groups.size();
  });
}

fsdp_status fsdp_get_group(const fsdp_model *model, uint64_t group_index, fsdp_group **group) {
  constexpr auto call = "fsdp_get_group";
  if (group) *group = nullptr;
  return guard([&] {
    const auto impl = acquire(model, call);
    check_pointer(group, call, "group");
    const std::lock_guard lock(impl->mutex);
    if (group_index >= impl->groups.size())
      fail(FSDP_INVALID_ARGUMENT, "{}: group_index {} is outside [0, {})", call, group_index, impl->groups.size());
    *group = impl->groups[group_index];
  });
}

fsdp_status fsdp_find_group(const fsdp_model *model, const char *name, fsdp_group **group) {
  constexpr auto call = "fsdp_find_group";
  if (group) *group = nullptr;
  return guard([&] {
    const auto impl = acquire(model, call);
    check_pointer(group, call, "group");
    const std::string wanted = read_name(name, 255, call, "name");
    const std::lock_guard lock(impl->mutex);
    for (size_t g = 0; g < impl->groups.size(); ++g)
      if (impl->spec().groups[g].name == wanted) *group = impl->groups[g];
    if (!*group)
      fail(FSDP_INVALID_ARGUMENT, "{}: none of the model's {} groups is named '{}'", call, impl->groups.size(), wanted);
  });
}

fsdp_status fsdp_get_group_info(const fsdp_group *group, fsdp_group_info *info) {
  constexpr auto call = "fsdp_get_group_info";
  return guard([&] {
    const HandledGroup handle = acquire_group(group, call);
    check_output(info, call, "fsdp_group_info");
    const std::lock_guard lock(handle.model->mutex);
    const memory::ModelSpec &model = handle.model->spec();
    const memory::GroupSpec &spec = model.groups[handle.index];
    const layout::Mesh &mesh = model.mesh_of(spec);
    fsdp_group_info value = FSDP_GROUP_INFO_INIT;
    value.name = spec.name.c_str();
    value.param_count = spec.params.size();
    value.group_index = handle.index;
    value.flags = (spec.resident ? FSDP_GROUP_RESIDENT + 0u : 0u) | (spec.root ? FSDP_GROUP_ROOT + 0u : 0u);
    value.strategy = spec.strategy;
    value.reduce_policy = spec.reduce_policy;
    value.grad_dtype = spec.grad_dtype;
    value.reduce_dtype = spec.reduce_dtype;
    value.main_storage = spec.main_storage;
    value.backward_weights =
        spec.backward_weights ? FSDP_BACKWARD_WEIGHTS_GATHERED + 0 : FSDP_BACKWARD_WEIGHTS_NONE + 0;
    value.piece_count = spec.piece_count();
    value.replicate_size = mesh.replicate_size;
    value.shard_size = mesh.shard_size;
    value.grad_op = spec.grad_op ? spec.grad_op : model.grad_op;
    value.outer_strategy = mesh.outer == layout::OuterAxis::optim ? FSDP_OUTER_OPTIM + 0 : FSDP_OUTER_NO_SHARD + 0;
    value.grad_factor = model.factor_of(spec);
    write_output(info, value);
  });
}

}  // extern "C"
