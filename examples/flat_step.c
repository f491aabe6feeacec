/* SPDX-License-Identifier: Apache-2.0 */
/*
 * flat_step: a whole training step in one call, for array frameworks that have all gradients at once.
 *
 *   fsdp-run -n 2 flat_step
 *
 * It fits y = a x + b; each rank sees its own points. Optimizer state and main weights are sharded (ZeRO-1), compute
 * weights stay whole, so that they can be read at any time outside the update window, without an unshard.
 */
#include <math.h>

#include "check.h"

enum { STEPS = 400, POINTS = 16 };

static float read_scalar(fsdp_group *group, uint64_t param) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  check(fsdp_get_param(group, param, FSDP_FORWARD, &tensor));
  return *(const float *)tensor.data;
}

int main(void) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *group = NULL;
  uint32_t rank = 0, world_size = 0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &world_size));

  fsdp_param params[2] = {FSDP_PARAM_INIT, FSDP_PARAM_INIT}; /* no dimensions: scalars */
  params[0].name = "slope", params[1].name = "offset";
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.strategy = FSDP_STRATEGY_OPTIM;
  check(fsdp_create_model(context, &options, &model));
  check(fsdp_create_group(model, "line", params, 2, sizeof *params, NULL, &group));
  check(fsdp_seal_model(model));
  check(fsdp_publish_weights(model, NULL));

  double first_norm = 0.0, norm = 0.0;
  for (int step = 0; step < STEPS; ++step) {
    const float slope = read_scalar(group, 0), offset = read_scalar(group, 1);
    float grads[2] = {0.0f, 0.0f}; /* of the mean of (y - target)^2 / 2 over this rank's points */
    for (int i = 0; i < POINTS; ++i) {
      const float x = (float)(i * (int)world_size + (int)rank) / (float)(POINTS * world_size);
      const float difference = slope * x + offset - (3.0f * x - 1.0f);
      grads[0] += difference * x / POINTS;
      grads[1] += difference / POINTS;
    }
    fsdp_grad flat[2] = {{&grads[0], 1, FSDP_FLOAT32, 0}, {&grads[1], 1, FSDP_FLOAT32, 0}};
    /* Reduced over the ranks, clipped to norm 1, AdamW, published: the next read sees the new weights. */
    check(fsdp_apply_grads(model, flat, 2, sizeof(fsdp_grad), 0.05, 1.0, NULL, NULL, &norm));
    if (step == 0) first_norm = norm;
  }

  const float slope = read_scalar(group, 0), offset = read_scalar(group, 1);
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  if (!(fabsf(slope - 3.0f) < 0.05f && fabsf(offset + 1.0f) < 0.05f && norm < first_norm)) {
    return fprintf(stderr, "rank %u: y = %g x + %g\n", rank, slope, offset), 1;
  }
  if (rank == 0) printf("flat_step: ok, y = %.1f x + %.1f\n", slope, offset);
  return 0;
}
