/* SPDX-License-Identifier: Apache-2.0 */
#include "workspace.h"

#include <stdlib.h>

#include "check.h"

/* Cuts pieces off a slab; without a slab it only counts, so that one walk serves for measuring and for cutting. */
struct cutter {
  float *slab;
  size_t used;
};

static float *cut(struct cutter *cutter, size_t count) {
  float *piece = cutter->slab ? cutter->slab + cutter->used : NULL;
  cutter->used += (count + 15) / 16 * 16; /* pieces begin at cache lines */
  return piece;
}

static struct block_activations cut_block(struct cutter *cutter, const struct gpt_shape *shape) {
  const size_t narrow = shape->sequences * shape->tokens * shape->width;
  struct block_activations kept;
  kept.norm1 = cut(cutter, narrow);
  kept.qkv = cut(cutter, 3 * narrow);
  kept.probabilities = cut(cutter, shape->sequences * shape->heads * shape->tokens * shape->tokens);
  kept.attention = cut(cutter, narrow);
  kept.middle = cut(cutter, narrow);
  kept.norm2 = cut(cutter, narrow);
  kept.up = cut(cutter, 4 * narrow);
  kept.gelu = cut(cutter, 4 * narrow);
  return kept;
}

static void cut_all(struct workspace *workspace, struct cutter *cutter, const struct gpt_shape *shape,
                    size_t microbatches, int recompute) {
  const size_t rows = shape->sequences * shape->tokens, narrow = rows * shape->width;
  for (size_t i = 0; i <= shape->layers; ++i) workspace->x[i] = cut(cutter, narrow);
  for (size_t i = 0; i < shape->layers; ++i) {
    workspace->kept[i] = recompute && i > 0 ? workspace->kept[0] : cut_block(cutter, shape);
  }
  workspace->scratch.qkv = cut(cutter, 3 * narrow);
  workspace->scratch.hidden = cut(cutter, 4 * narrow);
  workspace->scratch.narrow = cut(cutter, narrow);
  workspace->scratch.square = cut(cutter, device_parallel_heads(shape->heads) * shape->tokens * shape->tokens);
  workspace->scratch.sums = (double *)(void *)cut(cutter, 2 * rows);
  workspace->d = cut(cutter, narrow);
  workspace->norm = cut(cutter, narrow);
  workspace->logits = cut(cutter, rows * VOCABULARY);
  workspace->loss = (double *)(void *)cut(cutter, 2);
  workspace->tokens = (uint8_t *)cut(cutter, microbatches * rows / sizeof(float) + 1);
  workspace->targets = (uint8_t *)cut(cutter, microbatches * rows / sizeof(float) + 1);
}

void workspace_create(struct workspace *workspace, const struct gpt_shape *shape, size_t microbatches, int recompute) {
  const size_t rows = shape->sequences * shape->tokens;
  workspace->x = check_allocate((shape->layers + 1) * sizeof *workspace->x);
  workspace->kept = check_allocate(shape->layers * sizeof *workspace->kept);
  workspace->rows = check_allocate(2 * rows);
  workspace->device = shape->device;
  struct cutter cutter = {NULL, 0};
  cut_all(workspace, &cutter, shape, microbatches, recompute);
  workspace->slab = device_allocate(shape->device, cutter.used * sizeof *workspace->slab);
  cutter = (struct cutter){workspace->slab, 0};
  cut_all(workspace, &cutter, shape, microbatches, recompute);
}

void workspace_destroy(struct workspace *workspace) {
  free(workspace->x);
  free(workspace->kept);
  free(workspace->rows);
  device_free(workspace->device, workspace->slab);
}
