/* SPDX-License-Identifier: Apache-2.0 */
/* The other calls (models, contexts and checkpoints), and the table of all calls. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

static fsdp_status seal_model(rank_state *state, const line *words) {
  return fsdp_seal_model(handle(state, words, 1, 'm'));
}
static fsdp_status publish_weights(rank_state *state, const line *words) {
  return fsdp_publish_weights(handle(state, words, 1, 'm'), NULL);
}
static fsdp_status begin_update(rank_state *state, const line *words) {
  return fsdp_begin_update(handle(state, words, 1, 'm'), NULL);
}
static fsdp_status discard_step(rank_state *state, const line *words) {
  return fsdp_discard_step(handle(state, words, 1, 'm'), NULL);
}
static fsdp_status check_replicas(rank_state *state, const line *words) {
  return fsdp_check_replicas(handle(state, words, 1, 'm'), 0, NULL);
}
static fsdp_status destroy_model(rank_state *state, const line *words) {
  fsdp_destroy_model(handle(state, words, 1, 'm'));
  return FSDP_OK;
}
static fsdp_status destroy_mesh(rank_state *state, const line *words) {
  fsdp_destroy_mesh(handle(state, words, 1, 's'));
  return FSDP_OK;
}
static fsdp_status destroy_checkpoint(rank_state *state, const line *words) {
  fsdp_destroy_checkpoint(handle(state, words, 1, 'c'));
  return FSDP_OK;
}
static fsdp_status close_context(rank_state *state, const line *words) {
  (void)words;
  return fsdp_close_context(state->context);
}
static fsdp_status abort_context(rank_state *state, const line *words) {
  (void)words;
  return fsdp_abort_context(state->context, "conformance");
}

static fsdp_status all_reduce_values(rank_state *state, const line *words) {
  double values[1024] = {0};
  const uint64_t count = (uint64_t)integer(words, 2);
  for (uint64_t i = 0; i < count; ++i) values[i] = value_at(state, words, 3, 0, i);
  const fsdp_status status =
      fsdp_all_reduce_values(state->context, NULL, values, count, (fsdp_value_op)integer(words, 1));
  give_crc(state, crc32_of(0, values, count * sizeof *values));
  return status;
}

static fsdp_status get_stats(rank_state *state, const line *words) {
  fsdp_stats stats = FSDP_STATS_INIT;
  const fsdp_status status = fsdp_get_stats(handle(state, words, 1, 'm'), &stats);
  const struct { const char *name; uint64_t value; } fields[] = {
      {"version", stats.version}, {"step", stats.step}, {"reduces", stats.reduces},
      {"gathered_groups", stats.gathered_groups}, {"pending_grad_groups", stats.pending_grad_groups}};
  for (size_t f = 0; f < sizeof fields / sizeof *fields; ++f)
    if (strcmp(fields[f].name, word(words, 2)) == 0) give_integer(state, fields[f].value);
  return status;
}

static fsdp_status get_model_info(rank_state *state, const line *words) {
  fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  const fsdp_status status = fsdp_get_model_info(handle(state, words, 1, 'm'), &info);
  const struct { const char *name; uint64_t value; } fields[] = {
      {"group_count", info.group_count}, {"param_count", info.param_count}, {"element_count", info.element_count}};
  for (size_t f = 0; f < sizeof fields / sizeof *fields; ++f)
    if (strcmp(fields[f].name, word(words, 2)) == 0) give_integer(state, fields[f].value);
  return status;
}

/* ---- checkpoints --------------------------------------------------------------------------------------------- */

static const char *save_path(const rank_state *state, const char *folder, char *path) {
  snprintf(path, PATH_BYTES, "%s/%u/%s", state->save_folder, state->world_size, folder);
  return path;
}
static const char *load_path(const rank_state *state, const char *world, const char *folder, char *path) {
  snprintf(path, PATH_BYTES, "%s/%s/%s", state->load_folder, world, folder);
  return path;
}

static fsdp_status save(rank_state *state, const line *words) {
  char path[PATH_BYTES];
  return fsdp_save(handle(state, words, 1, 'm'), save_path(state, word(words, 2), path), NULL);
}
static fsdp_status load(rank_state *state, const line *words) {
  char path[PATH_BYTES];
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  options.flags = (uint32_t)key_or(words, "flags", 0);
  const fsdp_status status = fsdp_load(handle(state, words, 1, 'm'),
                                       load_path(state, word(words, 2), word(words, 3), path), &options, &loaded);
  snprintf(state->value, sizeof state->value, "%llu/%llu", (unsigned long long)loaded.step,
           (unsigned long long)loaded.loaded_tensors);
  return status;
}

static fsdp_status begin_checkpoint(rank_state *state, const line *words) {
  char path[PATH_BYTES];
  fsdp_checkpoint *checkpoint = NULL;
  const fsdp_status status =
      fsdp_begin_checkpoint(state->context, save_path(state, word(words, 2), path), NULL, &checkpoint);
  bind_name(state, word(words, 1), 'c', checkpoint);
  return status;
}
static fsdp_status open_checkpoint(rank_state *state, const line *words) {
  char path[PATH_BYTES];
  fsdp_checkpoint *checkpoint = NULL;
  const fsdp_status status = fsdp_open_checkpoint(
      state->context, load_path(state, word(words, 2), word(words, 3), path), &checkpoint);
  bind_name(state, word(words, 1), 'c', checkpoint);
  return status;
}
static fsdp_status add_checkpoint_model(rank_state *state, const line *words) {
  return fsdp_add_checkpoint_model(handle(state, words, 1, 'c'), word(words, 2), handle(state, words, 3, 'm'));
}
static fsdp_status load_checkpoint_model(rank_state *state, const line *words) {
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  const fsdp_status status = fsdp_load_checkpoint_model(handle(state, words, 1, 'c'), word(words, 2),
                                                        handle(state, words, 3, 'm'), NULL, &loaded);
  give_integer(state, loaded.step);
  return status;
}
static fsdp_status add_checkpoint_bytes(rank_state *state, const line *words) {
  const uint64_t count = (uint64_t)integer(words, 4);
  void *data = make_array(state, words, 5, 0, count, FSDP_FLOAT32);
  const fsdp_status status = fsdp_add_checkpoint_bytes(handle(state, words, 1, 'c'), word(words, 2), data,
                                                       count * sizeof(float), (fsdp_bytes_owner)integer(words, 3));
  free(data);
  return status;
}
static fsdp_status read_checkpoint_bytes(rank_state *state, const line *words) {
  char data[4096];
  uint64_t size_bytes = 0, room = 0;
  fsdp_checkpoint *checkpoint = handle(state, words, 1, 'c');
  fsdp_status status = fsdp_read_checkpoint_bytes(checkpoint, word(words, 2), NULL, &size_bytes);
  if (status != FSDP_OK) return status;
  room = size_bytes;
  if (room > sizeof data) abort();
  status = fsdp_read_checkpoint_bytes(checkpoint, word(words, 2), data, &room);
  give_crc(state, crc32_of(0, data, size_bytes));
  return status;
}
static fsdp_status commit_checkpoint(rank_state *state, const line *words) {
  return fsdp_commit_checkpoint(handle(state, words, 1, 'c'));
}
static fsdp_status wait_checkpoint(rank_state *state, const line *words) {
  return fsdp_wait_checkpoint(handle(state, words, 1, 'c'));
}

/* ---- the table ----------------------------------------------------------------------------------------------- */


static const struct call {
  const char *name;
  fsdp_status (*make)(rank_state *, const line *);
} calls[] = {
    {"param", do_param}, {"visit", do_visit}, {"create_mesh", do_create_mesh}, {"create_model", do_create_model},
    {"create_group", do_create_group}, {"set_schedule", do_set_schedule}, {"find_group", do_find_group},
    {"load_param", do_load_param},
    {"read_param", do_read_param}, {"load_state", do_load_state}, {"read_state", do_read_state},
    {"load_grad", do_load_grad}, {"read_grad", do_read_grad},
    {"set_param_lr_scale", do_set_param_lr_scale}, {"set_param_trainable", do_set_param_trainable},
    {"unshard", do_unshard}, {"reshard", do_reshard}, {"prefetch", do_prefetch}, {"restore_view", do_restore_view},
    {"get_param", do_get_param}, {"get_params", do_get_params}, {"get_plane", do_get_plane},
    {"swizzle_scales", do_swizzle_scales}, {"acquire_grad", do_acquire_grad},
    {"acquire_grads", do_acquire_grads}, {"put_grad", do_put_grad},
    {"complete_grad", do_complete_grad}, {"reduce_grad", do_reduce_grad},
    {"finish_grads", do_finish_grads}, {"scale_grads", do_scale_grads}, {"get_grad_norm", do_get_grad_norm},
    {"get_param_grad_norms", do_get_param_grad_norms}, {"get_param_weight_norms", do_get_param_weight_norms},
    {"count_zero_grads", do_count_zero_grads},
    {"clip_grads", do_clip_grads}, {"check_grads", do_check_grads}, {"step_adamw", do_step_adamw},
    {"apply_grads", do_apply_grads}, {"round_stochastic", do_round_stochastic},
    {"collect_matrices", do_collect_matrices}, {"change_matrices", do_change_matrices}, {"seal_model", seal_model},
    {"publish_weights", publish_weights},
    {"begin_update", begin_update}, {"discard_step", discard_step}, {"check_replicas", check_replicas},
    {"destroy_model", destroy_model}, {"destroy_mesh", destroy_mesh}, {"destroy_checkpoint", destroy_checkpoint},
    {"close_context", close_context}, {"abort_context", abort_context}, {"all_reduce_values", all_reduce_values},
    {"get_stats", get_stats}, {"get_model_info", get_model_info}, {"save", save}, {"load", load},
    {"begin_checkpoint", begin_checkpoint}, {"open_checkpoint", open_checkpoint},
    {"add_checkpoint_model", add_checkpoint_model}, {"load_checkpoint_model", load_checkpoint_model},
    {"add_checkpoint_bytes", add_checkpoint_bytes}, {"read_checkpoint_bytes", read_checkpoint_bytes},
    {"commit_checkpoint", commit_checkpoint}, {"wait_checkpoint", wait_checkpoint}};

fsdp_status execute_call(rank_state *state, const line *words) {
  snprintf(state->value, sizeof state->value, "-");
  for (size_t c = 0; c < sizeof calls / sizeof *calls; ++c) {
    if (strcmp(calls[c].name, word(words, 0)) != 0) continue;
    const fsdp_status status = calls[c].make(state, words);
    if (status != FSDP_OK) snprintf(state->value, sizeof state->value, "-");
    return status;
  }
  fprintf(stderr, "unknown call: %s\n", words->text);
  exit(2);
}

void destroy_handles(rank_state *state) {
  for (size_t i = 0; i < state->name_count; ++i) {
    if (state->names[i].kind == 'm') fsdp_destroy_model(state->names[i].handle);
    if (state->names[i].kind == 's') fsdp_destroy_mesh(state->names[i].handle);
    if (state->names[i].kind == 'c') fsdp_destroy_checkpoint(state->names[i].handle);
  }
}
