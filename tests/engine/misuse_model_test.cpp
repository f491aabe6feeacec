// SPDX-License-Identifier: Apache-2.0
// Misuse of the calls that declare a model: options, schedule, states, arenas and the seal.
#include <cmath>
#include <cstdlib>
#include <limits>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

class MisusedModel : public Declared {
 protected:
  fsdp_status create(const fsdp_model_options &options) {
    fsdp_model *made = reinterpret_cast<fsdp_model *>(1);
    const fsdp_status status = fsdp_create_model(context, &options, &made);
    if (status != FSDP_OK)
      EXPECT_EQ(made, nullptr);
    else
      fsdp_destroy_model(made);
    return status;
  }
  // A model with one field set: must be refused.
  template <class Value>
  fsdp_status create_with(Value fsdp_model_options::*field, Value value) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.*field = value;
    return create(options);
  }
  fsdp_status schedule(std::vector<fsdp_visit> visits) {
    fsdp_schedule_options options = FSDP_SCHEDULE_OPTIONS_INIT;
    options.visits = visits.data();
    options.visit_count = visits.size();
    options.visit_stride = sizeof(fsdp_visit);
    return fsdp_set_schedule(model, FSDP_SCHEDULE_VISITS, &options);
  }
};

TEST_F(MisusedModel, EnumValuesOutsideOfTheirRangeAreRefused) {
  using Options = fsdp_model_options;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::strategy, 5), "fsdp_create_model", "strategy is 5",
               "[1, 4]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::strategy, -1), "strategy is -1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::grad_dtype, 4), "grad_dtype is 4", "[1, 3]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::reduce_dtype, 99), "reduce_dtype is 99");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::grad_op, 4), "grad_op is 4");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::unshard_mode, 3), "unshard_mode is 3", "[1, 2]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::view_kind, 3), "view_kind is 3", "[1, 2]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::reduce_policy, 3), "reduce_policy is 3");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::optimizer, 4), "optimizer is 4", "[1, 3]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::main_storage, 4), "main_storage is 4", "[1, 3]");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create_with(&Options::flags, 0x100u), "fsdp_model_options.flags", "0x100");
}

TEST_F(MisusedModel, ContradictoryOptionsAreRefused) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.strategy = FSDP_STRATEGY_OPTIM;
  options.reduce_policy = FSDP_REDUCE_POLICY_EACH;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(options), "FSDP_STRATEGY_OPTIM", "FSDP_REDUCE_POLICY_EACH",
               "FSDP_STRATEGY_OPTIM_GRADS");
  options = FSDP_MODEL_OPTIONS_INIT;
  options.flags = FSDP_MODEL_NO_PREFETCH;
  options.prefetch_depth = 2;
  EXPECT_WORKS(create(options));  // buffers for fsdp_prefetch
  options.prefetch_bytes = 77;
  EXPECT_WORKS(create(options));
  options.prefetch_depth = 0;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(options), "FSDP_MODEL_NO_PREFETCH", "prefetch_bytes 77", "prefetch_depth");
  options = FSDP_MODEL_OPTIONS_INIT;
  options.grad_op = FSDP_GRAD_OP_FACTOR;
  options.grad_factor = not_a_number;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(options), "grad_factor is nan");
  options.grad_factor = infinity;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(options), "grad_factor is inf");
}

TEST_F(MisusedModel, InvalidStructSizesAreRefused) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.struct_size = 8;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(options), "fsdp_model_options.struct_size is 8",
               "sizeof(fsdp_model_options)");
  options.struct_size = offsetof(fsdp_model_options, max_pending_bytes) - 1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, create(options), "fsdp_model_options.struct_size");
  options.struct_size =
      offsetof(fsdp_model_options, max_pending_bytes);  // of a caller that was built before there was one
  EXPECT_WORKS(create(options));
  Newer<fsdp_model_options> newer(FSDP_MODEL_OPTIONS_INIT);
  EXPECT_FAILS(FSDP_UNSUPPORTED, create(newer.options), Newer<fsdp_model_options>::byte(), "fsdp_model_options");
}

TEST_F(MisusedModel, SecondSealAndLateDeclarationsAreRefused) {
  Solo solo(State::sealed);
  fsdp_group *group = nullptr;
  alignas(4096) static char arena[4096];
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_seal_model(solo.model), "fsdp_seal_model", "sealed");
  EXPECT_FAILS(FSDP_INVALID_STATE,
               fsdp_create_group(solo.model, "late", nullptr, 0, sizeof(fsdp_param), nullptr, &group),
               "fsdp_create_group", "before fsdp_seal_model");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_set_schedule(solo.model, FSDP_SCHEDULE_SEQUENTIAL, nullptr),
               "fsdp_set_schedule", "sealed");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_add_optimizer_state(solo.model, "s", FSDP_FLOAT32), "fsdp_add_optimizer_state",
               "sealed");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_set_arena(solo.model, FSDP_ROLE_OPTIMIZER, arena, sizeof arena),
               "fsdp_set_arena", "sealed");
}

TEST_F(MisusedModel, CallsBeforeTheSealAreRefused) {
  Solo solo(State::declared);
  uint64_t bytes = 0;
  fsdp_stats stats = FSDP_STATS_INIT;
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  fsdp_shard shard = FSDP_SHARD_INIT;
  uint64_t size = 0;
  int32_t accumulate = 0;
  float data[32] = {};
  const std::string remedy = "fsdp_seal_model";
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_role_bytes(solo.model, FSDP_ROLE_ALL, 0, &bytes), "fsdp_get_role_bytes",
               remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_stats(solo.model, &stats), "fsdp_get_stats", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_describe_model(solo.model, nullptr, &size), "fsdp_describe_model", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load_param(solo.group(0), 0, data, FSDP_FLOAT32, 32, -1, 0), "fsdp_load_param",
               remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_read_param(solo.group(0), 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
               "fsdp_read_param", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_param(solo.group(0), 0, FSDP_FORWARD, &tensor), "fsdp_get_param", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_chunk(solo.group(0), 0, 0, &chunk), "fsdp_get_chunk", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_unshard(solo.group(0), FSDP_FORWARD, 0, nullptr), "fsdp_unshard", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_acquire_grad(solo.group(0), 0, 0, nullptr, &tensor, &accumulate),
               "fsdp_acquire_grad", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(solo.group(0), FSDP_LAST, nullptr), "fsdp_reduce_grad", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "fsdp_finish_grads", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_publish_weights(solo.model, nullptr), "fsdp_publish_weights", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_begin_update(solo.model, nullptr), "fsdp_begin_update", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_discard_step(solo.model, nullptr), "fsdp_discard_step", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_step_adamw(solo.model, 0.1, nullptr, nullptr), "fsdp_step_adamw", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_shard_count(solo.model, &size), "fsdp_get_shard_count", remedy);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_shard(solo.model, 0, &shard), "fsdp_get_shard", remedy);
  EXPECT_EQ(size, 0u);
}

TEST_F(MisusedModel, InvalidSchedulesAreRefused) {
  EXPECT_WORKS(add_group("first", {param("a")}));
  EXPECT_WORKS(add_group("second", {param("b")}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, 0, nullptr), "0 is not an fsdp_schedule_kind");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, 5, nullptr), "5 is not an fsdp_schedule_kind");
  fsdp_schedule_options options = FSDP_SCHEDULE_OPTIONS_INIT;
  options.held_groups = 2;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, &options), "held_groups is 2",
               "FSDP_SCHEDULE_ANY (4)", "the kind is 1");
  options.reserved = 1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, FSDP_SCHEDULE_ANY, &options),
               "fsdp_schedule_options.reserved is 1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, FSDP_SCHEDULE_VISITS, nullptr), "visits", "visit_count");
  options = FSDP_SCHEDULE_OPTIONS_INIT;
  options.visit_count = 3;
  options.visit_stride = sizeof(fsdp_visit);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, FSDP_SCHEDULE_VISITS, &options),
               "FSDP_SCHEDULE_VISITS needs visits");
  options.struct_size = 1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_schedule(model, FSDP_SCHEDULE_VISITS, &options),
               "fsdp_schedule_options.struct_size is 1");
  Newer<fsdp_schedule_options> newer(FSDP_SCHEDULE_OPTIONS_INIT);
  EXPECT_FAILS(FSDP_UNSUPPORTED, fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, &newer.options),
               Newer<fsdp_schedule_options>::byte());
  // These are found by the seal, when all groups are known; the schedule can then be corrected.
  EXPECT_WORKS(schedule({{0, FSDP_FORWARD, 0}, {2, FSDP_FORWARD, 0}}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "visit 1", "group 2 is outside [0, 2)");
  EXPECT_WORKS(schedule({{0, FSDP_FORWARD, 0}, {0, FSDP_EVAL, 0}}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "visit 1", "phase 4");
  EXPECT_WORKS(schedule({{0, FSDP_BACKWARD, 0}}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "visit 0", "BACKWARD of group 0",
               "before its first FORWARD");
  EXPECT_WORKS(schedule({{0, FSDP_FORWARD, 0}, {1, FSDP_FORWARD, 0}, {0, FSDP_BACKWARD, 0}}));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "group 1", "no BACKWARD visit");
  EXPECT_WORKS(schedule({{0, FSDP_FORWARD, 0}, {1, FSDP_FORWARD, 0}, {1, FSDP_BACKWARD, 0}, {0, FSDP_BACKWARD, 0}}));
  EXPECT_WORKS(fsdp_seal_model(model));
}

TEST_F(MisusedModel, InvalidOptimizerStatesAreRefused) {
  for (const char *name : {"exp_avg", "exp_avg_sq"})
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(model, name, FSDP_FLOAT32),
                 "the model has a state '" + std::string(name) + "' already, which FSDP_OPTIMIZER_ADAMW brings");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(model, "step", FSDP_FLOAT32),
               "'step' is what checkpoints call the number of steps of FSDP_OPTIMIZER_ADAMW");
  EXPECT_WORKS(fsdp_add_optimizer_state(model, "average", FSDP_FLOAT32));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(model, "average", FSDP_FLOAT32), "'average' already");
  EXPECT_EQ(std::string(fsdp_get_last_message()).find("ADAMW"), std::string::npos);
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.optimizer = FSDP_OPTIMIZER_CALLER;
  fsdp_model *own = nullptr;
  EXPECT_WORKS(fsdp_create_model(context, &options, &own));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(own, nullptr, FSDP_FLOAT32), "name is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(own, "", FSDP_FLOAT32), "name is empty");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(own, std::string(64, 'n').c_str(), FSDP_FLOAT32),
               "63 bytes");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(own, "\xFE", FSDP_FLOAT32), "not UTF-8");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(own, "momentum", 0), "0 is not a dtype");
  EXPECT_WORKS(fsdp_add_optimizer_state(own, "momentum", FSDP_FLOAT32));
  for (const char *name : {"exp_avg", "step"})  // AdamW's names are the caller's there
    EXPECT_WORKS(fsdp_add_optimizer_state(own, name, FSDP_FLOAT32));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_optimizer_state(own, "momentum", FSDP_BFLOAT16), "'momentum' already");
  fsdp_destroy_model(own);
}

TEST_F(MisusedModel, InvalidArenasAreRefused) {
  alignas(4096) static char arena[8192];
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_arena(model, FSDP_ROLE_OPTIMIZER, nullptr, 4096), "fsdp_set_arena",
               "data is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_arena(model, FSDP_ROLE_OPTIMIZER, arena + 64, 4096),
               "not aligned to 4096");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_arena(model, 0, arena, 4096), "0 is not an fsdp_role");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_arena(model, FSDP_ROLE_HOME + 1, arena, 4096), "10 is not an fsdp_role");
  for (const fsdp_role role :
       {FSDP_ROLE_COMPUTE, FSDP_ROLE_REDUCE, FSDP_ROLE_STAGING, FSDP_ROLE_MATRIX, FSDP_ROLE_HOME})
    EXPECT_FAILS(FSDP_UNSUPPORTED, fsdp_set_arena(model, role, arena, 4096), "role " + std::to_string(role),
                 "OPTIMIZER");
  // The seal finds an arena that is too small; a larger one is then accepted.
  EXPECT_WORKS(add_group("g", {param("w")}));
  EXPECT_WORKS(fsdp_set_arena(model, FSDP_ROLE_OPTIMIZER, arena, 16));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "fsdp_set_arena", "optimizer state", "16 bytes",
               "rank 0");
  EXPECT_WORKS(fsdp_set_arena(model, FSDP_ROLE_OPTIMIZER, arena, sizeof arena));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_arena(model, FSDP_ROLE_GRAD, arena + 4096, 4096),
               "role 3 overlaps that for role 4");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_arena(model, FSDP_ROLE_GRAD, arena, UINT64_MAX - 4095),
               "beyond the address space");
  EXPECT_WORKS(fsdp_seal_model(model));
}

// A binding keeps the pointer: it stays while groups are added.
TEST_F(MisusedModel, NamesOfGroupsStay) {
  EXPECT_WORKS(add_group("short", {param("w")}));
  fsdp_group *first = nullptr;
  fsdp_group_info info = FSDP_GROUP_INFO_INIT;
  EXPECT_WORKS(fsdp_get_group(model, 0, &first));
  EXPECT_WORKS(fsdp_get_group_info(first, &info));
  const char *const name = info.name;
  for (int g = 0; g < 100; ++g) {
    const std::string group = "g" + std::to_string(g), weight = "w" + std::to_string(g);
    EXPECT_WORKS(add_group(group.c_str(), {param(weight.c_str())}));
  }
  EXPECT_WORKS(fsdp_get_group_info(first, &info));
  EXPECT_EQ(info.name, name);
  EXPECT_STREQ(name, "short");
}

// NO_SHARD keeps main grads where peers read them: the header says such an arena is UNSUPPORTED.
TEST_F(MisusedModel, ArenaForGradsThatPeersReadIsRefused) {
  alignas(4096) static char arena[8192];
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.strategy = FSDP_STRATEGY_NO_SHARD;
  fsdp_model *whole = nullptr;
  FSDP(fsdp_create_model(context, &options, &whole));
  std::swap(model, whole);
  EXPECT_WORKS(add_group("g", {param("w")}));
  fsdp_status status = fsdp_set_arena(model, FSDP_ROLE_GRAD, arena, sizeof arena);
  char text[1024];
  uint64_t size = sizeof text;
  EXPECT_WORKS(fsdp_check_model(model, text, &size));
  EXPECT_NE(std::string(text).find("NO_SHARD"), std::string::npos) << text;
  if (status == FSDP_OK) status = fsdp_seal_model(model);
  EXPECT_FAILS(FSDP_UNSUPPORTED, status, "NO_SHARD");
  std::swap(model, whole);
  fsdp_destroy_model(whole);
}

TEST_F(MisusedModel, InvalidIndicesOfASealedModelAreRefused) {
  Solo solo(State::sealed);
  uint64_t bytes = 0;
  fsdp_chunk chunk = FSDP_CHUNK_INIT;
  fsdp_param info = FSDP_PARAM_INIT;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_role_bytes(solo.model, FSDP_ROLE_ALL, 1, &bytes), "fsdp_get_role_bytes",
               "rank 1 is not one of the 1 ranks");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_chunk(solo.group(0), 0, 1, &chunk), "fsdp_get_chunk",
               "rank 1 is not one of the 1 ranks");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_chunk(solo.group(0), 2, 0, &chunk), "param_index 2 is outside [0, 2)",
               "'alpha'");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_info(solo.group(2), 1, &info), "param_index 1 is outside [0, 1)",
               "'gamma'");
  char text[4] = "abc";
  uint64_t size = sizeof text;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_describe_model(solo.model, text, &size), "fsdp_describe_model", "4 bytes");
  EXPECT_STREQ(text, "abc");
  EXPECT_GT(size, 100u);
}

}  // namespace
