/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"
#include "../train_gpt/random.h"

/* A mesh of `count` ranks: `first`, `first` + `step`, and so on. Ranks of one half are summed as a block. The blocks
 * are then added one by one, as a single rank adds its micro-batches, so the bits are the same. */
static fsdp_mesh *create_mesh(const struct model *model, int first, int step, int count) {
  uint32_t ranks[MOST_RANKS];
  fsdp_mesh *mesh = NULL;
  fsdp_mesh_options options = FSDP_MESH_OPTIONS_INIT;
  for (int i = 0; i < count; ++i) ranks[i] = (uint32_t)(first + i * step);
  options.ranks = ranks, options.rank_count = (uint32_t)count;
  options.reduction_block_size = (uint32_t)(count / model->halves);
  check(fsdp_create_mesh(model->context, &options, &mesh));
  return mesh;
}

static void create_groups(struct model *model, int block, const fsdp_group_options *shared_by_some) {
  char names[8][64];
  const char *const formats[] = {"blocks.%d.dense",        "blocks.%d.dense.weight", "blocks.%d.dense.bias",
                                 "blocks.%d.dense.router", "blocks.%d.experts",      "blocks.%d.experts.up",
                                 "blocks.%d.experts.down"};
  for (int i = 0; i < 7; ++i) snprintf(names[i], sizeof names[i], formats[i], block);
  const fsdp_param dense[] = {FSDP_PARAM(names[1], WIDTH, WIDTH), FSDP_PARAM(names[2], WIDTH),
                              FSDP_PARAM(names[3], EXPERTS, WIDTH)};
  check(fsdp_create_group(model->handle, names[0], dense, 3, sizeof *dense, NULL, &model->dense[block]));

  /* This rank's experts are a box of the stack of all experts, and checkpoints have the whole stack. */
  const uint64_t experts = (uint64_t)model->experts, offset[] = {(uint64_t)model->first_expert, 0, 0};
  const uint64_t up[] = {EXPERTS, HIDDEN, WIDTH}, down[] = {EXPERTS, WIDTH, HIDDEN};
  fsdp_param stacks[] = {FSDP_PARAM(names[5], experts, HIDDEN, WIDTH), FSDP_PARAM(names[6], experts, WIDTH, HIDDEN)};
  stacks[EXPERT_UP].global_shape = up, stacks[EXPERT_DOWN].global_shape = down;
  for (int i = 0; i < 2; ++i) stacks[i].global_offset = offset, stacks[i].row_dimensions = 2;
  check(fsdp_create_group(model->handle, names[4], stacks, 2, sizeof *stacks, shared_by_some, &model->expert[block]));
}

static void declare(struct model *model, const fsdp_group_options *shared_by_some) {
  fsdp_group_options no_backward = FSDP_GROUP_OPTIONS_INIT;
  no_backward.backward_weights = FSDP_BACKWARD_WEIGHTS_NONE; /* an embedding's gradient needs no weights */
  const fsdp_param embedding = FSDP_PARAM("embedding", VOCABULARY, WIDTH), head = FSDP_PARAM("head", VOCABULARY, WIDTH);
  check(
      fsdp_create_group(model->handle, "embedding", &embedding, 1, sizeof embedding, &no_backward, &model->embedding));
  for (int block = 0; block < BLOCKS; ++block) create_groups(model, block, shared_by_some);
  check(fsdp_create_group(model->handle, "head", &head, 1, sizeof head, NULL, &model->head));
  check(fsdp_set_schedule(model->handle, FSDP_SCHEDULE_INTERLEAVED, NULL));
  check(fsdp_seal_model(model->handle));
}

/* With 4 ranks and expert-parallel 2, ranks 0 and 2 share one half of the experts, ranks 1 and 3 the other half. */
void model_create(struct model *model, fsdp_context *context, int expert_parallel) {
  uint32_t rank = 0, ranks = 0;
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  fsdp_group_options shared_by_some = FSDP_GROUP_OPTIONS_INIT;
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &ranks));
  *model = (struct model){.context = context, .rank = (int)rank, .ranks = (int)ranks};
  model->expert_parallel = expert_parallel;
  model->experts = EXPERTS / expert_parallel;
  model->first_expert = model->rank % expert_parallel * model->experts;
  model->halves = model->ranks == MOST_RANKS ? 2 : 1;
  model->half = model->rank / PARTS % model->halves;
  fsdp_mesh *all = create_mesh(model, 0, 1, model->ranks);
  fsdp_mesh *some = create_mesh(model, model->rank % expert_parallel, expert_parallel, model->ranks / expert_parallel);
  options.mesh = all, options.reduce_policy = FSDP_REDUCE_POLICY_EACH;
  shared_by_some.mesh = some;
  check(fsdp_create_model(context, &options, &model->handle));
  declare(model, &shared_by_some);
  fsdp_destroy_mesh(all);
  fsdp_destroy_mesh(some);
}

void model_destroy(struct model *model) { fsdp_destroy_model(model->handle); }

const float *model_weights(fsdp_group *group, uint64_t param, fsdp_phase phase) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  check(fsdp_get_param(group, param, phase, &tensor));
  return tensor.data;
}

/* Each micro-batch is reduced, so there is never a gradient to add to. */
float *model_grad(fsdp_group *group, uint64_t param) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  check(fsdp_acquire_grad(group, param, 0, NULL, &tensor, &accumulate));
  return tensor.data;
}

/* -- all parameters, one after the other ------------------------------------------------------------------------- */

struct tensor {
  fsdp_group *group;
  uint64_t index, count; /* elements of it that this rank has */
  uint64_t parts;        /* 1, or the number of experts of which the tensor is a stack */
  double scale;          /* of initial weights */
};

enum { TENSORS = 2 + 5 * BLOCKS };

static void list_tensors(const struct model *model, struct tensor tensors[TENSORS]) {
  const uint64_t experts = (uint64_t)model->experts;
  const double width = 1.0 / sqrt(WIDTH), hidden = 1.0 / sqrt(HIDDEN);
  int n = 0;
  tensors[n++] = (struct tensor){model->embedding, 0, VOCABULARY * WIDTH, 1, 1.0};
  for (int b = 0; b < BLOCKS; ++b) {
    tensors[n++] = (struct tensor){model->dense[b], DENSE_WEIGHT, WIDTH * WIDTH, 1, width};
    tensors[n++] = (struct tensor){model->dense[b], DENSE_BIAS, WIDTH, 1, 0.0};
    tensors[n++] = (struct tensor){model->dense[b], DENSE_ROUTER, EXPERTS * WIDTH, 1, width};
    tensors[n++] = (struct tensor){model->expert[b], EXPERT_UP, experts * HIDDEN * WIDTH, EXPERTS, width};
    tensors[n++] = (struct tensor){model->expert[b], EXPERT_DOWN, experts * HIDDEN * WIDTH, EXPERTS, hidden};
  }
  tensors[n] = (struct tensor){model->head, 0, VOCABULARY * WIDTH, 1, width};
}

static float *allocate_floats(uint64_t count) {
  float *values = malloc(count * sizeof *values);
  if (!values) exit(1);
  return values;
}

/* The random number of an element depends on its place in the whole tensor, not on the rank. */
void model_load_initial(struct model *model) {
  struct tensor tensors[TENSORS];
  list_tensors(model, tensors);
  for (int t = 0; t < TENSORS; ++t) {
    const struct tensor *tensor = &tensors[t];
    const uint64_t first = tensor->parts > 1 ? (uint64_t)model->first_expert * HIDDEN * WIDTH : 0;
    float *values = allocate_floats(tensor->count);
    for (uint64_t i = 0; i < tensor->count; ++i)
      values[i] = (float)(tensor->scale * (2.0 * random_uniform((uint64_t)t, first + i) - 1.0));
    check(fsdp_load_param(tensor->group, tensor->index, values, FSDP_FLOAT32, tensor->count, FSDP_EVERY_RANK, 0));
    free(values);
  }
  check(fsdp_publish_weights(model->handle, NULL));
}

/* FNV-1a (Fowler, Noll and Vo). */
static uint64_t hash_bytes(uint64_t hash, const void *data, size_t size) {
  const unsigned char *bytes = data;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

static const uint64_t hash_begin = 14695981039346656037u;

/* Hashes, of 32 bits, the parts of a tensor for which this rank is the first that has them. The others stay 0. */
static void hash_parts(const struct model *model, const struct tensor *tensor, double hashes[EXPERTS]) {
  float *values = allocate_floats(tensor->count);
  check(fsdp_read_param(tensor->group, tensor->index, values, FSDP_FLOAT32, tensor->count, FSDP_EVERY_RANK, 0));
  const int is_stack = tensor->parts > 1, parts = is_stack ? model->experts : 1;
  const int first = is_stack ? model->first_expert : 0;
  const uint64_t part = tensor->count / (uint64_t)parts;
  for (int i = 0; i < parts && model->rank < (is_stack ? model->expert_parallel : 1); ++i)
    hashes[first + i] = (uint32_t)hash_bytes(hash_begin, values + (uint64_t)i * part, part * sizeof(float));
  free(values);
}

uint64_t model_hash(struct model *model) {
  struct tensor tensors[TENSORS];
  double hashes[TENSORS][EXPERTS] = {{0.0}};
  list_tensors(model, tensors);
  for (int t = 0; t < TENSORS; ++t) hash_parts(model, &tensors[t], hashes[t]);
  check(fsdp_all_reduce_values(model->context, NULL, *hashes, TENSORS * EXPERTS, FSDP_VALUE_SUM));
  return hash_bytes(hash_begin, hashes, sizeof hashes);
}
