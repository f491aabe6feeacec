/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank of a job with the weights that weights.py writes: usage: checkpoint_rank FROM SAVE VALUES. It loads the
 * weights of the checkpoint FROM and saves them to SAVE; rank 0 writes all values to the file VALUES.
 */
#include <stdio.h>
#include <stdlib.h>

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

static void write_values(fsdp_group *group, uint32_t rank, const char *path) {
  static float values[LARGEST];
  FILE *file = rank == 0 ? fopen(path, "wb") : NULL;
  for (uint64_t i = 0; i < COUNT; ++i) {
    const uint64_t count = all[i].shape[0] * (all[i].dimensions == 2 ? all[i].shape[1] : 1);
    check(fsdp_read_param(group, i, values, FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
    if (file) fwrite(values, sizeof *values, count, file);
  }
  if (file) fclose(file);
}

int main(int argc, char **argv) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  uint32_t rank = 0;
  if (argc != 4) return fprintf(stderr, "usage: checkpoint_rank FROM SAVE VALUES\n"), 2;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_create_model(context, NULL, &model));
  fsdp_group *group = declare(model);
  check(fsdp_seal_model(model));
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags = FSDP_LOAD_WEIGHTS_ONLY;
  check(fsdp_load(model, argv[1], &options, NULL));
  check(fsdp_publish_weights(model, NULL));
  write_values(group, rank, argv[3]);
  fsdp_save_options saved = FSDP_SAVE_OPTIONS_INIT;
  saved.step = 2;
  check(fsdp_save(model, argv[2], &saved));
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  return 0;
}
