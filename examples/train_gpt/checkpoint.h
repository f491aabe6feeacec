/* SPDX-License-Identifier: Apache-2.0 */
/* Saves a checkpoint every few steps, on a signal and at the end, and continues from one. */
#ifndef TRAIN_GPT_CHECKPOINT_H
#define TRAIN_GPT_CHECKPOINT_H

#include "step.h"

/** Returns 1 if a run can begin with the folder of --save. Otherwise explains the reason on rank 0 and returns 0. */
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
