/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TRAIN_GPT_CHECK_H
#define TRAIN_GPT_CHECK_H

#include <fsdp.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Every call of libfsdp goes through this: a failed one ends the program with status 1 and the library's message. */
#define CHECK(context, call) check_status((context), (call), __FILE__, __LINE__)

void check_status(const fsdp_context *context, fsdp_status status, const char *file, int line);

/** Zeroed memory at a multiple of 64 bytes, as vector units like it; ends the program if there is none. */
void *check_allocate(uint64_t size_bytes);

#ifdef __cplusplus
}
#endif

#endif
