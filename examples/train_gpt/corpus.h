/* SPDX-License-Identifier: Apache-2.0 */
/* The text to learn: bytes of files, one after another. */
#ifndef TRAIN_GPT_CORPUS_H
#define TRAIN_GPT_CORPUS_H

#include <stddef.h>
#include <stdint.h>

struct corpus {
  uint8_t *bytes;
  size_t size;
  size_t capacity;
  size_t file_count;
};

/**
 * Reads files, and directories in the order of their names, leaving out hidden entries and files with NUL bytes.
 * Without paths: this repository's own sources. Prints what cannot be read and exits with 2.
 */
void corpus_load(struct corpus *corpus, char *const *paths, size_t path_count);
void corpus_free(struct corpus *corpus);

/**
 * Row `row` of step `step`'s global batch: context bytes and the byte after each. It depends on nothing else, so that
 * any number of ranks sees the same global batch.
 */
void corpus_get_row(const struct corpus *corpus, uint64_t seed, uint64_t step, uint64_t row, size_t context,
                    uint8_t *tokens, uint8_t *targets);

#endif
