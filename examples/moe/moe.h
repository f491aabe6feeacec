/* SPDX-License-Identifier: Apache-2.0 */
/* The sizes of the model and of a step. */
#ifndef MOE_H
#define MOE_H

enum {
  VOCABULARY = 64,
  WIDTH = 32,
  HIDDEN = 64, /* inside of an expert */
  BLOCKS = 2,
  EXPERTS = 4, /* in each block */
  /* A step has 8 micro-batches of 2 parts. One rank computes both parts of each micro-batch, and each of two ranks
   * computes one part. Of four ranks, two compute one half of the micro-batches and two the other half. */
  MICROBATCHES = 8,
  PARTS = 2,
  PART_TOKENS = 32,
  TOKENS = PARTS * PART_TOKENS,
  MOST_RANKS = 4
};

#endif
