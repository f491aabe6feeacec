/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that declare a model, and calls that load and read its contents. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

/* ---- declaring ----------------------------------------------------------------------------------------------- */

static void read_splits(declared_param *made, const char *text) {
  while (text) {
    if (made->split_count == MOST_SPLITS) abort();
    made->splits[made->split_count++] = strtoull(text, NULL, 10);
    text = strchr(text, ',');
    if (text) ++text;
  }
}

fsdp_status do_param(rank_state *state, const line *words) {
  if (state->declared_count == MOST_PARAMS) abort();
  declared_param *made = &state->declared[state->declared_count++];
  *made = (declared_param){.element_count = 1, .lr_scale = key_number(words, "lr_scale")};
  snprintf(made->name, sizeof made->name, "%s", word(words, 1));
  for (int i = 2; i < words->word_count; ++i) {
    made->shape[made->dimension_count++] = (uint64_t)integer(words, i);
    made->element_count *= (uint64_t)integer(words, i);
  }
  made->dtype = (fsdp_dtype)key_or(words, "dtype", 0);
  made->flags = (uint32_t)key_or(words, "flags", 0);
  made->quantization = (fsdp_quantization)key_or(words, "quantization", 0);
  made->missing_grad = (fsdp_missing_grad)key_or(words, "missing_grad", 0);
  made->optimizer = (fsdp_optimizer)key_or(words, "optimizer", 0);
  made->row_dimensions = (uint32_t)key_or(words, "row_dimensions", 0);
  made->piece = (uint32_t)key_or(words, "piece", 0);
  made->matrix = (fsdp_matrix_layout)key_or(words, "matrix", 0);
  read_splits(made, find_key(words, "splits"));
  return FSDP_OK;
}

fsdp_status do_visit(rank_state *state, const line *words) {
  if (state->visit_count == MOST_VISITS) abort();
  fsdp_group_info info = FSDP_GROUP_INFO_INIT;
  if (fsdp_get_group_info(handle(state, words, 1, 'g'), &info) != FSDP_OK) abort();
  const uint32_t piece = find_key(words, "piece") ? FSDP_PIECE(key_or(words, "piece", 0)) : 0;
  state->visits[state->visit_count++] = (fsdp_visit){info.group_index, (fsdp_phase)integer(words, 2), piece};
  return FSDP_OK;
}

fsdp_status do_create_mesh(rank_state *state, const line *words) {
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  options.replicate_size = (uint32_t)key_or(words, "replicate_size", 0);
  options.shard_size = (uint32_t)key_or(words, "shard_size", 0);
  uint32_t ranks[MOST_WORDS];
  for (int i = 2; i < words->word_count; ++i) ranks[options.rank_count++] = (uint32_t)integer(words, i);
  if (options.rank_count > 0) options.ranks = ranks;
  fsdp_mesh *mesh = NULL;
  const fsdp_status status = fsdp_create_mesh(state->context, &options, &mesh);
  bind_name(state, word(words, 1), 's', mesh);
  return status;
}

fsdp_status do_create_model(rank_state *state, const line *words) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  if (find_key(words, "mesh")) options.mesh = find_name(state, find_key(words, "mesh"), 's')->handle;
  options.flags = (uint32_t)key_or(words, "flags", 0);
  options.strategy = (fsdp_strategy)key_or(words, "strategy", 0);
  options.outer_strategy = (fsdp_outer_strategy)key_or(words, "outer_strategy", 0);
  options.unshard_mode = (fsdp_unshard_mode)key_or(words, "unshard_mode", 0);
  options.view_kind = (fsdp_view_kind)key_or(words, "view_kind", 0);
  options.grad_dtype = (fsdp_dtype)key_or(words, "grad_dtype", 0);
  options.reduce_dtype = (fsdp_dtype)key_or(words, "reduce_dtype", 0);
  options.grad_op = (fsdp_grad_op)key_or(words, "grad_op", 0);
  options.reduce_policy = (fsdp_reduce_policy)key_or(words, "reduce_policy", 0);
  options.grad_factor = key_number(words, "grad_factor");
  options.optimizer = (fsdp_optimizer)key_or(words, "optimizer", 0);
  options.max_pending_groups = (uint32_t)key_or(words, "max_pending_groups", 0);
  options.max_pending_bytes = (uint64_t)key_or(words, "max_pending_bytes", 0);
  options.prefetch_depth = (uint32_t)key_or(words, "prefetch_depth", 0);
  options.main_storage = (fsdp_main_storage)key_or(words, "main_storage", 0);
  options.rounding_seed = (uint64_t)key_or(words, "rounding_seed", 0);
  options.matrix_bytes = (uint64_t)key_or(words, "matrix_bytes", 0);
  fsdp_model *model = NULL;
  const fsdp_status status = fsdp_create_model(state->context, &options, &model);
  bind_name(state, word(words, 1), 'm', model);
  return status;
}

fsdp_status do_create_group(rank_state *state, const line *words) {
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
  options.flags = (uint32_t)key_or(words, "flags", 0);
  options.strategy = (fsdp_strategy)key_or(words, "strategy", 0);
  options.grad_dtype = (fsdp_dtype)key_or(words, "grad_dtype", 0);
  options.reduce_dtype = (fsdp_dtype)key_or(words, "reduce_dtype", 0);
  options.main_storage = (fsdp_main_storage)key_or(words, "main_storage", 0);
  options.backward_weights = (fsdp_backward_weights)key_or(words, "backward_weights", 0);
  if (find_key(words, "mesh")) options.mesh = find_name(state, find_key(words, "mesh"), 's')->handle;
  options.grad_op = (fsdp_grad_op)key_or(words, "grad_op", 0);
  options.outer_strategy = (fsdp_outer_strategy)key_or(words, "outer_strategy", 0);
  if (find_key(words, "grad_factor")) options.grad_factor = strtod(find_key(words, "grad_factor"), NULL);
  fsdp_param params[MOST_PARAMS];
  for (uint64_t p = 0; p < state->declared_count; ++p) {
    const declared_param *from = &state->declared[p];
    params[p] = (fsdp_param){.struct_size = sizeof *params, .name = from->name, .shape = from->shape,
                             .dimension_count = from->dimension_count, .dtype = from->dtype, .flags = from->flags,
                             .lr_scale = from->lr_scale, .quantization = from->quantization,
                             .missing_grad = from->missing_grad, .row_dimensions = from->row_dimensions,
                             .piece = from->piece, .optimizer = from->optimizer,
                             .matrix = from->matrix,
                             .matrix_splits = from->split_count ? from->splits : NULL,
                             .matrix_split_count = from->split_count};
  }
  fsdp_group *group = NULL;
  const fsdp_status status = fsdp_create_group(handle(state, words, 1, 'm'), word(words, 2), params,
                                               state->declared_count, sizeof *params, &options, &group);
  /* If a group has this name already, a call that fails leaves the name with that group. */
  if (status == FSDP_OK || !find_name(state, word(words, 2), 'g')) {
    named *entry = bind_name(state, word(words, 2), 'g', group);
    memcpy(entry->params, state->declared, sizeof entry->params);
    entry->param_count = state->declared_count;
  }
  state->declared_count = 0;
  return status;
}

fsdp_status do_set_schedule(rank_state *state, const line *words) {
  fsdp_schedule_options options = FSDP_SCHEDULE_OPTIONS_INIT;
  options.held_groups = (uint32_t)key_or(words, "held_groups", 0);
  if (state->visit_count > 0) {
    options.visits = state->visits;
    options.visit_count = state->visit_count;
    options.visit_stride = sizeof *state->visits;
  }
  state->visit_count = 0;
  return fsdp_set_schedule(handle(state, words, 1, 'm'), (fsdp_schedule_kind)integer(words, 2), &options);
}

fsdp_status do_find_group(rank_state *state, const line *words) {
  fsdp_group *group = NULL;
  return fsdp_find_group(handle(state, words, 1, 'm'), word(words, 2), &group);
}

/* ---- parameters and states ----------------------------------------------------------------------------------- */

fsdp_status do_load_param(rank_state *state, const line *words) {
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  void *data = make_array(state, words, 3, 0, elements, FSDP_FLOAT32);
  const fsdp_status status = fsdp_load_param(
      handle(state, words, 1, 'g'), index, data, (fsdp_dtype)key_or(words, "dtype", FSDP_FLOAT32),
      (uint64_t)key_or(words, "element_count", (int64_t)elements), (int32_t)key_or(words, "root", FSDP_EVERY_RANK),
      (uint32_t)key_or(words, "flags", 0));
  free(data);
  return status;
}

fsdp_status do_read_param(rank_state *state, const line *words) {
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  const fsdp_dtype dtype = (fsdp_dtype)key_or(words, "dtype", FSDP_FLOAT32);
  void *data = calloc(elements, sizeof(float));
  const fsdp_status status =
      fsdp_read_param(handle(state, words, 1, 'g'), index, data, dtype, elements, FSDP_EVERY_RANK, 0);
  if (status == FSDP_OK) give_crc(state, crc32_of(0, data, elements * fsdp_get_dtype_size(dtype)));
  free(data);
  return status;
}

fsdp_status do_load_state(rank_state *state, const line *words) {
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  void *data = make_array(state, words, 4, 0, elements, FSDP_FLOAT32);
  const fsdp_status status = fsdp_load_state(handle(state, words, 1, 'g'), index, word(words, 3), data, FSDP_FLOAT32,
                                             elements, FSDP_EVERY_RANK, 0);
  free(data);
  return status;
}

fsdp_status do_read_state(rank_state *state, const line *words) {
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  float *data = calloc(elements, sizeof *data);
  const fsdp_status status = fsdp_read_state(handle(state, words, 1, 'g'), index, word(words, 3), data, FSDP_FLOAT32,
                                             elements, FSDP_EVERY_RANK, 0);
  if (status == FSDP_OK) give_crc(state, crc32_of(0, data, elements * sizeof *data));
  free(data);
  return status;
}

fsdp_status do_load_grad(rank_state *state, const line *words) {
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  void *data = make_array(state, words, 3, 0, elements, FSDP_FLOAT32);
  const fsdp_status status = fsdp_load_grad(handle(state, words, 1, 'g'), index, data, FSDP_FLOAT32, elements,
                                            (int32_t)key_or(words, "root", FSDP_EVERY_RANK), 0);
  free(data);
  return status;
}

fsdp_status do_read_grad(rank_state *state, const line *words) {
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  const fsdp_dtype dtype = (fsdp_dtype)key_or(words, "dtype", FSDP_FLOAT32);
  void *data = calloc(elements, sizeof(float));
  const fsdp_status status =
      fsdp_read_grad(handle(state, words, 1, 'g'), index, data, dtype, elements, FSDP_EVERY_RANK, 0);
  if (status == FSDP_OK) give_crc(state, crc32_of(0, data, elements * fsdp_get_dtype_size(dtype)));
  free(data);
  return status;
}

fsdp_status do_set_param_trainable(rank_state *state, const line *words) {
  const int32_t trainable = (int32_t)integer(words, 3);
  return fsdp_set_param_trainable(handle(state, words, 1, 'g'), (uint64_t)integer(words, 2), trainable);
}

fsdp_status do_set_param_lr_scale(rank_state *state, const line *words) {
  return fsdp_set_param_lr_scale(handle(state, words, 1, 'g'), (uint64_t)integer(words, 2), number(words, 3));
}
