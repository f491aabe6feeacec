/* SPDX-License-Identifier: Apache-2.0 */
/* A failed check prints what was wrong and ends the test. */
#ifndef FSDP_TESTS_ABI_CHECK_H
#define FSDP_TESTS_ABI_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fsdp.h"

#define CHECK(condition) check_that((condition), #condition, __FILE__, __LINE__)
#define OK(call) check_status((call), FSDP_OK, "", #call, __FILE__, __LINE__)
/* Checks that the call fails with this status, and that its message contains the text. */
#define REFUSED(status, text, call) check_status((call), (status), (text), #call, __FILE__, __LINE__)

static inline void check_that(int condition, const char *text, const char *file, int line) {
  if (condition) return;
  fprintf(stderr, "%s:%d: not true: %s\n", file, line, text);
  exit(1);
}

static inline void check_status(fsdp_status status, fsdp_status expected, const char *text, const char *call,
                                const char *file, int line) {
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(NULL, &error);
  if (status == expected && (status == FSDP_OK || strstr(error.message, text))) return;
  fprintf(stderr, "%s:%d: %s\n  gave %s: %s\n  expected %s, with '%s' in its message\n", file, line, call,
          fsdp_get_status_name(status), status == FSDP_OK ? "" : error.message, fsdp_get_status_name(expected), text);
  exit(1);
}

#endif
