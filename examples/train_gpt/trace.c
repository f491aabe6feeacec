/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum { PATH_SIZE = 4096 };

static void fail(const char *path) {
  fprintf(stderr, "train_gpt: --trace %s: %s\n", path, strerror(errno));
  exit(1);
}

static void name_part(char part[PATH_SIZE], const char *path, uint32_t rank) {
  if (snprintf(part, PATH_SIZE, "%s.rank%" PRIu32, path, rank) >= PATH_SIZE) errno = ENAMETOOLONG, fail(path);
}

void trace_write_part(fsdp_context *context, const char *path) {
  char part[PATH_SIZE];
  uint32_t rank = 0;
  CHECK(context, fsdp_get_rank(context, &rank));
  name_part(part, path, rank);
  CHECK(context, fsdp_write_trace(context, part));
}

/* A part has one event a line, between a first and a last line that are equal in all parts. */
static void copy_events(FILE *out, const char *part, const char **separator) {
  FILE *in = fopen(part, "r");
  char *line = NULL;
  size_t capacity = 0;
  if (!in || getline(&line, &capacity, in) < 0) fail(part);
  while (getline(&line, &capacity, in) > 0 && line[0] != ']') {
    line[strcspn(line, "\n")] = 0;
    const size_t length = strlen(line);
    if (length && line[length - 1] == ',') line[length - 1] = 0;
    fprintf(out, "%s%s", *separator, line);
    *separator = ",\n";
  }
  free(line);
  fclose(in);
}

static void merge_parts(const char *path, uint32_t count) {
  const char *separator = "";
  char part[PATH_SIZE];
  FILE *out = fopen(path, "w");
  if (!out) fail(path);
  fputs("{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n", out);
  for (uint32_t rank = 0; rank < count; ++rank) {
    name_part(part, path, rank);
    copy_events(out, part, &separator);
    remove(part);
  }
  fputs("\n]}\n", out);
  if (fclose(out)) fail(path);
}

void trace_write(fsdp_context *context, const char *path) {
  uint32_t rank = 0, world_size = 0;
  double written = 1;
  trace_write_part(context, path);
  CHECK(context, fsdp_all_reduce_values(context, NULL, &written, 1, FSDP_VALUE_SUM)); /* every part is there */
  CHECK(context, fsdp_get_rank(context, &rank));
  CHECK(context, fsdp_get_world_size(context, &world_size));
  if (rank == 0) merge_parts(path, world_size);
}
