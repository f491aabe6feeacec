// SPDX-License-Identifier: Apache-2.0
// Every call on a handle that is NULL, of another type, or destroyed; and what a failed call leaves behind.
#include <functional>

#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

struct Call {
  const char *name;
  std::function<fsdp_status()> run;
};

std::vector<Call> context_calls(fsdp_context *context) {
  static double value = 0;
  static uint32_t number = 0;
  static fsdp_error error = FSDP_ERROR_INIT;
  static fsdp_mesh *mesh = nullptr;
  static fsdp_model *model = nullptr;
  return {{"fsdp_close_context", [=] { return fsdp_close_context(context); }},
          {"fsdp_abort_context", [=] { return fsdp_abort_context(context, "test"); }},
          {"fsdp_get_rank", [=] { return fsdp_get_rank(context, &number); }},
          {"fsdp_get_world_size", [=] { return fsdp_get_world_size(context, &number); }},
          {"fsdp_get_context_error", [=] { return fsdp_get_context_error(context, &error); }},
          {"fsdp_all_reduce_values", [=] { return fsdp_all_reduce_values(context, &value, 1, FSDP_VALUE_SUM); }},
          {"fsdp_write_trace", [=] { return fsdp_write_trace(context, "/dev/null"); }},
          {"fsdp_trace_begin", [=] { return fsdp_trace_begin(context, "span"); }},
          {"fsdp_trace_end", [=] { return fsdp_trace_end(context); }},
          {"fsdp_create_mesh", [=] { return fsdp_create_mesh(context, nullptr, &mesh); }},
          {"fsdp_create_model", [=] { return fsdp_create_model(context, nullptr, &model); }}};
}

std::vector<Call> model_calls(fsdp_model *model) {
  static fsdp_group *group = nullptr;
  static fsdp_memory memory = FSDP_MEMORY_INIT;
  static fsdp_stats stats = FSDP_STATS_INIT;
  static fsdp_shard shard = FSDP_SHARD_INIT;
  static fsdp_tensor tensor = FSDP_TENSOR_INIT;
  static uint64_t size = 0;
  static double norm = 0;
  static int32_t found = 0;
  alignas(4096) static char arena[4096];
  return {
      {"fsdp_create_group", [=] { return fsdp_create_group(model, "g", nullptr, 0, 0, nullptr, &group); }},
      {"fsdp_set_schedule", [=] { return fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, nullptr); }},
      {"fsdp_add_optimizer_state", [=] { return fsdp_add_optimizer_state(model, "s", FSDP_FLOAT32); }},
      {"fsdp_set_arena", [=] { return fsdp_set_arena(model, FSDP_ROLE_MAIN, arena, sizeof arena); }},
      {"fsdp_seal_model", [=] { return fsdp_seal_model(model); }},
      {"fsdp_get_memory", [=] { return fsdp_get_memory(model, 0, &memory); }},
      {"fsdp_get_stats", [=] { return fsdp_get_stats(model, &stats); }},
      {"fsdp_describe_model", [=] { return fsdp_describe_model(model, nullptr, &size); }},
      {"fsdp_finish_grads", [=] { return fsdp_finish_grads(model, 1, nullptr); }},
      {"fsdp_get_shard_count", [=] { return fsdp_get_shard_count(model, &size); }},
      {"fsdp_get_shard", [=] { return fsdp_get_shard(model, 0, &shard); }},
      {"fsdp_get_shard_state", [=] { return fsdp_get_shard_state(model, 0, "exp_avg", &tensor); }},
      {"fsdp_get_grad_norm", [=] { return fsdp_get_grad_norm(model, nullptr, &norm); }},
      {"fsdp_get_param_grad_norms", [=] { return fsdp_get_param_grad_norms(model, nullptr, &norm, 1); }},
      {"fsdp_scale_grads", [=] { return fsdp_scale_grads(model, 2, nullptr); }},
      {"fsdp_clip_grads", [=] { return fsdp_clip_grads(model, 1, nullptr, &norm); }},
      {"fsdp_check_grads", [=] { return fsdp_check_grads(model, nullptr, &found, nullptr); }},
      {"fsdp_step_adamw", [=] { return fsdp_step_adamw(model, 0.1, nullptr, nullptr); }},
      {"fsdp_publish_weights", [=] { return fsdp_publish_weights(model, nullptr); }},
      {"fsdp_begin_update", [=] { return fsdp_begin_update(model, nullptr); }},
      {"fsdp_discard_step", [=] { return fsdp_discard_step(model, nullptr); }},
      {"fsdp_apply_grads", [=] { return fsdp_apply_grads(model, nullptr, 0, 0.1, 0, nullptr, nullptr, nullptr); }},
  };
}

std::vector<Call> group_calls(fsdp_group *group) {
  static fsdp_param param = FSDP_PARAM_INIT;
  static fsdp_tensor tensor = FSDP_TENSOR_INIT;
  static fsdp_chunk chunk = FSDP_CHUNK_INIT;
  static int32_t accumulate = 0;
  static float data[64];
  return {
      {"fsdp_get_param_info", [=] { return fsdp_get_param_info(group, 0, &param); }},
      {"fsdp_load_param", [=] { return fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK); }},
      {"fsdp_read_param", [=] { return fsdp_read_param(group, 0, data, FSDP_FLOAT32, 32); }},
      {"fsdp_get_param", [=] { return fsdp_get_param(group, 0, FSDP_FORWARD, &tensor); }},
      {"fsdp_get_chunk", [=] { return fsdp_get_chunk(group, 0, 0, &chunk); }},
      {"fsdp_prefetch", [=] { return fsdp_prefetch(group, FSDP_FORWARD, nullptr); }},
      {"fsdp_unshard", [=] { return fsdp_unshard(group, FSDP_FORWARD, nullptr); }},
      {"fsdp_reshard", [=] { return fsdp_reshard(group, FSDP_FORWARD, nullptr); }},
      {"fsdp_acquire_grad", [=] { return fsdp_acquire_grad(group, 0, nullptr, &tensor, &accumulate); }},
      {"fsdp_put_grad", [=] { return fsdp_put_grad(group, 0, data, FSDP_FLOAT32, 32, nullptr); }},
      {"fsdp_reduce_grad", [=] { return fsdp_reduce_grad(group, FSDP_LAST, nullptr); }},
  };
}

void expect_all_refused(const std::vector<Call> &calls, fsdp_status status, const std::string &what) {
  for (const Call &call : calls) EXPECT_TRUE(fails(call.run(), status, {call.name, what})) << call.name;
}

TEST(MisusedHandle, NullInEveryCall) {
  expect_all_refused(context_calls(nullptr), FSDP_INVALID_HANDLE, "the context is NULL");
  expect_all_refused(model_calls(nullptr), FSDP_INVALID_HANDLE, "the model is NULL");
  expect_all_refused(group_calls(nullptr), FSDP_INVALID_HANDLE, "the group is NULL");
  fsdp_destroy_context(nullptr);
  fsdp_destroy_mesh(nullptr);
  fsdp_destroy_model(nullptr);
}

TEST(MisusedHandle, AnotherTypeInEveryCall) {
  Solo solo(State::published);
  const auto model_as_context = reinterpret_cast<fsdp_context *>(solo.model);
  const auto context_as_model = reinterpret_cast<fsdp_model *>(solo.context);
  const auto model_as_group = reinterpret_cast<fsdp_group *>(solo.model);
  expect_all_refused(context_calls(model_as_context), FSDP_INVALID_HANDLE, "given as context is an fsdp_model");
  expect_all_refused(model_calls(context_as_model), FSDP_INVALID_HANDLE, "given as model is an fsdp_context");
  expect_all_refused(group_calls(model_as_group), FSDP_INVALID_HANDLE, "given as group is an fsdp_model");
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_get_last_error(model_as_context, &error), "an fsdp_model");
  uint64_t garbage[64] = {};
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_seal_model(reinterpret_cast<fsdp_model *>(garbage)), "no handle of libfsdp");
  // A destroy call given the wrong thing does nothing.
  fsdp_destroy_context(model_as_context);
  fsdp_destroy_model(context_as_model);
  fsdp_destroy_mesh(reinterpret_cast<fsdp_mesh *>(solo.model));
  solo.clean_step();
}

TEST(MisusedHandle, DestroyedInEveryCall) {
  Scenario setup = small_setup();
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
  fsdp_mesh *mesh = nullptr;
  FSDP(fsdp_create_mesh(context, nullptr, &mesh));
  auto rank = std::make_unique<Rank>(context, setup);
  fsdp_model *model = rank->model;
  fsdp_group *group = rank->groups[0];
  rank.reset();  // destroys the model
  fsdp_destroy_mesh(mesh);
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.mesh = mesh;
  fsdp_model *other = nullptr;
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_create_model(context, &options, &other), "fsdp_create_model",
               "mesh is a destroyed");
  fsdp_destroy_context(context);
  expect_all_refused(model_calls(model), FSDP_INVALID_HANDLE, "given as model is a destroyed handle");
  expect_all_refused(group_calls(group), FSDP_INVALID_HANDLE, "given as group is a destroyed handle");
  expect_all_refused(context_calls(context), FSDP_INVALID_HANDLE, "given as context is a destroyed handle");
  fsdp_destroy_context(context);
  fsdp_destroy_model(model);
  fsdp_destroy_mesh(mesh);
}

// The context has gone, its model is still there: everything that does work says so, and nothing crashes.
TEST(MisusedHandle, DestroyedContextThroughItsModel) {
  Scenario setup = small_setup();
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_local_contexts(1, &setup.context, &context));
  auto rank = std::make_unique<Rank>(context, setup);
  rank->load();
  fsdp_destroy_context(context);
  expect_all_refused({{"context of rank 0", [&] { return fsdp_unshard(rank->groups[0], FSDP_FORWARD, nullptr); }},
                      {"context of rank 0", [&] { return fsdp_begin_update(rank->model, nullptr); }},
                      {"context of rank 0", [&] { return fsdp_seal_model(rank->model); }}},
                     FSDP_INVALID_HANDLE, "destroyed");
  fsdp_param param = FSDP_PARAM_INIT;
  EXPECT_WORKS(fsdp_get_param_info(rank->groups[0], 0, &param));
  EXPECT_STREQ(param.name, "alpha.w");
  rank.reset();
}

TEST(MisusedHandle, AMeshOfAnotherContext) {
  fsdp_context *contexts[2] = {};
  FSDP(fsdp_create_local_contexts(1, nullptr, &contexts[0]));
  FSDP(fsdp_create_local_contexts(1, nullptr, &contexts[1]));
  fsdp_mesh *mesh = nullptr;
  FSDP(fsdp_create_mesh(contexts[1], nullptr, &mesh));
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.mesh = mesh;
  fsdp_model *model = reinterpret_cast<fsdp_model *>(1);
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_create_model(contexts[0], &options, &model), "mesh", "another context");
  EXPECT_EQ(model, nullptr);
  options.mesh = reinterpret_cast<fsdp_mesh *>(contexts[0]);
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_create_model(contexts[0], &options, &model),
               "given as mesh is an fsdp_context");
  fsdp_destroy_mesh(mesh);
  fsdp_destroy_context(contexts[0]);
  fsdp_destroy_context(contexts[1]);
}

TEST(MisusedHandle, NullOutputsAreNamed) {
  Solo solo(State::published);
  fsdp_model *model = nullptr;
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  double norm = 0;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_context(nullptr, nullptr), "fsdp_create_context", "context is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_local_contexts(1, nullptr, nullptr), "contexts is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_plan_context(1, 0, nullptr, nullptr), "context is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_mesh(solo.context, nullptr, nullptr), "mesh is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_model(solo.context, nullptr, nullptr), "model is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_rank(solo.context, nullptr), "rank is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_world_size(solo.context, nullptr), "world_size is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_last_error(nullptr, nullptr), "fsdp_error is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_context_error(solo.context, nullptr), "fsdp_error is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_memory(solo.model, 0, nullptr), "fsdp_memory is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_stats(solo.model, nullptr), "fsdp_stats is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_describe_model(solo.model, nullptr, nullptr), "size_bytes is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_describe_build(nullptr, nullptr), "size_bytes is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_info(solo.group(0), 0, nullptr), "fsdp_param is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param(solo.group(0), 0, FSDP_FORWARD, nullptr), "fsdp_tensor is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_chunk(solo.group(0), 0, 0, nullptr), "fsdp_chunk is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(solo.group(0), 0, nullptr, FSDP_FLOAT32, 32), "data is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_acquire_grad(solo.group(0), 0, nullptr, &tensor, nullptr),
               "accumulate is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_count(solo.model, nullptr), "shard_count is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard(solo.model, 0, nullptr), "fsdp_shard is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_state(solo.model, 0, nullptr, &tensor), "name is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_grad_norm(solo.model, nullptr, nullptr), "norm is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_grad_norms(solo.model, nullptr, nullptr, 5), "norms is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_check_grads(solo.model, nullptr, nullptr, nullptr), "found is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_apply_grads(solo.model, nullptr, 4, 0.1, 0, nullptr, nullptr, &norm),
               "grads is NULL");
  (void)model;
  solo.clean_step();
}

TEST(MisusedHandle, OutputStructsNeedTheirSize) {
  Solo solo(State::published);
  const auto size_missing = [](const char *name) { return std::string(name) + ".struct_size is 0"; };
  fsdp_memory memory = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_memory(solo.model, 0, &memory), size_missing("fsdp_memory"),
               "sizeof(fsdp_memory)");
  fsdp_stats stats = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_stats(solo.model, &stats), size_missing("fsdp_stats"));
  fsdp_param param = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_info(solo.group(0), 0, &param), size_missing("fsdp_param"));
  fsdp_chunk chunk = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_chunk(solo.group(0), 0, 0, &chunk), size_missing("fsdp_chunk"));
  fsdp_shard shard = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard(solo.model, 0, &shard), size_missing("fsdp_shard"));
  fsdp_tensor tensor = {};
  int32_t accumulate = 7;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_acquire_grad(solo.group(0), 0, nullptr, &tensor, &accumulate),
               size_missing("fsdp_tensor"));
  EXPECT_EQ(accumulate, 7);
  fsdp_error error = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_last_error(nullptr, &error), size_missing("fsdp_error"));
}

TEST(MisusedHandle, FailedCallsNullHandlesAndLeaveOutputsAlone) {
  Solo solo(State::sealed);
  const auto garbage = reinterpret_cast<void *>(uintptr_t{1});
  fsdp_context_options bad = FSDP_CONTEXT_OPTIONS_INIT;
  bad.log_level = 99;
  fsdp_context *contexts[2] = {static_cast<fsdp_context *>(garbage), static_cast<fsdp_context *>(garbage)};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_context(&bad, contexts), "log_level");
  EXPECT_EQ(contexts[0], nullptr);
  contexts[0] = static_cast<fsdp_context *>(garbage);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_local_contexts(2, &bad, contexts), "log_level");
  EXPECT_TRUE(!contexts[0] && !contexts[1]);
  auto *group = static_cast<fsdp_group *>(garbage);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_create_group(solo.model, "late", nullptr, 0, 0, nullptr, &group), "sealed");
  EXPECT_EQ(group, nullptr);
  auto *mesh = static_cast<fsdp_mesh *>(garbage);
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_create_mesh(nullptr, nullptr, &mesh), "NULL");
  EXPECT_EQ(mesh, nullptr);
  fsdp_tensor tensor = FSDP_TENSOR_INIT, before = tensor;
  int32_t accumulate = 7, found = 7;
  double norm = 7;
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_acquire_grad(solo.group(0), 0, nullptr, &tensor, &accumulate), "window");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_param(solo.group(0), 0, FSDP_FORWARD, &tensor), "window");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_grad_norm(solo.model, nullptr, &norm), "no gradients");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_clip_grads(solo.model, 1, nullptr, &norm), "no gradients");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_check_grads(solo.model, nullptr, &found, nullptr), "no gradients");
  EXPECT_EQ(std::memcmp(&tensor, &before, sizeof tensor), 0);
  EXPECT_EQ(accumulate, 7);
  EXPECT_EQ(found, 7);
  EXPECT_EQ(norm, 7);
}

}  // namespace
