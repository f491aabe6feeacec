/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's training: the step over libfsdp's calls, and text from the trained model. */
#ifndef TRAIN_GPT_STEP_H
#define TRAIN_GPT_STEP_H

#include "corpus.h"
#include "model.h"
#include "workspace.h"

struct trainer {
  const struct options *options;
  const struct corpus *corpus;
  fsdp_context *context;
  fsdp_stream stream; /* of the math */
  uint32_t rank, world_size;
  struct gpt_shape shape; /* of one pass: this rank's rows of a micro-batch */
  struct model model;
  struct workspace workspace;
  struct device_graph *graph; /* of all passes of a step; NULL: not captured */
  fsdp_capture *capture;
  fsdp_checkpoint *saving; /* a checkpoint on its way, beside training; NULL: none */
  uint64_t first_step; /* that this run makes: not 0 where it goes on from a checkpoint */
};

struct step_result {
  double loss; /* nats per byte, the mean over the global batch */
  double grad_norm;
  double lr;
};

void trainer_create(struct trainer *trainer, fsdp_context *context, const struct options *options,
                    const struct corpus *corpus);
void trainer_destroy(struct trainer *trainer);

/** Step number `step`, from 0. Collective. */
void train_step(struct trainer *trainer, uint64_t step, struct step_result *result);

/** The text that the model writes after a newline, on every rank alike; text has room for count bytes. Collective. */
void sample_text(struct trainer *trainer, uint8_t *text, size_t count);

#endif
