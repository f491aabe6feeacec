/* SPDX-License-Identifier: Apache-2.0 */
/* The parameters of each group: names, shapes, first values. */
#ifndef TRAIN_GPT_PARAMETER_H
#define TRAIN_GPT_PARAMETER_H

#include <fsdp.h>
#include <stddef.h>

#include "gpt.h"
#include "options.h"

enum { MOST_PARAMETERS = 13 };

enum first_values { ZEROS, ONES, NORMAL, NORMAL_RESIDUAL };

struct parameter {
  char name[64];
  enum gpt_slot slot;
  enum first_values first_values;
  uint64_t shape[2];
  uint32_t dimension_count;
  fsdp_dtype dtype;
  fsdp_quantization quantization; /* 0: none */
  uint64_t count;                 /* elements */
};

struct parameter_group {
  char name[32];
  struct parameter parameters[MOST_PARAMETERS];
  size_t count;
  fsdp_group *handle;
};

/** Fill a group's parameters. A tied head has no group: its norm is declared with the embedding. */
void parameter_list_embedding(struct parameter_group *group, const struct options *options);
void parameter_list_layer(struct parameter_group *group, const struct options *options, size_t layer);
void parameter_list_head(struct parameter_group *group, const struct options *options);

/** The first values of a whole parameter; each element depends on (seed, name, its index) only. */
void parameter_fill(float *data, const struct parameter *parameter, const struct options *options);

#endif
