/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of a step. */
#include <stdlib.h>
#include <string.h>

#include "rank.h"

/* ---- gathers and gradients ----------------------------------------------------------------------------------- */

fsdp_status do_unshard(rank_state *state, const line *words) {
  fsdp_group *group = handle(state, words, 1, 'g');
  const fsdp_phase phase = (fsdp_phase)integer(words, 2);
  if (!find_key(words, "piece")) return fsdp_unshard(group, phase, 0, NULL);
  return fsdp_unshard_piece(group, (uint32_t)key_or(words, "piece", 0), phase, 0, NULL);
}
fsdp_status do_reshard(rank_state *state, const line *words) {
  fsdp_group *group = handle(state, words, 1, 'g');
  const fsdp_phase phase = (fsdp_phase)integer(words, 2);
  if (!find_key(words, "piece")) return fsdp_reshard(group, phase, 0, NULL);
  return fsdp_reshard_piece(group, (uint32_t)key_or(words, "piece", 0), phase, 0, NULL);
}
fsdp_status do_prefetch(rank_state *state, const line *words) {
  return fsdp_prefetch(handle(state, words, 1, 'g'), (fsdp_phase)integer(words, 2), 0, NULL);
}
fsdp_status do_restore_view(rank_state *state, const line *words) {
  return fsdp_restore_view(handle(state, words, 1, 'g'));
}

fsdp_status do_get_param(rank_state *state, const line *words) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  const fsdp_status status = fsdp_get_param(handle(state, words, 1, 'g'), (uint64_t)integer(words, 2),
                                            (fsdp_phase)integer(words, 3), &view);
  if (status == FSDP_OK) give_crc(state, crc32_of(0, view.data, view.element_count * view.element_size));
  return status;
}

fsdp_status do_get_params(rank_state *state, const line *words) {
  const named *group = find_name(state, word(words, 1), 'g');
  fsdp_tensor views[MOST_PARAMS] = {FSDP_TENSOR_INIT};
  const fsdp_status status =
      fsdp_get_params(group->handle, (fsdp_phase)integer(words, 2), views, group->param_count, sizeof *views);
  uint32_t crc = 0;
  for (uint64_t p = 0; status == FSDP_OK && p < group->param_count; ++p)
    crc = crc32_of(crc, views[p].data, views[p].element_count * views[p].element_size);
  give_crc(state, crc);
  return status;
}

fsdp_status do_get_plane(rank_state *state, const line *words) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  const fsdp_status status = fsdp_get_plane(handle(state, words, 1, 'g'), (uint64_t)integer(words, 2),
                                            (fsdp_phase)integer(words, 3), (fsdp_plane)integer(words, 4), &view);
  if (status == FSDP_OK) give_crc(state, crc32_of(0, view.data, view.element_count * view.element_size));
  return status;
}

fsdp_status do_swizzle_scales(rank_state *state, const line *words) {
  fsdp_group *group = handle(state, words, 1, 'g');
  const uint64_t index = (uint64_t)integer(words, 2);
  const fsdp_phase phase = (fsdp_phase)integer(words, 3);
  const fsdp_plane plane = (fsdp_plane)integer(words, 4);
  uint64_t size_bytes = 0;
  fsdp_status status = fsdp_swizzle_scales(group, index, phase, plane, NULL, &size_bytes, NULL);
  if (status != FSDP_OK) return status;
  void *data = malloc(size_bytes);
  if (!data) abort();
  status = fsdp_swizzle_scales(group, index, phase, plane, data, &size_bytes, NULL);
  if (status == FSDP_OK) give_crc(state, crc32_of(0, data, size_bytes));
  free(data);
  return status;
}

static void write_grad(const fsdp_tensor *grad, const void *data, bool adds) {
  if (!adds) memcpy(grad->data, data, grad->element_count * grad->element_size);
  for (uint64_t i = 0; adds && i < grad->element_count; ++i) ((float *)grad->data)[i] += ((const float *)data)[i];
}

fsdp_status do_acquire_grad(rank_state *state, const line *words) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  const fsdp_status status =
      fsdp_acquire_grad(handle(state, words, 1, 'g'), (uint64_t)integer(words, 2), 0, NULL, &grad, &accumulate);
  if (status != FSDP_OK) return status;
  void *data = make_array(state, words, 3, 0, grad.element_count, grad.dtype);
  write_grad(&grad, data, accumulate != 0);
  free(data);
  return status;
}

fsdp_status do_acquire_grads(rank_state *state, const line *words) {
  const named *group = find_name(state, word(words, 1), 'g');
  fsdp_tensor grads[MOST_PARAMS] = {FSDP_TENSOR_INIT};
  const fsdp_status status =
      fsdp_acquire_grads(group->handle, FSDP_GRAD_ZEROED, NULL, grads, group->param_count, sizeof *grads, NULL);
  for (uint64_t p = 0; status == FSDP_OK && p < group->param_count; ++p) {
    if (!grads[p].data) continue;
    void *data = make_array(state, words, 2, (int64_t)p, grads[p].element_count, grads[p].dtype);
    write_grad(&grads[p], data, true);
    free(data);
  }
  return status;
}

fsdp_status do_put_grad(rank_state *state, const line *words) {
  fsdp_group *group = handle(state, words, 1, 'g');
  const uint64_t index = (uint64_t)integer(words, 2), elements = element_count(state, words, index);
  if (strcmp(word(words, 3), "none") == 0) return fsdp_put_grad(group, index, NULL, FSDP_FLOAT32, 0, 0, NULL);
  const fsdp_dtype dtype = (fsdp_dtype)key_or(words, "dtype", FSDP_FLOAT32);
  void *data = make_array(state, words, 3, 0, elements, dtype);
  const fsdp_status status = fsdp_put_grad(group, index, data, dtype, elements, 0, NULL);
  free(data);
  return status;
}

fsdp_status do_complete_grad(rank_state *state, const line *words) {
  return fsdp_complete_grad(handle(state, words, 1, 'g'), (uint64_t)integer(words, 2), 0, NULL);
}
fsdp_status do_reduce_grad(rank_state *state, const line *words) {
  return fsdp_reduce_grad(handle(state, words, 1, 'g'), (uint32_t)key_or(words, "flags", 0), NULL);
}
fsdp_status do_finish_grads(rank_state *state, const line *words) {
  return fsdp_finish_grads(handle(state, words, 1, 'm'), number(words, 2), (uint32_t)key_or(words, "flags", 0), NULL);
}
fsdp_status do_scale_grads(rank_state *state, const line *words) {
  return fsdp_scale_grads(handle(state, words, 1, 'm'), number(words, 2), NULL);
}

fsdp_status do_get_grad_norm(rank_state *state, const line *words) {
  double norm = 0;
  const fsdp_status status = fsdp_get_grad_norm(handle(state, words, 1, 'm'), NULL, NULL, &norm);
  give_double(state, norm);
  return status;
}
static fsdp_status get_param_norms(rank_state *state, const line *words,
                                   fsdp_status (*get)(fsdp_model *, fsdp_stream, double *, uint64_t)) {
  fsdp_model *const model = handle(state, words, 1, 'm');
  double norms[MOST_NAMES * MOST_PARAMS] = {0};
  fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  const fsdp_status known = fsdp_get_model_info(model, &info);
  if (known != FSDP_OK) return known;
  const fsdp_status status = get(model, NULL, norms, info.param_count);
  give_crc(state, crc32_of(0, norms, info.param_count * sizeof *norms));
  return status;
}
fsdp_status do_get_param_grad_norms(rank_state *state, const line *words) {
  return get_param_norms(state, words, fsdp_get_param_grad_norms);
}
fsdp_status do_get_param_weight_norms(rank_state *state, const line *words) {
  return get_param_norms(state, words, fsdp_get_param_weight_norms);
}
fsdp_status do_count_zero_grads(rank_state *state, const line *words) {
  uint64_t zeros = 0;
  const fsdp_status status = fsdp_count_zero_grads(handle(state, words, 1, 'm'), NULL, &zeros);
  give_integer(state, zeros);
  return status;
}
fsdp_status do_clip_grads(rank_state *state, const line *words) {
  double norm = 0;
  const fsdp_status status = fsdp_clip_grads(handle(state, words, 1, 'm'), NULL, number(words, 2), NULL, &norm);
  give_double(state, norm);
  return status;
}
fsdp_status do_check_grads(rank_state *state, const line *words) {
  int32_t found = 0;
  const fsdp_status status = fsdp_check_grads(handle(state, words, 1, 'm'), NULL, &found, NULL);
  give_integer(state, (uint64_t)found);
  return status;
}

/* ---- steps --------------------------------------------------------------------------------------------------- */

static fsdp_adamw_options adamw_options(const line *words) {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.beta1 = key_number(words, "beta1");
  options.beta2 = key_number(words, "beta2");
  options.epsilon = key_number(words, "epsilon");
  options.weight_decay = key_number(words, "weight_decay");
  options.step = (uint64_t)key_or(words, "step", 0);
  options.flags = (uint32_t)key_or(words, "flags", 0);
  return options;
}
fsdp_status do_step_adamw(rank_state *state, const line *words) {
  const fsdp_adamw_options options = adamw_options(words);
  return fsdp_step_adamw(handle(state, words, 1, 'm'), number(words, 2), &options, NULL);
}

fsdp_status do_apply_grads(rank_state *state, const line *words) {
  const fsdp_adamw_options options = adamw_options(words);
  fsdp_grad grads[MOST_NAMES * MOST_PARAMS];
  uint64_t count = 0;
  for (size_t n = 0; n < state->name_count; ++n)
    for (uint64_t p = 0; p < state->names[n].param_count; ++p) {
      const declared_param *declared = &state->names[n].params[p];
      if (declared->flags & FSDP_PARAM_FROZEN) continue;
      grads[count] = (fsdp_grad){make_array(state, words, 4, (int64_t)count, declared->element_count, FSDP_FLOAT32),
                                 declared->element_count, FSDP_FLOAT32, 0};
      ++count;
    }
  double norm = 0;
  const fsdp_status status = fsdp_apply_grads(handle(state, words, 1, 'm'), grads, count, sizeof *grads,
                                              number(words, 2), number(words, 3), &options, NULL, &norm);
  for (uint64_t g = 0; g < count; ++g) free((void *)grads[g].data);
  give_double(state, norm);
  return status;
}

/* ---- a caller's own optimizer -------------------------------------------------------------------------------- */

/* Rounds the elements of the array that lie in one shard into its main weights. */
static fsdp_status round_shard(rank_state *state, const line *words, const fsdp_shard *shard) {
  float *values = make_array(state, words, 5, 0, shard->element_offset + shard->element_count, FSDP_FLOAT32);
  const fsdp_status status =
      fsdp_round_stochastic(shard->group, shard->param_index, shard->element_offset, values + shard->element_offset,
                            shard->main_weight, shard->element_count, (uint64_t)integer(words, 4), NULL);
  free(values);
  return status;
}

fsdp_status do_round_stochastic(rank_state *state, const line *words) {
  const fsdp_model *model = handle(state, words, 1, 'm');
  const fsdp_group *group = handle(state, words, 2, 'g');
  uint64_t count = 0;
  fsdp_status status = fsdp_get_shard_count(model, &count);
  for (uint64_t s = 0; status == FSDP_OK && s < count; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    status = fsdp_get_shard(model, s, &shard);
    if (status == FSDP_OK && shard.group == group && shard.param_index == (uint64_t)integer(words, 3))
      status = round_shard(state, words, &shard);
  }
  return status;
}

/* ---- whole matrices ------------------------------------------------------------------------------------------ */

fsdp_status do_collect_matrices(rank_state *state, const line *words) {
  fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
  options.source = find_key(words, "source");
  options.target = find_key(words, "target");
  options.dtype = (fsdp_dtype)key_or(words, "dtype", 0);
  return fsdp_collect_matrices(handle(state, words, 1, 'm'), &options, NULL);
}

/* Powers of two: the numbers stay exact in bfloat16. */
static void scale_number(void *at, fsdp_dtype dtype, float factor) {
  uint32_t bits = 0;
  float number = 0;
  if (dtype == FSDP_BFLOAT16) bits = (uint32_t)*(uint16_t *)at << 16;
  else memcpy(&bits, at, sizeof bits);
  memcpy(&number, &bits, sizeof number);
  number *= factor;
  memcpy(&bits, &number, sizeof bits);
  if (dtype == FSDP_BFLOAT16) *(uint16_t *)at = (uint16_t)(bits >> 16);
  else memcpy(at, &bits, sizeof bits);
}

static void change_matrix(char *data, const fsdp_matrix *matrix, uint64_t batch) {
  const uint64_t size = fsdp_get_dtype_size(matrix->dtype), row_bytes = matrix->columns * size;
  const float factor = (float)(1 << (matrix->param_index + 2 * matrix->split_index + batch) % 4);
  char *before = malloc(matrix->rows * row_bytes);
  if (!before) abort();
  memcpy(before, data, matrix->rows * row_bytes);
  for (uint64_t row = 0; row < matrix->rows; ++row)
    memcpy(data + row * row_bytes, before + (matrix->rows - 1 - row) * row_bytes, row_bytes);
  for (uint64_t i = 0; i < matrix->rows * matrix->columns; ++i) scale_number(data + i * size, matrix->dtype, factor);
  free(before);
}

fsdp_status do_change_matrices(rank_state *state, const line *words) {
  fsdp_model *model = handle(state, words, 1, 'm');
  fsdp_status status = do_collect_matrices(state, words);
  fsdp_matrix matrix = FSDP_MATRIX_INIT;
  while (status == FSDP_OK && (status = fsdp_next_matrix(model, NULL, &matrix)) == FSDP_OK && matrix.data)
    for (uint64_t m = 0; m < matrix.count; ++m)
      change_matrix((char *)matrix.data + m * matrix.stride_bytes, &matrix, matrix.batch_index + m);
  return status == FSDP_OK ? fsdp_return_matrices(model, NULL) : status;
}
