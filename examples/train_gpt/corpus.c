/* SPDX-License-Identifier: Apache-2.0 */
#include "corpus.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "random.h"

#ifndef FSDP_SOURCE_ROOT
#define FSDP_SOURCE_ROOT "."
#endif

static void fail(const char *path, const char *problem) {
  fprintf(stderr, "train_gpt: --corpus %s: %s\n", path, problem);
  exit(2);
}

static void reserve(struct corpus *corpus, size_t size) {
  if (corpus->size + size <= corpus->capacity) return;
  corpus->capacity = 2 * corpus->capacity + size;
  corpus->bytes = realloc(corpus->bytes, corpus->capacity);
  if (!corpus->bytes) fail("text", "out of memory");
}

static void add_file(struct corpus *corpus, const char *path, size_t size) {
  FILE *file = fopen(path, "rb");
  if (!file) fail(path, strerror(errno));
  reserve(corpus, size);
  uint8_t *bytes = corpus->bytes + corpus->size;
  const size_t got = fread(bytes, 1, size, file);
  fclose(file);
  if (got == 0 || memchr(bytes, 0, got)) return; /* a binary file teaches nothing about text */
  corpus->size += got;
  ++corpus->file_count;
}

static int is_visible(const struct dirent *entry) { return entry->d_name[0] != '.'; }

/* By bytes, not by locale: the order decides the data, and so every number of the run. */
static int compare_names(const struct dirent **a, const struct dirent **b) {
  return strcmp((*a)->d_name, (*b)->d_name);
}

static void add_path(struct corpus *corpus, const char *path);

static void add_directory(struct corpus *corpus, const char *path) {
  struct dirent **entries = NULL;
  const int count = scandir(path, &entries, is_visible, compare_names);
  if (count < 0) fail(path, strerror(errno));
  for (int i = 0; i < count; ++i) {
    char child[4096];
    if (snprintf(child, sizeof child, "%s/%s", path, entries[i]->d_name) >= (int)sizeof child)
      fail(path, "path too long");
    add_path(corpus, child);
    free(entries[i]);
  }
  free(entries);
}

static void add_path(struct corpus *corpus, const char *path) {
  struct stat status;
  if (stat(path, &status)) fail(path, strerror(errno));
  if (S_ISDIR(status.st_mode)) add_directory(corpus, path);
  if (S_ISREG(status.st_mode) && status.st_size > 0) add_file(corpus, path, (size_t)status.st_size);
}

static void add_own_sources(struct corpus *corpus) {
  static const char *const sources[] = {"README.md", "docs", "examples", "include", "lib"};
  for (size_t i = 0; i < sizeof sources / sizeof *sources; ++i) {
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/%s", FSDP_SOURCE_ROOT, sources[i]);
    if (stat(path, &status) == 0) add_path(corpus, path);
  }
  if (corpus->size == 0) fail(FSDP_SOURCE_ROOT, "the repository's sources are gone; name files or directories");
}

void corpus_load(struct corpus *corpus, char *const *paths, size_t path_count) {
  memset(corpus, 0, sizeof *corpus);
  for (size_t i = 0; i < path_count; ++i) add_path(corpus, paths[i]);
  if (path_count == 0) add_own_sources(corpus);
  if (corpus->size == 0) fail(paths[0], "no text found");
}

void corpus_free(struct corpus *corpus) {
  free(corpus->bytes);
  memset(corpus, 0, sizeof *corpus);
}

void corpus_get_row(const struct corpus *corpus, uint64_t seed, uint64_t step, uint64_t row, size_t context,
                    uint8_t *tokens, uint8_t *targets) {
  const uint64_t key = random_mix(seed) ^ random_mix(~step);
  const size_t first = (size_t)(random_bits(key, row) % corpus->size);
  for (size_t i = 0; i < context; ++i) { /* the text is a ring, so that a short one will do */
    tokens[i] = corpus->bytes[(first + i) % corpus->size];
    targets[i] = corpus->bytes[(first + i + 1) % corpus->size];
  }
}
