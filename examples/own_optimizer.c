/* SPDX-License-Identifier: Apache-2.0 */
/*
 * own_optimizer: SGD with momentum, written here, over the shards that this rank owns.
 *
 *   fsdp-run -n 2 own_optimizer
 *   fsdp-run -n 2 own_optimizer DIR STEP    continues from DIR's newest checkpoint to that step, and saves it in DIR
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"

enum { COUNT = 21, STEPS = 150 };

/* The loss is |w - target|^2 / 2 with target i at element i; each rank's part is off by an amount whose mean is 0. */
static void backward(fsdp_group *group, float offset) {
  fsdp_tensor weight = FSDP_TENSOR_INIT, grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0; /* stays 0 with one contribution a step */
  check(fsdp_unshard(group, FSDP_BACKWARD, 0, NULL));
  check(fsdp_get_param(group, 0, FSDP_BACKWARD, &weight));
  check(fsdp_acquire_grad(group, 0, 0, NULL, &grad, &accumulate));
  for (int i = 0; i < COUNT; ++i) ((float *)grad.data)[i] = ((const float *)weight.data)[i] - (float)i + offset;
  check(fsdp_reshard(group, FSDP_BACKWARD, 0, NULL));
  check(fsdp_reduce_grad(group, FSDP_LAST, NULL));
}

/* Inside the update window: main weights and main grads are plain fp32 arrays of this rank. */
static void step_momentum(fsdp_model *model, float lr) {
  uint64_t shard_count = 0;
  check(fsdp_get_shard_count(model, &shard_count));
  for (uint64_t s = 0; s < shard_count; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    fsdp_tensor state = FSDP_TENSOR_INIT;
    check(fsdp_get_shard(model, s, &shard));
    check(fsdp_get_shard_state(model, s, "momentum", &state));
    float *m = state.data, *weight = shard.main_weight;
    const float *grad = shard.main_grad;
    for (uint64_t i = 0; i < shard.element_count; ++i) {
      m[i] = 0.9f * m[i] + grad[i];
      weight[i] -= lr * m[i];
    }
  }
}

/* The number of steps that an earlier run has made and saved, momentum and all. */
static uint64_t go_on(fsdp_model *model, const char *folder) {
  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  options.flags = FSDP_LOAD_IF_ANY;
  check(fsdp_load(model, folder, &options, &loaded));
  return loaded.step;
}

int main(int argc, char **argv) {
  const char *folder = argc > 2 ? argv[1] : NULL;
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *group = NULL;
  uint32_t rank = 0, world_size = 0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &world_size));

  const uint64_t shape = COUNT;
  fsdp_param param = FSDP_PARAM_INIT;
  param.name = "weight", param.shape = &shape, param.dimension_count = 1;
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.optimizer = FSDP_OPTIMIZER_CALLER; /* no AdamW states; ours below, zeroed by the seal */
  check(fsdp_create_model(context, &options, &model));
  check(fsdp_add_optimizer_state(model, "momentum", FSDP_FLOAT32));
  check(fsdp_create_group(model, "layer", &param, 1, sizeof param, NULL, &group));
  check(fsdp_seal_model(model)); /* weights start as zeros */
  uint64_t step = folder ? go_on(model, folder) : 0;
  check(fsdp_publish_weights(model, NULL));

  const uint64_t end = folder ? strtoull(argv[2], NULL, 10) : STEPS;
  for (; step < end; ++step) {
    backward(group, (float)rank - (float)(world_size - 1) / 2.0f);
    check(fsdp_finish_grads(model, 1.0, 0, NULL)); /* opens the update window */
    step_momentum(model, 0.1f);
    check(fsdp_publish_weights(model, NULL)); /* closes it */
  }

  if (folder && end < STEPS) {
    check(fsdp_save(model, folder, NULL)); /* its number is that of the updates that were published */
    check(fsdp_close_context(context));
    fsdp_destroy_model(model);
    fsdp_destroy_context(context);
    if (rank == 0) printf("own_optimizer: saved after step %" PRIu64 "\n", end);
    return 0;
  }

  float result[COUNT], worst = 0.0f;
  check(fsdp_read_param(group, 0, result, FSDP_FLOAT32, COUNT, FSDP_EVERY_RANK, 0));
  for (int i = 0; i < COUNT; ++i) worst = fmaxf(worst, fabsf(result[i] - (float)i));
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  if (!(worst < 0.1f)) return fprintf(stderr, "rank %u: off by %g\n", rank, worst), 1;
  if (rank == 0 && folder) printf("own_optimizer: off by %.9g\n", (double)worst);
  if (rank == 0) printf("own_optimizer: ok, the target is reached with momentum\n");
  return 0;
}
