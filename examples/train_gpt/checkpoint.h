/* SPDX-License-Identifier: Apache-2.0 */
/* Saving now and then, on request and at the end, and going on from there. */
#ifndef TRAIN_GPT_CHECKPOINT_H
#define TRAIN_GPT_CHECKPOINT_H

#include "step.h"

/** Can a run begin with --save's folder? Explains on rank 0 why not and returns 0. */
int checkpoint_folder_is_free(const struct options *options, uint64_t rank);

/** Ctrl-C and SIGTERM ask for a checkpoint and the end, instead of ending the program at once; twice, they end it. */
void checkpoint_listen(void);

/** The number of steps that have been made: 0, or with --resume those of the newest checkpoint. Collective. */
uint64_t checkpoint_resume(struct trainer *trainer);

/** After `done` steps: saves if it is time to. Returns whether a signal asked for the end. Collective. */
int checkpoint_after_step(struct trainer *trainer, uint64_t done);

/** The exit status: 0, or 128 plus the signal that asked for the end, on whichever rank it came. */
int checkpoint_exit_status(void);

#endif
