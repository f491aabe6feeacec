// SPDX-License-Identifier: Apache-2.0
// Every call on a handle that is NULL, of another type, or destroyed; and what a failed call leaves behind.
#include <cstring>
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
  static uint64_t count = 0;
  static fsdp_error error = FSDP_ERROR_INIT;
  static fsdp_mesh *mesh = nullptr;
  static fsdp_model *model = nullptr;
  return {
      {"fsdp_close_context", [=] { return fsdp_close_context(context); }},
      {"fsdp_abort_context", [=] { return fsdp_abort_context(context, "test"); }},
      {"fsdp_get_rank", [=] { return fsdp_get_rank(context, &number); }},
      {"fsdp_get_world_size", [=] { return fsdp_get_world_size(context, &number); }},
      {"fsdp_get_context_error", [=] { return fsdp_get_context_error(context, &error); }},
      {"fsdp_all_reduce_values", [=] { return fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM); }},
      {"fsdp_write_trace", [=] { return fsdp_write_trace(context, "/dev/null"); }},
      {"fsdp_write_flight_record", [=] { return fsdp_write_flight_record(context, "/dev/null"); }},
      {"fsdp_get_failed_ranks", [=] { return fsdp_get_failed_ranks(context, nullptr, &count); }},
      {"fsdp_wait_stream", [=] { return fsdp_wait_stream(context, nullptr, 1); }},
      {"fsdp_begin_span", [=] { return fsdp_begin_span(context, "span"); }},
      {"fsdp_end_span", [=] { return fsdp_end_span(context); }},
      {"fsdp_create_mesh", [=] { return fsdp_create_mesh(context, nullptr, &mesh); }},
      {"fsdp_create_model", [=] { return fsdp_create_model(context, nullptr, &model); }}};
}

std::vector<Call> model_calls(fsdp_model *model) {
  static fsdp_group *group = nullptr;
  static fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  static uint64_t bytes;
  static fsdp_stats stats = FSDP_STATS_INIT;
  static fsdp_shard shard = FSDP_SHARD_INIT;
  static fsdp_tensor tensor = FSDP_TENSOR_INIT;
  static uint64_t size = 0;
  static double norm = 0;
  static int32_t found = 0;
  static fsdp_capture *capture = nullptr;
  alignas(4096) static char arena[4096];
  return {
      {"fsdp_create_group", [=] { return fsdp_create_group(model, "g", nullptr, 0, 0, nullptr, &group); }},
      {"fsdp_set_schedule", [=] { return fsdp_set_schedule(model, FSDP_SCHEDULE_SEQUENTIAL, nullptr); }},
      {"fsdp_add_optimizer_state", [=] { return fsdp_add_optimizer_state(model, "s", FSDP_FLOAT32); }},
      {"fsdp_set_arena", [=] { return fsdp_set_arena(model, FSDP_ROLE_MAIN, arena, sizeof arena); }},
      {"fsdp_seal_model", [=] { return fsdp_seal_model(model); }},
      {"fsdp_get_role_bytes", [=] { return fsdp_get_role_bytes(model, FSDP_ROLE_ALL, 0, &bytes); }},
      {"fsdp_get_allocated_bytes", [=] { return fsdp_get_allocated_bytes(model, FSDP_ROLE_ALL, &bytes); }},
      {"fsdp_get_model_info", [=] { return fsdp_get_model_info(model, &info); }},
      {"fsdp_get_stats", [=] { return fsdp_get_stats(model, &stats); }},
      {"fsdp_describe_model", [=] { return fsdp_describe_model(model, nullptr, &size); }},
      {"fsdp_describe_load", [=] { return fsdp_describe_load(model, nullptr, &size); }},
      {"fsdp_check_model", [=] { return fsdp_check_model(model, nullptr, &size); }},
      {"fsdp_get_group_count", [=] { return fsdp_get_group_count(model, &size); }},
      {"fsdp_get_group", [=] { return fsdp_get_group(model, 0, &group); }},
      {"fsdp_find_group", [=] { return fsdp_find_group(model, "alpha", &group); }},
      {"fsdp_find_param", [=] { return fsdp_find_param(model, "alpha.w", &group, &size); }},
      {"fsdp_finish_grads", [=] { return fsdp_finish_grads(model, 1, 0, nullptr); }},
      {"fsdp_get_shard_count", [=] { return fsdp_get_shard_count(model, &size); }},
      {"fsdp_get_shard", [=] { return fsdp_get_shard(model, 0, &shard); }},
      {"fsdp_get_shard_state", [=] { return fsdp_get_shard_state(model, 0, "exp_avg", &tensor); }},
      {"fsdp_get_grad_norm", [=] { return fsdp_get_grad_norm(model, nullptr, nullptr, &norm); }},
      {"fsdp_get_last_norm", [=] { return fsdp_get_last_norm(model, &norm); }},
      {"fsdp_get_param_grad_norms", [=] { return fsdp_get_param_grad_norms(model, nullptr, &norm, 1); }},
      {"fsdp_scale_grads", [=] { return fsdp_scale_grads(model, 2, nullptr); }},
      {"fsdp_clip_grads", [=] { return fsdp_clip_grads(model, nullptr, 1, nullptr, &norm); }},
      {"fsdp_check_grads", [=] { return fsdp_check_grads(model, nullptr, &found, nullptr); }},
      {"fsdp_step_adamw", [=] { return fsdp_step_adamw(model, 0.1, nullptr, nullptr); }},
      {"fsdp_publish_weights", [=] { return fsdp_publish_weights(model, nullptr); }},
      {"fsdp_begin_update", [=] { return fsdp_begin_update(model, nullptr); }},
      {"fsdp_discard_step", [=] { return fsdp_discard_step(model, nullptr); }},
      {"fsdp_check_replicas", [=] { return fsdp_check_replicas(model, 0, nullptr); }},
      {"fsdp_begin_capture", [=] { return fsdp_begin_capture(model, nullptr); }},
      {"fsdp_end_capture", [=] { return fsdp_end_capture(model, nullptr, &capture); }},
      {"fsdp_apply_grads",
       [=] { return fsdp_apply_grads(model, nullptr, 0, sizeof(fsdp_grad), 0.1, 0, nullptr, nullptr, nullptr); }},
  };
}

std::vector<Call> group_calls(fsdp_group *group) {
  static fsdp_param param = FSDP_PARAM_INIT;
  static fsdp_tensor tensor = FSDP_TENSOR_INIT;
  static fsdp_chunk chunk = FSDP_CHUNK_INIT;
  static fsdp_group_info info = FSDP_GROUP_INFO_INIT;
  static int32_t accumulate = 0;
  static float data[64];
  return {
      {"fsdp_get_group_info", [=] { return fsdp_get_group_info(group, &info); }},
      {"fsdp_get_param_info", [=] { return fsdp_get_param_info(group, 0, &param); }},
      {"fsdp_load_param", [=] { return fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_read_param", [=] { return fsdp_read_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_load_chunk", [=] { return fsdp_load_chunk(group, 0, data, FSDP_FLOAT32, 0, 8, 0); }},
      {"fsdp_load_state", [=] { return fsdp_load_state(group, 0, "exp_avg", data, FSDP_FLOAT32, 32, -1, 0); }},
      {"fsdp_read_state", [=] { return fsdp_read_state(group, 0, "exp_avg", data, FSDP_FLOAT32, 32, -1, 0); }},
      {"fsdp_set_param_lr_scale", [=] { return fsdp_set_param_lr_scale(group, 0, 2); }},
      {"fsdp_get_params", [=] { return fsdp_get_params(group, FSDP_FORWARD, &tensor, 1, sizeof tensor); }},
      {"fsdp_get_param", [=] { return fsdp_get_param(group, 0, FSDP_FORWARD, &tensor); }},
      {"fsdp_get_chunk", [=] { return fsdp_get_chunk(group, 0, 0, &chunk); }},
      {"fsdp_prefetch", [=] { return fsdp_prefetch(group, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_unshard", [=] { return fsdp_unshard(group, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_reshard", [=] { return fsdp_reshard(group, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_acquire_grad", [=] { return fsdp_acquire_grad(group, 0, 0, nullptr, &tensor, &accumulate); }},
      {"fsdp_acquire_grads",
       [=] { return fsdp_acquire_grads(group, 0, nullptr, &tensor, 1, sizeof tensor, &accumulate); }},
      {"fsdp_put_grad", [=] { return fsdp_put_grad(group, 0, data, FSDP_FLOAT32, 32, 0, nullptr); }},
      {"fsdp_reduce_grad", [=] { return fsdp_reduce_grad(group, FSDP_LAST, nullptr); }},
  };
}

std::vector<Call> capture_calls(fsdp_capture *capture) {
  return {{"fsdp_prepare_replay", [=] { return fsdp_prepare_replay(capture, 0.1, nullptr); }},
          {"fsdp_commit_replay", [=] { return fsdp_commit_replay(capture, nullptr); }},
          {"fsdp_cancel_replay", [=] { return fsdp_cancel_replay(capture, nullptr); }}};
}

void expect_all_refused(const std::vector<Call> &calls, fsdp_status status, const std::string &what) {
  for (const Call &call : calls) EXPECT_TRUE(fails(call.run(), status, {call.name, what})) << call.name;
}

TEST(MisusedHandle, NullInEveryCall) {
  expect_all_refused(context_calls(nullptr), FSDP_INVALID_HANDLE, "the context is NULL");
  expect_all_refused(model_calls(nullptr), FSDP_INVALID_HANDLE, "the model is NULL");
  expect_all_refused(group_calls(nullptr), FSDP_INVALID_HANDLE, "the group is NULL");
  expect_all_refused(capture_calls(nullptr), FSDP_INVALID_HANDLE, "the capture is NULL");
  fsdp_destroy_context(nullptr);
  fsdp_destroy_mesh(nullptr);
  fsdp_destroy_model(nullptr);
  fsdp_destroy_capture(nullptr);
}

TEST(MisusedHandle, AnotherTypeInEveryCall) {
  Solo solo(State::published);
  const auto model_as_context = reinterpret_cast<fsdp_context *>(solo.model);
  const auto context_as_model = reinterpret_cast<fsdp_model *>(solo.context);
  const auto model_as_group = reinterpret_cast<fsdp_group *>(solo.model);
  expect_all_refused(context_calls(model_as_context), FSDP_INVALID_HANDLE, "given as context is an fsdp_model");
  expect_all_refused(model_calls(context_as_model), FSDP_INVALID_HANDLE, "given as model is an fsdp_context");
  expect_all_refused(group_calls(model_as_group), FSDP_INVALID_HANDLE, "given as group is an fsdp_model");
  const auto model_as_capture = reinterpret_cast<fsdp_capture *>(solo.model);
  expect_all_refused(capture_calls(model_as_capture), FSDP_INVALID_HANDLE, "given as capture is an fsdp_model");
  fsdp_error error = FSDP_ERROR_INIT;
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_get_last_error(model_as_context, &error), "an fsdp_model");
  uint64_t garbage[64] = {};
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_seal_model(reinterpret_cast<fsdp_model *>(garbage)), "no handle of libfsdp");
  // A destroy call given the wrong thing does nothing.
  fsdp_destroy_context(model_as_context);
  fsdp_destroy_model(context_as_model);
  fsdp_destroy_mesh(reinterpret_cast<fsdp_mesh *>(solo.model));
  fsdp_destroy_capture(model_as_capture);
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
  expect_all_refused({{"context of rank 0", [&] { return fsdp_unshard(rank->groups[0], FSDP_FORWARD, 0, nullptr); }},
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
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_model_info(solo.model, nullptr), "fsdp_model_info is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_stats(solo.model, nullptr), "fsdp_stats is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_describe_model(solo.model, nullptr, nullptr), "size_bytes is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_describe_build(nullptr, nullptr), "size_bytes is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_info(solo.group(0), 0, nullptr), "fsdp_param is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param(solo.group(0), 0, FSDP_FORWARD, nullptr), "fsdp_tensor is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_chunk(solo.group(0), 0, 0, nullptr), "fsdp_chunk is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_read_param(solo.group(0), 0, nullptr, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0),
               "data is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_acquire_grad(solo.group(0), 0, 0, nullptr, &tensor, nullptr),
               "accumulate is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_count(solo.model, nullptr), "shard_count is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard(solo.model, 0, nullptr), "fsdp_shard is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_state(solo.model, 0, nullptr, &tensor), "name is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_last_norm(solo.model, nullptr), "norm is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_grad_norms(solo.model, nullptr, nullptr, 5), "norms is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_check_grads(solo.model, nullptr, nullptr, nullptr), "found is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
               fsdp_apply_grads(solo.model, nullptr, 4, sizeof(fsdp_grad), 0.1, 0, nullptr, nullptr, &norm),
               "grads is NULL");
  (void)model;
  solo.clean_step();
}

TEST(MisusedHandle, OutputStructsNeedTheirSize) {
  Solo solo(State::published);
  const auto size_missing = [](const char *name) { return std::string(name) + ".struct_size is 0"; };
  fsdp_model_info info = {};
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_model_info(solo.model, &info), size_missing("fsdp_model_info"),
               "sizeof(fsdp_model_info)");
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
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_acquire_grad(solo.group(0), 0, 0, nullptr, &tensor, &accumulate),
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
  EXPECT_FAILS(FSDP_INVALID_STATE,
               fsdp_create_group(solo.model, "late", nullptr, 0, sizeof(fsdp_param), nullptr, &group), "sealed");
  EXPECT_EQ(group, nullptr);
  auto *mesh = static_cast<fsdp_mesh *>(garbage);
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_create_mesh(nullptr, nullptr, &mesh), "NULL");
  EXPECT_EQ(mesh, nullptr);
  fsdp_tensor tensor = FSDP_TENSOR_INIT, before = tensor;
  int32_t accumulate = 7, found = 7;
  double norm = 7;
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_acquire_grad(solo.group(0), 0, 0, nullptr, &tensor, &accumulate), "window");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_param(solo.group(0), 0, FSDP_FORWARD, &tensor), "window");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_get_grad_norm(solo.model, nullptr, nullptr, &norm), "no gradients");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_clip_grads(solo.model, nullptr, 1, nullptr, &norm), "no gradients");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_check_grads(solo.model, nullptr, &found, nullptr), "no gradients");
  EXPECT_EQ(std::memcmp(&tensor, &before, sizeof tensor), 0);
  EXPECT_EQ(accumulate, 7);
  EXPECT_EQ(found, 7);
  EXPECT_EQ(norm, 7);
}

}  // namespace
