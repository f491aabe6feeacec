/* SPDX-License-Identifier: Apache-2.0 */
/* A training step: micro-batches in 1F1B order, weight gradients later than those of inputs. Read step.c first. */
#ifndef MOE_STEP_H
#define MOE_STEP_H

#include "exchange.h"
#include "model.h"

/** What a micro-batch keeps from its forward pass until its weights' gradients are done. */
struct pass {
  int32_t token[TOKENS], target[TOKENS];
  int number;                          /* of the micro-batch */
  float x[BLOCKS + 1][TOKENS * WIDTH]; /* the blocks' inputs, and the head's */
  float logits[TOKENS * VOCABULARY];   /* after the loss their gradient */
  float d[TOKENS * WIDTH];             /* the gradient that flows back */
  struct block {
    float tanh_kept[TOKENS * WIDTH], dense[TOKENS * WIDTH];
    float probability[TOKENS * EXPERTS], expert_out[TOKENS * WIDTH];
    float d_dense[TOKENS * WIDTH], d_router[TOKENS * EXPERTS], d_gate[TOKENS];
    int32_t expert[TOKENS]; /* of this rank's tokens */
    struct routed {         /* tokens that this rank's experts have got: expert by expert, part by part */
      int rows[EXPERTS][PARTS];
      int member[TOKENS], place[TOKENS]; /* in whose box a row came, and where */
      float in[TOKENS * WIDTH], relu_kept[TOKENS * HIDDEN], out[TOKENS * WIDTH];
      float d_out[TOKENS * WIDTH], d_in[TOKENS * WIDTH], d_relu[TOKENS * HIDDEN];
    } routed;
  } block[BLOCKS];
};

struct trainer {
  struct model model;
  struct exchange *exchange;
  struct pass pass[2]; /* two micro-batches are under way */
  uint64_t step;
  int parts, first_part, tokens; /* of a micro-batch, that this rank has */
  double loss[MICROBATCHES][PARTS];
  double counts[EXPERTS]; /* tokens of this rank that went to each expert, in all blocks and steps */
};

struct step_result {
  double loss, norm;
};

/** Trains one step. Collective. */
struct step_result train_step(struct trainer *trainer, uint64_t step);

#endif
