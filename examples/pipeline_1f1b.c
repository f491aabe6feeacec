/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipeline_1f1b: the forward pass of micro-batch n runs between the layers of the backward pass of micro-batch n - 1,
 * as one-forward-one-backward pipelines do. Both may hold the same group at once.
 *
 *   fsdp-run -n 2 pipeline_1f1b
 */
#include <math.h>

#include "check.h"

enum { LAYERS = 3, WIDTH = 10, MICROBATCHES = 4 };
static float x[2][LAYERS + 1][WIDTH]; /* each layer's input; two micro-batches are under way */

/* A layer multiplies by 1 + its weights, which are 0: every number here is an exact integer. */
static void forward(fsdp_group *group, int layer, int microbatch) {
  fsdp_tensor weight = FSDP_TENSOR_INIT;
  check(fsdp_get_param(group, 0, FSDP_FORWARD, &weight)); /* each direction has an address of its own */
  const float *w = weight.data, *in = x[microbatch % 2][layer];
  for (int i = 0; i < WIDTH; ++i) x[microbatch % 2][layer + 1][i] = in[i] * (1.0f + w[i]);
}

/* The loss adds up the last layer's output: the gradient of every layer's output is 1. */
static void backward(fsdp_group *group, int layer, int microbatch) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  check(fsdp_acquire_grad(group, 0, 0, NULL, &grad, &accumulate));
  float *g = grad.data;
  for (int i = 0; i < WIDTH; ++i) g[i] = (accumulate ? g[i] : 0.0f) + x[microbatch % 2][layer][i];
  check(fsdp_reduce_grad(group, microbatch + 1 == MICROBATCHES ? FSDP_LAST : 0, NULL));
}

/* Forward of micro-batch n upwards, backward of n - 1 downwards. In the middle both hold one group. */
static void sweep(fsdp_group **groups, int n) {
  for (int up = 0, down = LAYERS - 1; up < LAYERS; ++up, --down) {
    if (n < MICROBATCHES) check(fsdp_unshard(groups[up], FSDP_FORWARD, 0, NULL));
    if (n > 0) check(fsdp_unshard(groups[down], FSDP_BACKWARD, 0, NULL));
    if (n < MICROBATCHES) forward(groups[up], up, n);
    if (n > 0) backward(groups[down], down, n - 1);
    if (n < MICROBATCHES) check(fsdp_reshard(groups[up], FSDP_FORWARD, 0, NULL));
    if (n > 0) check(fsdp_reshard(groups[down], FSDP_BACKWARD, 0, NULL));
  }
}

int main(void) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *groups[LAYERS] = {NULL};
  uint32_t rank = 0, world_size = 0;
  double norm = 0.0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &world_size));
  check(fsdp_create_model(context, NULL, &model));
  check(fsdp_set_schedule(model, FSDP_SCHEDULE_INTERLEAVED, NULL));
  for (int i = 0; i < LAYERS; ++i) {
    const char *const names[LAYERS] = {"layer0", "layer1", "layer2"};
    const uint64_t shape = WIDTH;
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = names[i], param.shape = &shape, param.dimension_count = 1;
    check(fsdp_create_group(model, names[i], &param, 1, sizeof param, NULL, &groups[i]));
  }
  check(fsdp_seal_model(model)); /* weights start as zeros */
  check(fsdp_publish_weights(model, NULL));
  for (int n = 0; n <= MICROBATCHES; ++n) {
    for (int i = 0; i < WIDTH; ++i) x[n % 2][0][i] = (float)(rank + 1);
    sweep(groups, n);
  }
  check(fsdp_finish_grads(model, 1.0, 0, NULL));
  check(fsdp_get_grad_norm(model, NULL, NULL, &norm));
  check(fsdp_publish_weights(model, NULL)); /* nothing was changed: an empty update, to close the window */
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  /* Every micro-batch gave rank + 1 everywhere: the mean over the ranks, added up over the micro-batches. */
  const double expected = MICROBATCHES * (world_size + 1) / 2.0 * sqrt(LAYERS * WIDTH);
  if (fabs(norm - expected) > 1e-9) return fprintf(stderr, "norm %g, expected %g\n", norm, expected), 1;
  if (rank == 0) printf("pipeline_1f1b: ok, the gradients of %d interleaved micro-batches are exact\n", MICROBATCHES);
  return 0;
}
