/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank of a job with the weights that weights.py writes. usage: checkpoint_rank HOW FROM SAVE VALUES. It loads
 * weights from FROM and saves them to SAVE; rank 0 writes all values to the file VALUES. HOW is "load" for the weights
 * of a checkpoint, or "weights" for files of any library. "train" loads a checkpoint and then makes a step of AdamW;
 * each parameter's values are followed by its states.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp.h"

enum { LAYERS = 2, WIDTH = 24, LARGEST = 90 * WIDTH };

struct declared {
  const char *name;
  uint64_t shape[2];
  uint32_t dimensions;
};
static const struct declared all[] = {{"embed", {90, WIDTH}, 2}, {"norm", {WIDTH}, 1},    {"q.0", {WIDTH, 40}, 2},
                                      {"k.0", {WIDTH, 16}, 2},   {"v.0", {WIDTH, 16}, 2}, {"up.0", {60, WIDTH}, 2},
                                      {"q.1", {WIDTH, 40}, 2},   {"k.1", {WIDTH, 16}, 2}, {"v.1", {WIDTH, 16}, 2},
                                      {"up.1", {60, WIDTH}, 2}};
enum { COUNT = sizeof all / sizeof *all };

static void check(fsdp_status status) {
  fsdp_error error = FSDP_ERROR_INIT;
  if (status == FSDP_OK) return;
  fsdp_get_last_error(NULL, &error);
  fprintf(stderr, "%s: %s\n", fsdp_get_status_name(status), error.message);
  exit(1);
}

static fsdp_group *declare(fsdp_model *model) {
  fsdp_param params[COUNT];
  fsdp_group *group = NULL;
  for (int i = 0; i < COUNT; ++i) {
    params[i] = (fsdp_param)FSDP_PARAM_INIT;
    params[i].name = all[i].name, params[i].shape = all[i].shape, params[i].dimension_count = all[i].dimensions;
  }
  check(fsdp_create_group(model, "all", FSDP_ARRAY(params), NULL, &group));
  return group;
}

static uint64_t count_of(uint64_t index) {
  return all[index].shape[0] * (all[index].dimensions == 2 ? all[index].shape[1] : 1);
}

static void take_weights(fsdp_model *model, const char *how, const char *from) {
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  if (strcmp(how, "weights") == 0) {
    check(fsdp_load_weights(model, from, NULL, 0, sizeof(fsdp_rename), &options, NULL));
  } else {
    options.flags = FSDP_LOAD_WEIGHTS_ONLY;
    check(fsdp_load(model, from, &options, NULL));
  }
  check(fsdp_publish_weights(model, NULL));
}

static void train(fsdp_model *model, fsdp_group *group) {
  fsdp_tensor grads[COUNT];
  int32_t accumulate[COUNT];
  for (int i = 0; i < COUNT; ++i) grads[i] = (fsdp_tensor)FSDP_TENSOR_INIT;
  check(fsdp_acquire_grads(group, 0, NULL, FSDP_ARRAY(grads), accumulate));
  for (uint64_t i = 0; i < COUNT; ++i)
    for (uint64_t e = 0; e < count_of(i); ++e) ((float *)grads[i].data)[e] = (float)(e % 31 + i) / 16.0f - 1.0f;
  check(fsdp_reduce_grad(group, FSDP_LAST, NULL));
  check(fsdp_finish_grads(model, 1.0, 0, NULL));
  check(fsdp_step_adamw(model, 0.01, NULL, NULL));
}

static void write_values(fsdp_group *group, int with_states, FILE *file) {
  static float values[LARGEST];
  static const char *const states[] = {"exp_avg", "exp_avg_sq"};
  for (uint64_t i = 0; i < COUNT; ++i) {
    check(fsdp_read_param(group, i, values, FSDP_FLOAT32, count_of(i), FSDP_EVERY_RANK, 0));
    if (file) fwrite(values, sizeof *values, count_of(i), file);
    for (int s = 0; with_states && s < 2; ++s) {
      check(fsdp_read_state(group, i, states[s], values, FSDP_FLOAT32, count_of(i), FSDP_EVERY_RANK, 0));
      if (file) fwrite(values, sizeof *values, count_of(i), file);
    }
  }
}

int main(int argc, char **argv) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  uint32_t rank = 0;
  if (argc != 5) return fprintf(stderr, "usage: checkpoint_rank load|train|weights FROM SAVE VALUES\n"), 2;
  const int trains = strcmp(argv[1], "train") == 0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_create_model(context, NULL, &model));
  fsdp_group *group = declare(model);
  check(fsdp_seal_model(model));
  take_weights(model, argv[1], argv[2]);
  if (trains) train(model, group);
  FILE *file = rank == 0 ? fopen(argv[4], "wb") : NULL;
  if (rank == 0 && !file) return perror(argv[4]), 1;
  write_values(group, trains, file);
  if (file && fclose(file) != 0) return perror(argv[4]), 1;
  fsdp_save_options saved = FSDP_SAVE_OPTIONS_INIT;
  saved.step = 2;
  check(fsdp_save(model, argv[3], &saved));
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  return 0;
}
