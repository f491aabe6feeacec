/* SPDX-License-Identifier: Apache-2.0 */
/* The GPT as libfsdp sees it: a model of groups (embedding, one for each layer, head) of parameters. */
#ifndef TRAIN_GPT_MODEL_H
#define TRAIN_GPT_MODEL_H

#include <fsdp.h>

#include "gpt.h"
#include "options.h"
#include "parameter.h"

struct model {
  fsdp_context *context;
  struct device *device;
  fsdp_model *handle;
  struct parameter_group *groups;
  size_t group_count;
  size_t layers;
  int tied;
  fsdp_main_storage main_storage;
  fsdp_optimizer optimizer;
  float *converted; /* one group's other weights as fp32; NULL where all are */
};

/** Which slots a visit needs. With a tied head the head's visit reads the embedding's group. */
enum model_part { PART_EMBEDDING, PART_BLOCK, PART_HEAD };

/** Declares, seals, loads the first weights (from the seed alone, on every rank alike) and publishes them. */
void model_create(struct model *model, fsdp_context *context, struct device *device, const struct options *options);
void model_destroy(struct model *model);

/** The group of a part; layer counts for PART_BLOCK only. */
struct parameter_group *model_get_group(struct model *model, enum model_part part, size_t layer);

/** Takes a hold and points weights at the full weights that the part needs. They are readable until the reshard. */
void model_unshard(struct model *model, enum model_part part, size_t layer, fsdp_phase phase,
                   struct gpt_weights *weights);
void model_reshard(struct model *model, enum model_part part, size_t layer, fsdp_phase phase);

/** Borrows the full gradients of the part's parameters. */
void model_acquire_grads(struct model *model, enum model_part part, size_t layer, struct gpt_gradients *gradients);

/** FNV-1a over all main weights, gathered, in the order of declaration. Collective. */
uint64_t model_hash_weights(struct model *model);

/** Bytes of main and compute weights, main grads and AdamW's two moments, whole and without padding. */
uint64_t model_count_unsharded_bytes(const struct model *model);

#endif
