/* SPDX-License-Identifier: Apache-2.0 */
/* What rank 0 prints and writes: progress, the table of memory, the JSON file. */
#ifndef TRAIN_GPT_REPORT_H
#define TRAIN_GPT_REPORT_H

#include <stdio.h>

#include "step.h"

struct report {
  const struct trainer *trainer; /* NULL on every rank but 0: nothing is reported there */
  FILE *json;                    /* NULL: none */
  int in_place;                  /* a terminal: one progress line that is written over */
  double started, last_step, last_line;
  double late_loss; /* the sum over the last steps */
  uint64_t late_steps;
};

/** Prints what is about to be trained. Exits with 2 if the JSON file cannot be written. */
void report_begin(struct report *report, struct trainer *trainer);
void report_step(struct report *report, uint64_t step, const struct step_result *result);
void report_sample(struct report *report, const uint8_t *text, size_t count);
/** The table of memory and the JSON file's last line. */
void report_end(struct report *report, uint64_t weights_hash);

#endif
