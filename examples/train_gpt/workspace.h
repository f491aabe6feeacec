/* SPDX-License-Identifier: Apache-2.0 */
/* All memory of the math of one rank, made before the first step: training itself allocates nothing. */
#ifndef TRAIN_GPT_WORKSPACE_H
#define TRAIN_GPT_WORKSPACE_H

#include "gpt.h"

struct workspace {
  float **x;                      /* layers + 1: each block's input, and the head's */
  struct block_activations *kept; /* one for each block; with recompute all are the same one */
  struct gpt_scratch scratch;
  float *d;                  /* [rows, width]: the residual stream's gradient */
  float *norm;               /* [rows, width]: the head's normalized input */
  float *logits;             /* [rows, 256] */
  uint8_t *tokens, *targets; /* of all micro-batches, one after another */
  double *loss;              /* the sum over a step's passes */
  float *slab;               /* what all of the above point into */
  uint8_t *rows;             /* the host's: where tokens are put together, and then targets */
  struct device *device;
};

void workspace_create(struct workspace *workspace, const struct gpt_shape *shape, size_t microbatches, int recompute);
void workspace_destroy(struct workspace *workspace);

#endif
