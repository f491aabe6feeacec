// SPDX-License-Identifier: Apache-2.0
// Every call that takes a handle, with arguments that are legal in a world of one, for the tests of handles.
// MisusedHandle.TablesHaveEveryCallThatTakesAHandle checks that no call of the header is missing.
#pragma once

#include <functional>
#include <vector>

#include "fsdp.h"

namespace every_call {

struct Call {
  const char *name;
  std::function<fsdp_status()> run;
};

inline std::vector<Call> context_calls(fsdp_context *context) {
  static double value = 0;
  static uint32_t number = 0;
  static uint64_t count = 0;
  static fsdp_error error = FSDP_ERROR_INIT;
  static fsdp_mesh *mesh = nullptr;
  static fsdp_model *model = nullptr;
  static fsdp_checkpoint *checkpoint = nullptr;
  return {
      {"fsdp_get_last_error", [=] { return fsdp_get_last_error(context, &error); }},
      {"fsdp_begin_checkpoint", [=] { return fsdp_begin_checkpoint(context, "folder", nullptr, &checkpoint); }},
      {"fsdp_open_checkpoint", [=] { return fsdp_open_checkpoint(context, "folder", &checkpoint); }},
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

// `live` is a checkpoint of a live context. It may be NULL if `model` is not a valid handle.
inline std::vector<Call> model_calls(fsdp_model *model, fsdp_checkpoint *live) {
  static fsdp_group *group = nullptr;
  static fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  static uint64_t bytes;
  static fsdp_stats stats = FSDP_STATS_INIT;
  static fsdp_shard shard = FSDP_SHARD_INIT;
  static fsdp_tensor tensor = FSDP_TENSOR_INIT;
  static fsdp_matrix matrix = FSDP_MATRIX_INIT;
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
      {"fsdp_next_shard_chunk", [=] { return fsdp_next_shard_chunk(model, nullptr, &shard); }},
      {"fsdp_get_shard_chunk_state", [=] { return fsdp_get_shard_chunk_state(model, "exp_avg", &tensor); }},
      {"fsdp_get_grad_norm", [=] { return fsdp_get_grad_norm(model, nullptr, nullptr, &norm); }},
      {"fsdp_get_last_norm", [=] { return fsdp_get_last_norm(model, &norm); }},
      {"fsdp_get_param_grad_norms", [=] { return fsdp_get_param_grad_norms(model, nullptr, &norm, 1); }},
      {"fsdp_get_param_weight_norms", [=] { return fsdp_get_param_weight_norms(model, nullptr, &norm, 1); }},
      {"fsdp_count_zero_grads", [=] { return fsdp_count_zero_grads(model, nullptr, &size); }},
      {"fsdp_scale_grads", [=] { return fsdp_scale_grads(model, 2, nullptr); }},
      {"fsdp_clip_grads", [=] { return fsdp_clip_grads(model, nullptr, 1, nullptr, &norm); }},
      {"fsdp_check_grads", [=] { return fsdp_check_grads(model, nullptr, &found, nullptr); }},
      {"fsdp_step_adamw", [=] { return fsdp_step_adamw(model, 0.1, nullptr, nullptr); }},
      {"fsdp_collect_matrices", [=] { return fsdp_collect_matrices(model, nullptr, nullptr); }},
      {"fsdp_next_matrix", [=] { return fsdp_next_matrix(model, nullptr, &matrix); }},
      {"fsdp_return_matrices", [=] { return fsdp_return_matrices(model, nullptr); }},
      {"fsdp_get_matrix_plan", [=] { return fsdp_get_matrix_plan(model, nullptr, &size); }},
      {"fsdp_publish_weights", [=] { return fsdp_publish_weights(model, nullptr); }},
      {"fsdp_begin_update", [=] { return fsdp_begin_update(model, nullptr); }},
      {"fsdp_discard_step", [=] { return fsdp_discard_step(model, nullptr); }},
      {"fsdp_check_replicas", [=] { return fsdp_check_replicas(model, 0, nullptr); }},
      {"fsdp_save", [=] { return fsdp_save(model, "folder", nullptr); }},
      {"fsdp_load", [=] { return fsdp_load(model, "folder", nullptr, nullptr); }},
      {"fsdp_load_weights",
       [=] { return fsdp_load_weights(model, "folder", nullptr, 0, sizeof(fsdp_rename), nullptr, nullptr); }},
      {"fsdp_add_checkpoint_model", [=] { return fsdp_add_checkpoint_model(live, "model", model); }},
      {"fsdp_load_checkpoint_model",
       [=] { return fsdp_load_checkpoint_model(live, "model", model, nullptr, nullptr); }},
      {"fsdp_begin_capture", [=] { return fsdp_begin_capture(model, nullptr); }},
      {"fsdp_end_capture", [=] { return fsdp_end_capture(model, nullptr, &capture); }},
      {"fsdp_apply_grads",
       [=] { return fsdp_apply_grads(model, nullptr, 0, sizeof(fsdp_grad), 0.1, 0, nullptr, nullptr, nullptr); }},
  };
}

inline std::vector<Call> group_calls(fsdp_group *group) {
  static fsdp_param param = FSDP_PARAM_INIT;
  static fsdp_tensor tensor = FSDP_TENSOR_INIT;
  static fsdp_chunk chunk = FSDP_CHUNK_INIT;
  static fsdp_group_info info = FSDP_GROUP_INFO_INIT;
  static int32_t accumulate = 0;
  static uint64_t size = 0;
  static float data[64];
  return {
      {"fsdp_get_group_info", [=] { return fsdp_get_group_info(group, &info); }},
      {"fsdp_get_param_info", [=] { return fsdp_get_param_info(group, 0, &param); }},
      {"fsdp_load_param", [=] { return fsdp_load_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_read_param", [=] { return fsdp_read_param(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_load_chunk", [=] { return fsdp_load_chunk(group, 0, data, FSDP_FLOAT32, 0, 8, 0); }},
      {"fsdp_load_state", [=] { return fsdp_load_state(group, 0, "exp_avg", data, FSDP_FLOAT32, 32, -1, 0); }},
      {"fsdp_read_state", [=] { return fsdp_read_state(group, 0, "exp_avg", data, FSDP_FLOAT32, 32, -1, 0); }},
      {"fsdp_load_grad", [=] { return fsdp_load_grad(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_read_grad", [=] { return fsdp_read_grad(group, 0, data, FSDP_FLOAT32, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_set_param_lr_scale", [=] { return fsdp_set_param_lr_scale(group, 0, 2); }},
      {"fsdp_set_param_trainable", [=] { return fsdp_set_param_trainable(group, 0, 0); }},
      {"fsdp_get_params", [=] { return fsdp_get_params(group, FSDP_FORWARD, &tensor, 1, sizeof tensor); }},
      {"fsdp_get_param", [=] { return fsdp_get_param(group, 0, FSDP_FORWARD, &tensor); }},
      {"fsdp_get_chunk", [=] { return fsdp_get_chunk(group, 0, 0, &chunk); }},
      {"fsdp_get_plane", [=] { return fsdp_get_plane(group, 0, FSDP_FORWARD, FSDP_PLANE_ROW, &tensor); }},
      {"fsdp_load_plane",
       [=] { return fsdp_load_plane(group, 0, FSDP_PLANE_ROW, data, FSDP_FLOAT8_E4M3, 32, FSDP_EVERY_RANK, 0); }},
      {"fsdp_swizzle_scales",
       [=] { return fsdp_swizzle_scales(group, 0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE, nullptr, &size, nullptr); }},
      {"fsdp_prefetch", [=] { return fsdp_prefetch(group, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_unshard", [=] { return fsdp_unshard(group, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_reshard", [=] { return fsdp_reshard(group, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_unshard_piece", [=] { return fsdp_unshard_piece(group, 0, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_reshard_piece", [=] { return fsdp_reshard_piece(group, 0, FSDP_FORWARD, 0, nullptr); }},
      {"fsdp_restore_view", [=] { return fsdp_restore_view(group); }},
      {"fsdp_acquire_grad", [=] { return fsdp_acquire_grad(group, 0, 0, nullptr, &tensor, &accumulate); }},
      {"fsdp_acquire_grads",
       [=] { return fsdp_acquire_grads(group, 0, nullptr, &tensor, 1, sizeof tensor, &accumulate); }},
      {"fsdp_put_grad", [=] { return fsdp_put_grad(group, 0, data, FSDP_FLOAT32, 32, 0, nullptr); }},
      {"fsdp_complete_grad", [=] { return fsdp_complete_grad(group, 0, 0, nullptr); }},
      {"fsdp_reduce_grad", [=] { return fsdp_reduce_grad(group, FSDP_LAST, nullptr); }},
      {"fsdp_round_stochastic", [=] { return fsdp_round_stochastic(group, 0, 0, data, data + 32, 1, 1, nullptr); }},
  };
}

inline std::vector<Call> capture_calls(fsdp_capture *capture) {
  return {{"fsdp_prepare_replay", [=] { return fsdp_prepare_replay(capture, 0.1, nullptr); }},
          {"fsdp_commit_replay", [=] { return fsdp_commit_replay(capture, nullptr); }},
          {"fsdp_cancel_replay", [=] { return fsdp_cancel_replay(capture, nullptr); }}};
}

inline std::vector<Call> checkpoint_calls(fsdp_checkpoint *checkpoint, fsdp_model *live) {
  static fsdp_checkpoint_status status = FSDP_CHECKPOINT_STATUS_INIT;
  static uint64_t size = 0;
  return {
      {"fsdp_add_checkpoint_model", [=] { return fsdp_add_checkpoint_model(checkpoint, "model", nullptr); }},
      {"fsdp_add_checkpoint_bytes",
       [=] { return fsdp_add_checkpoint_bytes(checkpoint, "bytes", "1", 1, FSDP_BYTES_ONCE); }},
      {"fsdp_commit_checkpoint", [=] { return fsdp_commit_checkpoint(checkpoint); }},
      {"fsdp_get_checkpoint_status", [=] { return fsdp_get_checkpoint_status(checkpoint, &status); }},
      {"fsdp_wait_checkpoint", [=] { return fsdp_wait_checkpoint(checkpoint); }},
      {"fsdp_load_checkpoint_model",
       [=] { return fsdp_load_checkpoint_model(checkpoint, "model", live, nullptr, nullptr); }},
      {"fsdp_read_checkpoint_bytes", [=] { return fsdp_read_checkpoint_bytes(checkpoint, "bytes", nullptr, &size); }},
  };
}

}  // namespace every_call
