/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard_and_gather: a group of two parameters is cut over the ranks, and given back whole to be read.
 *
 *   fsdp-run -n 2 shard_and_gather
 */
#include "check.h"

enum { ROWS = 64, COLUMNS = 32, COUNT = ROWS * COLUMNS };

/* The layout is arithmetic: every rank knows what every rank owns, without asking. */
static void print_owners(const fsdp_group *group, uint32_t world_size) {
  static const char *const names[] = {"weight", "bias"};
  for (uint64_t param = 0; param < 2; ++param) {
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      check(fsdp_get_chunk(group, param, rank, &chunk));
      printf("rank %u owns %d of %d rows of %s\n", rank, (int)chunk.row_count, ROWS, names[param]);
    }
  }
}

int main(void) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *group = NULL;
  uint32_t rank = 0, world_size = 0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &world_size));

  /* Declare. A matrix is cut between rows; COMPUTE weights are fp32 unless the descriptor says otherwise. */
  const uint64_t weight_shape[] = {ROWS, COLUMNS}, bias_shape[] = {ROWS};
  fsdp_param params[2] = {FSDP_PARAM_INIT, FSDP_PARAM_INIT};
  params[0].name = "weight", params[0].shape = weight_shape, params[0].dimension_count = 2;
  params[1].name = "bias", params[1].shape = bias_shape, params[1].dimension_count = 1;
  check(fsdp_create_model(context, NULL, &model));
  check(fsdp_create_group(model, "layer", params, 2, sizeof *params, NULL, &group));
  check(fsdp_seal_model(model)); /* compares all ranks, then allocates all memory there will ever be */
  if (rank == 0) print_owners(group, world_size);

  /* Load: only rank 0 has the data, as if it had read a file; each rank keeps its own part. */
  float data[COUNT];
  for (int i = 0; i < COUNT; ++i) data[i] = (float)i;
  check(fsdp_load_param(group, 0, rank == 0 ? data : NULL, FSDP_FLOAT32, COUNT, 0, 0));
  check(fsdp_load_param(group, 1, rank == 0 ? data : NULL, FSDP_FLOAT32, ROWS, 0, 0));
  check(fsdp_publish_weights(model, NULL)); /* closes the update window: from here on weights are for reading */

  /* Gather, read, give back. */
  fsdp_tensor weight = FSDP_TENSOR_INIT;
  check(fsdp_unshard(group, FSDP_EVAL, 0, NULL));
  check(fsdp_get_param(group, 0, FSDP_EVAL, &weight));
  int wrong = 0;
  for (int i = 0; i < COUNT; ++i) wrong += ((const float *)weight.data)[i] != (float)i;
  check(fsdp_reshard(group, FSDP_EVAL, 0, NULL));
  if (wrong) fprintf(stderr, "rank %u: %d elements differ\n", rank, wrong);

  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  if (rank == 0 && !wrong) printf("shard_and_gather: ok, the whole weight is readable on every rank\n");
  return wrong != 0;
}
