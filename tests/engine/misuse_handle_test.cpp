// SPDX-License-Identifier: Apache-2.0
// Every call on a handle that is NULL, of another type, or destroyed; and what a failed call leaves behind.
#include <cstring>
#include <fstream>
#include <set>

#include <nlohmann/json.hpp>

#include "every_call.h"
#include "misuse.h"

using namespace harness;
using namespace misuse;
using namespace every_call;

namespace {

void expect_all_refused(const std::vector<Call> &calls, fsdp_status status, const std::string &what) {
  for (const Call &call : calls) EXPECT_TRUE(fails(call.run(), status, {call.name, what})) << call.name;
}

// A context with a model and a checkpoint.
class Live {
 public:
  Live() {
    FSDP(fsdp_create_local_contexts(1, nullptr, &context_));
    FSDP(fsdp_create_model(context_, nullptr, &model));
    FSDP(fsdp_begin_checkpoint(context_, "folder", nullptr, &checkpoint));
  }
  ~Live() {
    fsdp_destroy_checkpoint(checkpoint);
    fsdp_destroy_model(model);
    fsdp_destroy_context(context_);
  }
  fsdp_model *model = nullptr;
  fsdp_checkpoint *checkpoint = nullptr;

 private:
  fsdp_context *context_ = nullptr;
};

// fsdp_get_last_error takes NULL: the calling thread's.
std::vector<Call> without_last_error(std::vector<Call> calls) {
  std::erase_if(calls, [](const Call &call) { return std::string(call.name) == "fsdp_get_last_error"; });
  return calls;
}

// So the table cannot miss a new call, or a new handle of a call. Destroy calls return nothing.
TEST(MisusedHandle, TablesHaveEveryCallThatTakesAHandle) {
  const std::pair<const char *, std::vector<Call>> tables[] = {{"fsdp_context", context_calls(nullptr)},
                                                               {"fsdp_model", model_calls(nullptr, nullptr)},
                                                               {"fsdp_group", group_calls(nullptr)},
                                                               {"fsdp_capture", capture_calls(nullptr)},
                                                               {"fsdp_checkpoint", checkpoint_calls(nullptr, nullptr)}};
  const auto abi = nlohmann::json::parse(std::ifstream(FSDP_TEST_ABI));
  for (const auto &[handle, calls] : tables) {
    std::set<std::string> listed, declared;
    for (const Call &call : calls) listed.insert(call.name);
    for (const auto &call : abi["calls"])
      for (const auto &argument : call["arguments"]) {
        const std::string type = argument["type"];
        if (call["returns"] != "fsdp_status" ||
            !(type == handle + std::string(" *") || type == "const " + std::string(handle) + " *"))
          continue;
        const bool first = &argument == &call["arguments"][0];
        if (first || std::string(handle) == "fsdp_model") declared.insert(call["name"]);
      }
    EXPECT_EQ(listed, declared) << handle;
  }
}

TEST(MisusedHandle, NullIsRefusedByEveryCall) {
  const Live live;
  expect_all_refused(without_last_error(context_calls(nullptr)), FSDP_INVALID_HANDLE, "the context is NULL");
  expect_all_refused(model_calls(nullptr, live.checkpoint), FSDP_INVALID_HANDLE, "the model is NULL");
  expect_all_refused(checkpoint_calls(nullptr, live.model), FSDP_INVALID_HANDLE, "the checkpoint is NULL");
  expect_all_refused(group_calls(nullptr), FSDP_INVALID_HANDLE, "the group is NULL");
  expect_all_refused(capture_calls(nullptr), FSDP_INVALID_HANDLE, "the capture is NULL");
  fsdp_destroy_context(nullptr);
  fsdp_destroy_mesh(nullptr);
  fsdp_destroy_model(nullptr);
  fsdp_destroy_capture(nullptr);
}

TEST(MisusedHandle, HandleOfAnotherTypeIsRefusedByEveryCall) {
  Solo solo(State::published);
  const auto model_as_context = reinterpret_cast<fsdp_context *>(solo.model);
  const auto context_as_model = reinterpret_cast<fsdp_model *>(solo.context);
  const auto model_as_group = reinterpret_cast<fsdp_group *>(solo.model);
  expect_all_refused(context_calls(model_as_context), FSDP_INVALID_HANDLE, "given as context is an fsdp_model");
  const Live live;
  const auto model_as_checkpoint = reinterpret_cast<fsdp_checkpoint *>(solo.model);
  expect_all_refused(checkpoint_calls(model_as_checkpoint, live.model), FSDP_INVALID_HANDLE,
                     "given as checkpoint is an fsdp_model");
  expect_all_refused(model_calls(context_as_model, live.checkpoint), FSDP_INVALID_HANDLE,
                     "given as model is an fsdp_context");
  expect_all_refused(group_calls(model_as_group), FSDP_INVALID_HANDLE, "given as group is an fsdp_model");
  const auto model_as_capture = reinterpret_cast<fsdp_capture *>(solo.model);
  expect_all_refused(capture_calls(model_as_capture), FSDP_INVALID_HANDLE, "given as capture is an fsdp_model");
  uint64_t garbage[64] = {};
  EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_seal_model(reinterpret_cast<fsdp_model *>(garbage)), "no handle of libfsdp");
  // A destroy call on a wrong handle does nothing.
  fsdp_destroy_context(model_as_context);
  fsdp_destroy_model(context_as_model);
  fsdp_destroy_mesh(reinterpret_cast<fsdp_mesh *>(solo.model));
  fsdp_destroy_capture(model_as_capture);
  solo.clean_step();
}

TEST(MisusedHandle, DestroyedHandleIsRefusedByEveryCall) {
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
  const Live live;
  expect_all_refused(model_calls(model, live.checkpoint), FSDP_INVALID_HANDLE, "given as model is a destroyed handle");
  expect_all_refused(group_calls(group), FSDP_INVALID_HANDLE, "given as group is a destroyed handle");
  expect_all_refused(context_calls(context), FSDP_INVALID_HANDLE, "given as context is a destroyed handle");
  fsdp_destroy_context(context);
  fsdp_destroy_model(model);
  fsdp_destroy_mesh(mesh);
}

TEST(MisusedHandle, MeshOfAnotherContextIsRefused) {
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
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param_weight_norms(solo.model, nullptr, nullptr, 5), "norms is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_count_zero_grads(solo.model, nullptr, nullptr), "zero_count is NULL");
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
