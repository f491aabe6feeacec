/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frozen_base: a frozen base that every rank keeps whole, and a small adapter (LoRA of rank 1) that is trained sharded.
 *
 *   fsdp-run -n 2 frozen_base
 *   fsdp-run -n 2 frozen_base DIR STEP    continues from DIR's newest checkpoint to that step, and saves it in DIR
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"

enum { SIZE = 8, COUNT = SIZE * SIZE, STEPS = 400 };

static float *view(fsdp_group *group, uint64_t param) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  check(fsdp_get_param(group, param, FSDP_BACKWARD, &tensor));
  return tensor.data; /* to be read only */
}

/* The loss is |base + up down^T - target|^2 / 2, where target = base + (1 .. 1)^T (1 .. 1) / 2. */
static float train(fsdp_model *model, fsdp_group *base, fsdp_group *adapter) {
  float loss = 0.0f, grads[2][SIZE] = {{0}};
  check(fsdp_unshard(adapter, FSDP_BACKWARD, 0, NULL)); /* the base is whole at all times: nothing to unshard */
  const float *b = view(base, 0), *up = view(adapter, 0), *down = view(adapter, 1);
  for (int i = 0; i < COUNT; ++i) {
    const float target = (float)i + 0.5f;
    const float difference = b[i] + up[i / SIZE] * down[i % SIZE] - target;
    loss += difference * difference / 2.0f;
    grads[0][i / SIZE] += difference * down[i % SIZE];
    grads[1][i % SIZE] += difference * up[i / SIZE];
  }
  for (uint64_t k = 0; k < 2; ++k) check(fsdp_put_grad(adapter, k, grads[k], FSDP_FLOAT32, SIZE, 0, NULL));
  check(fsdp_reshard(adapter, FSDP_BACKWARD, 0, NULL));
  check(fsdp_reduce_grad(adapter, FSDP_LAST, NULL));
  check(fsdp_finish_grads(model, 1.0, 0, NULL));
  check(fsdp_step_adamw(model, 0.02, NULL, NULL));
  return loss;
}

/* The first weights; or those of an earlier run, the frozen base among them, and AdamW's states. */
static uint64_t start(fsdp_model *model, fsdp_group *base, fsdp_group *adapter, const char *folder) {
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags = FSDP_LOAD_IF_ANY;
  if (folder) check(fsdp_load(model, folder, &options, &loaded));
  if (!loaded.name[0]) {
    float data[COUNT];
    for (int i = 0; i < COUNT; ++i) data[i] = (float)i;
    check(fsdp_load_param(base, 0, data, FSDP_FLOAT32, COUNT, FSDP_EVERY_RANK, 0));
    for (int i = 0; i < SIZE; ++i) data[i] = 1.0f;
    check(fsdp_load_param(adapter, 0, data, FSDP_FLOAT32, SIZE, FSDP_EVERY_RANK, 0)); /* down starts as zeros */
  }
  check(fsdp_publish_weights(model, NULL));
  return loaded.step;
}

int main(int argc, char **argv) {
  const char *folder = argc > 2 ? argv[1] : NULL;
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *base = NULL, *adapter = NULL;
  uint32_t rank = 0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));

  const uint64_t shape[] = {SIZE, SIZE};
  fsdp_param frozen = FSDP_PARAM_INIT, params[2] = {FSDP_PARAM_INIT, FSDP_PARAM_INIT};
  fsdp_group_options replicated = FSDP_GROUP_OPTIONS_INIT;
  frozen.name = "base", frozen.shape = shape, frozen.dimension_count = 2, frozen.flags = FSDP_PARAM_FROZEN;
  params[0].name = "up", params[0].shape = shape, params[0].dimension_count = 1;
  params[1].name = "down", params[1].shape = shape, params[1].dimension_count = 1;
  replicated.strategy = FSDP_STRATEGY_NO_SHARD;
  check(fsdp_create_model(context, NULL, &model));
  check(fsdp_create_group(model, "base", &frozen, 1, sizeof frozen, &replicated, &base));
  check(fsdp_create_group(model, "adapter", params, 2, sizeof *params, NULL, &adapter));
  check(fsdp_seal_model(model));

  uint64_t step = start(model, base, adapter, folder);
  const uint64_t end = folder ? strtoull(argv[2], NULL, 10) : STEPS;
  float loss = 0.0f;
  for (; step < end; ++step) loss = train(model, base, adapter);
  if (folder && end < STEPS) {
    check(fsdp_save(model, folder, NULL));
    check(fsdp_close_context(context));
    fsdp_destroy_model(model);
    fsdp_destroy_context(context);
    if (rank == 0) printf("frozen_base: saved after step %" PRIu64 "\n", end);
    return 0;
  }
  int wrong = !(loss < 1e-3f);
  const float *b = view(base, 0);
  for (int i = 0; i < COUNT; ++i) wrong += b[i] != (float)i;
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  if (wrong) return fprintf(stderr, "rank %u: loss %g, %d wrong\n", rank, loss, wrong), 1;
  if (rank == 0 && folder) printf("frozen_base: loss %.9g\n", (double)loss);
  if (rank == 0) printf("frozen_base: ok, the adapter has learned, the base is untouched\n");
  return 0;
}
