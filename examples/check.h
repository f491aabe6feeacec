/* SPDX-License-Identifier: Apache-2.0 */
/* Error handling of the small examples: print the library's message and exit. train_gpt has its own. */
#ifndef EXAMPLES_CHECK_H
#define EXAMPLES_CHECK_H

#include <fsdp.h>
#include <stdio.h>
#include <stdlib.h>

/** With NULL instead of a context, the detail is that of the calling thread's last failing call. */
static void check(fsdp_status status) {
  fsdp_error error = FSDP_ERROR_INIT;
  if (status == FSDP_OK) return;
  fsdp_get_last_error(NULL, &error);
  fprintf(stderr, "%s: %s\n", fsdp_get_status_name(status), error.message);
  exit(1);
}

#endif
