/* SPDX-License-Identifier: Apache-2.0 */
/* --trace: the timeline of all ranks in one file. */
#ifndef TRAIN_GPT_TRACE_H
#define TRAIN_GPT_TRACE_H

#include <fsdp.h>

/** Every rank writes its part beside the file. Call it before training, so that a part that cannot be written is found
 * out early. */
void trace_write_part(fsdp_context *context, const char *path);

/** Every rank writes its part again, rank 0 makes one file of them and removes them. Collective. */
void trace_write(fsdp_context *context, const char *path);

#endif
