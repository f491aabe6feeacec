/* SPDX-License-Identifier: Apache-2.0 */
#include "check.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void check_status(const fsdp_context *context, fsdp_status status, const char *file, int line) {
  if (status == FSDP_OK) return;
  fsdp_error error = FSDP_ERROR_INIT;
  uint32_t rank = 0;
  char who[32] = "";
  if (fsdp_get_last_error(context, &error) != FSDP_OK || error.status == FSDP_OK) {
    snprintf(error.message, sizeof error.message, "%s", fsdp_get_status_name(status));
  }
  if (context && fsdp_get_rank(context, &rank) == FSDP_OK) snprintf(who, sizeof who, "rank %" PRIu32 ": ", rank);
  fprintf(stderr, "train_gpt: %s%s (%s:%d)\n", who, error.message, file, line);
  exit(1);
}

void *check_allocate(uint64_t size_bytes) {
  void *memory = NULL;
  if (posix_memalign(&memory, 64, size_bytes ? size_bytes : 64)) {
    fprintf(stderr, "train_gpt: out of memory: %" PRIu64 " bytes\n", size_bytes);
    exit(1);
  }
  return memset(memory, 0, size_bytes); /* touches every page, so that training meets no page fault */
}
