/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank of a job that loses a rank. usage: doomed_rank RANK. The named rank kills itself after some rounds. The others
 * exit with 1 when one of their calls reports that.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "fsdp.h"

static int report(const char *call) {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(NULL, &error);
  fprintf(stderr, "%s: %s\n", call, error.message);
  return 1;
}

int main(int argc, char **argv) {
  fsdp_context *context = NULL;
  uint32_t rank = 0;
  if (argc != 2 || fsdp_create_context(NULL, &context) != FSDP_OK) return report("fsdp_create_context");
  fsdp_get_rank(context, &rank);
  for (int round = 0;; ++round) {
    double value = 1;
    if (round == 10 && rank == (uint32_t)atoi(argv[1])) raise(SIGKILL);
    if (fsdp_all_reduce_values(context, NULL, &value, 1, FSDP_VALUE_SUM) != FSDP_OK) break;
  }
  const int status = report("fsdp_all_reduce_values");
  fsdp_destroy_context(context);
  return status;
}
