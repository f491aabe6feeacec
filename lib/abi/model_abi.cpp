// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "abi/boundary.h"
#include "abi/options.h"
#include "base/dtype.h"
#include "engine/model/checkpoints.h"
#include "memory/home_plan.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

void read_views(fsdp_view_kind kind, bool maps, memory::ModelSpec &spec, const char *call) {
  spec.private_views =
      read_enum(kind, FSDP_VIEWS_READ_ONLY + 0, FSDP_VIEWS_PRIVATE + 0, call, "view_kind") == FSDP_VIEWS_PRIVATE;
  if (spec.private_views && !maps)
    fail(FSDP_UNSUPPORTED,
         "{}: FSDP_VIEWS_PRIVATE shows weights in pages that are copied when they are written, which memory of a GPU "
         "has "
         "not; leave view_kind 0: copied weights are this rank's own, and fsdp_restore_view has them gathered again",
         call);
}

void read_policy(const fsdp_model_options &options, const engine::Context &context, memory::ModelSpec &spec,
                 const char *call) {
  constexpr uint32_t default_pending = 2;
  const bool maps = context.device_traits().host_memory;
  const fsdp_unshard_mode usual = maps && !context.debug() ? FSDP_UNSHARD_MAPPED : FSDP_UNSHARD_COPIED;
  spec.unshard_mode = read_enum(options.unshard_mode, usual, FSDP_UNSHARD_COPIED + 0, call, "unshard_mode");
  if (!maps && spec.unshard_mode == FSDP_UNSHARD_MAPPED)
    fail(FSDP_UNSUPPORTED,
         "{}: FSDP_UNSHARD_MAPPED shows the shards where their ranks keep them, but a GPU does not map the memory "
         "of others; leave unshard_mode 0 or give FSDP_UNSHARD_COPIED",
         call);
  read_views(options.view_kind, maps, spec, call);
  spec.grad_op = read_enum(options.grad_op, FSDP_GRAD_OP_MEAN + 0, FSDP_GRAD_OP_FACTOR + 0, call, "grad_op");
  spec.grad_factor = read_grad_factor(spec.grad_op, options.grad_factor, call, "grad_factor");
  spec.force_communication = options.flags & FSDP_MODEL_FORCE_COMMUNICATION;
  spec.prefetches = !(options.flags & FSDP_MODEL_NO_PREFETCH);
  if (!spec.prefetches && options.prefetch_bytes && !options.prefetch_depth)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: FSDP_MODEL_NO_PREFETCH without prefetch_depth plans no buffer ahead, which prefetch_bytes {} could "
         "limit; give the prefetch_depth that fsdp_prefetch is to have room for",
         call, options.prefetch_bytes);
  spec.prefetch_depth = options.prefetch_depth || !spec.prefetches ? options.prefetch_depth : 1;
  spec.prefetch_bytes = options.prefetch_bytes;
  if (options.save_staging_bytes && options.save_staging_bytes < checkpoint::Staging::least_bytes)
    fail(FSDP_INVALID_ARGUMENT, "{}: save_staging_bytes is {}, it must be 0 or at least {}", call,
         options.save_staging_bytes, checkpoint::Staging::least_bytes);
  spec.save_staging_bytes =
      options.save_staging_bytes / checkpoint::Staging::block_bytes * checkpoint::Staging::block_bytes;
  spec.max_pending_groups = options.max_pending_groups ? options.max_pending_groups : default_pending;
  spec.max_pending_bytes = options.max_pending_bytes;
}

// On the host device the memory of the host is the device's.
fsdp_home read_home(fsdp_home home, bool host_memory, const char *call, const char *field) {
  const fsdp_home given = read_enum(home, FSDP_HOME_DEVICE + 0, FSDP_HOME_FILE + 0, call, field);
  return given == FSDP_HOME_HOST && host_memory ? FSDP_HOME_DEVICE + 0 : given;
}

void read_homes(const fsdp_model_options &options, bool host_memory, memory::HomeSpec &homes, const char *call) {
  homes.state = read_home(options.state_home, host_memory, call, "state_home");
  homes.main = read_home(options.main_home, host_memory, call, "main_home");
  homes.grad = read_home(options.grad_home, host_memory, call, "grad_home");
  if (options.turn_bytes && options.turn_bytes < memory::least_turn_bytes)
    fail(FSDP_INVALID_ARGUMENT, "{}: turn_bytes is {}, it must be 0 or at least {}", call, options.turn_bytes,
         memory::least_turn_bytes);
  if (options.turns && (options.turns < memory::least_turns || options.turns > memory::most_turns))
    fail(FSDP_INVALID_ARGUMENT, "{}: turns is {}, it must be 0 or in [{}, {}]", call, options.turns,
         memory::least_turns, memory::most_turns);
  if (!homes.in_file()) return;
  if (!options.home_directory || !*options.home_directory)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: home_directory is {}, but FSDP_HOME_FILE needs the directory of a local disk in which the file is made",
         call, options.home_directory ? "empty" : "NULL");
  homes.directory = options.home_directory;
  homes.turn_bytes = options.turn_bytes ? options.turn_bytes : memory::default_turn_bytes;
  homes.turns = options.turns ? options.turns : memory::default_turns;
}

layout::Mesh whole_world(const engine::Context &context) {
  layout::MeshRequest request;
  for (uint32_t rank = 0; rank < context.world_size(); ++rank) request.ranks.push_back(rank);
  request.hosts = context.hosts_of(request.ranks);
  return layout::arrange_mesh(std::move(request));
}

uint32_t read_held_groups(const fsdp_schedule_options &options, fsdp_schedule_kind kind, const char *call) {
  constexpr uint32_t usual = 4;
  if (options.reserved)
    fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_schedule_options.reserved is {}, it must be 0", call, options.reserved);
  if (kind == FSDP_SCHEDULE_ANY) return options.held_groups ? options.held_groups : usual;
  if (options.held_groups)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: held_groups is {}, but only FSDP_SCHEDULE_ANY ({}) has such buffers, and the kind is {}", call,
         options.held_groups, FSDP_SCHEDULE_ANY + 0, kind);
  return 0;
}

// Accepts each role and FSDP_ROLE_ALL.
void check_role(fsdp_role role, const char *call) {
  if (role < FSDP_ROLE_ALL || role > FSDP_ROLE_HOME)
    fail(FSDP_INVALID_ARGUMENT, "{}: {} is not an fsdp_role", call, role);
}

}  // namespace

extern "C" {

fsdp_status fsdp_create_model(fsdp_context *context, const fsdp_model_options *options, fsdp_model **model) {
  constexpr auto call = "fsdp_create_model";
  if (model) *model = nullptr;
  return call_context(context, call, [&](auto &impl) {
    check_pointer(model, call, "model");
    const auto given = read_options(options, call, "fsdp_model_options");
    check_flags(given.flags, FSDP_MODEL_NO_PREFETCH | FSDP_MODEL_FORCE_COMMUNICATION, call, "fsdp_model_options.flags");
    memory::ModelSpec spec;
    if (given.mesh) {
      const auto mesh = acquire(given.mesh, call);
      if (mesh->context != impl) fail(FSDP_INVALID_HANDLE, "{}: the mesh belongs to another context", call);
      spec.mesh() = mesh->mesh;
    } else {
      spec.mesh() = whole_world(*impl);  // throws if the hosts divide the world unevenly
    }
    set_outer_strategy(
        read_enum(given.outer_strategy, FSDP_OUTER_NO_SHARD + 0, FSDP_OUTER_OPTIM + 0, call, "outer_strategy"),
        spec.mesh(), call, "outer_strategy");
    read_policy(given, *impl, spec, call);
    const auto optimizer =
        read_enum(given.optimizer, FSDP_OPTIMIZER_ADAMW + 0, FSDP_OPTIMIZER_ADAMW_8BIT + 0, call, "optimizer");
    spec.scale_rounding =
        read_enum(given.scale_rounding, FSDP_SCALE_EXACT + 0, FSDP_SCALE_POWER_OF_TWO + 0, call, "scale_rounding");
    spec.quantize_from = read_enum(given.quantize_from, FSDP_FLOAT32 + 0, FSDP_BFLOAT16 + 0, call, "quantize_from");
    spec.scale_rule = read_enum(given.scale_rule, FSDP_SCALE_ROUND_UP + 0, FSDP_SCALE_FLOOR + 0, call, "scale_rule");
    spec.plane_policy =
        read_enum(given.plane_policy, FSDP_PLANES_BY_PHASE + 0, FSDP_PLANES_BOTH + 0, call, "plane_policy");
    if (given.reserved)
      fail(FSDP_INVALID_ARGUMENT, "{}: fsdp_model_options.reserved is {}, it must be 0", call, given.reserved);
    spec.rounding_seed = given.rounding_seed;
    spec.matrix_bytes = given.matrix_bytes;
    read_homes(given, impl->device_traits().host_memory, spec.homes, call);
    engine::GroupDefaults defaults;
    defaults.main_storage =
        read_enum(given.main_storage, FSDP_MAIN_FLOAT32 + 0, FSDP_MAIN_NONE + 0, call, "main_storage");
    defaults.strategy = read_enum(given.strategy, FSDP_STRATEGY_OPTIM_GRADS_PARAMS + 0,
                                  FSDP_STRATEGY_OPTIM_GRADS_PARAMS + 0, call, "strategy");
    defaults.grad_dtype = read_enum(given.grad_dtype, 0, FSDP_FLOAT16 + 0, call, "grad_dtype");
    defaults.reduce_dtype = read_enum(given.reduce_dtype, 0, FSDP_FLOAT16 + 0, call, "reduce_dtype");
    defaults.reduce_policy = read_enum(given.reduce_policy, 0, FSDP_REDUCE_POLICY_LAST + 0, call, "reduce_policy");
    if (defaults.strategy == FSDP_STRATEGY_OPTIM && defaults.reduce_policy == FSDP_REDUCE_POLICY_EACH)
      fail(
          FSDP_INVALID_ARGUMENT,
          "{}: FSDP_STRATEGY_OPTIM (ZeRO-1) keeps whole gradients until one delayed reduce; FSDP_REDUCE_POLICY_EACH is "
          "FSDP_STRATEGY_OPTIM_GRADS (ZeRO-2)",
          call);
    *model =
        NewHandle<fsdp_model>(std::make_shared<HandledModel>(impl, std::move(spec), optimizer, defaults)).give_out();
  });
}

void fsdp_destroy_model(fsdp_model *model) {
  const auto impl = find(model);
  if (!impl) return;
  const bool in_child = impl->context().in_child();
  if (in_child)
    forget(model);
  else if (!remove(model))
    return;
  const std::lock_guard lock(impl->mutex);
  impl->ended = true;
  for (fsdp_group *group : impl->groups) in_child ? forget(group) : void(remove(group));
  if (!in_child) impl->context().checkpoint_slot().release_models();
}

fsdp_status fsdp_set_schedule(fsdp_model *model, fsdp_schedule_kind kind, const fsdp_schedule_options *options) {
  constexpr auto call = "fsdp_set_schedule";
  return in_model(model, call, [&](engine::Model &impl) {
    const auto given = read_options(options, call, "fsdp_schedule_options");
    if (kind < FSDP_SCHEDULE_SEQUENTIAL || kind > FSDP_SCHEDULE_ANY)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is not an fsdp_schedule_kind", call, kind);
    const uint32_t held_groups = read_held_groups(given, kind, call);
    std::vector<fsdp_visit> visits;
    if (kind == FSDP_SCHEDULE_VISITS) {
      if (!given.visits || !given.visit_count)
        fail(FSDP_INVALID_ARGUMENT, "{}: FSDP_SCHEDULE_VISITS needs visits and visit_count", call);
      const auto array = read_array(given.visits, given.visit_count, given.visit_stride, call, "visit", "fsdp_visit");
      for (uint64_t i = 0; i < array.size(); ++i) {
        check_known(array, i, call, "visit");
        visits.push_back(array[i]);
      }
    }
    impl.declaration().set_schedule(kind, std::move(visits), held_groups);
  });
}

fsdp_status fsdp_add_optimizer_state(fsdp_model *model, const char *name, fsdp_dtype dtype) {
  constexpr auto call = "fsdp_add_optimizer_state";
  return in_model(model, call, [&](engine::Model &impl) {
    if (!is_number(dtype)) fail(FSDP_INVALID_ARGUMENT, "{}: {} is not a dtype", call, dtype);
    impl.declaration().add_state({read_name(name, 63, call, "name"), dtype});
  });
}

fsdp_status fsdp_set_arena(fsdp_model *model, fsdp_role role, void *data, uint64_t size_bytes) {
  constexpr auto call = "fsdp_set_arena";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(data, call, "data");
    if (role < FSDP_ROLE_COMPUTE || role > FSDP_ROLE_HOME)
      fail(FSDP_INVALID_ARGUMENT, "{}: {} is not an fsdp_role", call, role);
    if (role != FSDP_ROLE_MAIN && role != FSDP_ROLE_OPTIMIZER && role != FSDP_ROLE_GATHER && role != FSDP_ROLE_GRAD)
      fail(FSDP_UNSUPPORTED,
           "{}: role {} lies in memory that peers map or that the library needs for itself; only MAIN, "
           "GRAD, OPTIMIZER and GATHER can be handed in",
           call, role);
    if (reinterpret_cast<uintptr_t>(data) % memory::page_bytes)
      fail(FSDP_INVALID_ARGUMENT, "{}: data is not aligned to {} bytes", call, memory::page_bytes);
    impl.declaration().set_arena(role, data, size_bytes);
  });
}

fsdp_status fsdp_check_model(const fsdp_model *model, char *buffer, uint64_t *size_bytes) {
  constexpr auto call = "fsdp_check_model";
  return in_model(model, call, [&](engine::Model &impl) {
    std::string text;
    for (const std::string &violation : impl.declaration().list_violations(impl.context().rank(), call))
      text += violation + "\n";
    write_text(text, buffer, size_bytes, call);
  });
}

fsdp_status fsdp_seal_model(fsdp_model *model) {
  return in_model(model, "fsdp_seal_model", [](engine::Model &impl) { impl.seal(); });
}

fsdp_status fsdp_get_role_bytes(const fsdp_model *model, fsdp_role role, uint32_t rank, uint64_t *bytes) {
  constexpr auto call = "fsdp_get_role_bytes";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(bytes, call, "bytes");
    check_role(role, call);
    *bytes = impl.role_bytes(role, rank);
  });
}

fsdp_status fsdp_get_allocated_bytes(const fsdp_model *model, fsdp_role role, uint64_t *bytes) {
  constexpr auto call = "fsdp_get_allocated_bytes";
  return in_model(model, call, [&](engine::Model &impl) {
    check_pointer(bytes, call, "bytes");
    check_role(role, call);
    *bytes = impl.allocated_bytes(role);
  });
}

fsdp_status fsdp_get_model_info(const fsdp_model *model, fsdp_model_info *info) {
  constexpr auto call = "fsdp_get_model_info";
  return in_model(model, call, [&](engine::Model &impl) {
    check_output(info, call, "fsdp_model_info");
    fsdp_model_info value = FSDP_MODEL_INFO_INIT;
    impl.get_info(value);
    write_output(info, value);
  });
}

fsdp_status fsdp_get_stats(const fsdp_model *model, fsdp_stats *stats) {
  constexpr auto call = "fsdp_get_stats";
  return in_model(model, call, [&](engine::Model &impl) {
    check_output(stats, call, "fsdp_stats");
    fsdp_stats value = FSDP_STATS_INIT;
    impl.get_stats(value);
    write_output(stats, value);
  });
}

fsdp_status fsdp_describe_model(const fsdp_model *model, char *buffer, uint64_t *size_bytes) {
  constexpr auto call = "fsdp_describe_model";
  return in_model(model, call, [&](engine::Model &impl) {
    write_text(engine::describe(impl.spec(), impl.plan(call)), buffer, size_bytes, call);
  });
}

}  // extern "C"
