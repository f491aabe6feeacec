/* SPDX-License-Identifier: Apache-2.0 */
/* The model's groups: which ranks share them, how they are declared, loaded and read. */
#ifndef MOE_MODEL_H
#define MOE_MODEL_H

#include <fsdp.h>
#include <stdint.h>

#include "moe.h"

/* Parameters of the groups, by index. */
enum { DENSE_WEIGHT, DENSE_BIAS, DENSE_ROUTER };
enum { EXPERT_UP, EXPERT_DOWN };

struct model {
  fsdp_context *context;
  fsdp_model *handle;
  int rank, ranks;
  int expert_parallel; /* number of ranks that together have all experts of a block */
  int experts;         /* of a block, that this rank has */
  int first_expert;
  int halves, half; /* 2 where two ranks compute one half of the micro-batches and two the other; this rank's half */
  fsdp_group *embedding, *dense[BLOCKS], *expert[BLOCKS], *head;
};

void model_create(struct model *model, fsdp_context *context, int expert_parallel);
void model_destroy(struct model *model);
void model_load_initial(struct model *model);

/** The weights of a parameter of a group that is held, and the place for its gradient. */
const float *model_weights(fsdp_group *group, uint64_t param, fsdp_phase phase);
float *model_grad(fsdp_group *group, uint64_t param);

/** A hash of all weights, in the order of a rank that has all experts. Collective. */
uint64_t model_hash(struct model *model);

#endif
