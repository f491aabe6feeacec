/* SPDX-License-Identifier: Apache-2.0 */
#include "parameter.h"

#include <math.h>
#include <stdio.h>

#include "random.h"

/* Sizes as multiples of the width, or one of these. */
enum extent { NONE = 0, WIDTH = 1, WIDTHS_3 = 3, WIDTHS_4 = 4, CONTEXT = 100, VOCABULARY_ROWS = 101 };

struct declaration {
  enum gpt_slot slot;
  const char *name;
  enum extent rows, columns;
  enum first_values first_values;
};

static const struct declaration embedding[] = {
    {TOKEN_EMBEDDING, "token_embedding.weight", VOCABULARY_ROWS, WIDTH, NORMAL},
    {POSITION_EMBEDDING, "position_embedding.weight", CONTEXT, WIDTH, NORMAL},
};
static const struct declaration layer_parameters[] = {
    {NORM1_WEIGHT, "norm1.weight", WIDTH, NONE, ONES},
    {NORM1_BIAS, "norm1.bias", WIDTH, NONE, ZEROS},
    {QKV_WEIGHT, "attention.qkv.weight", WIDTHS_3, WIDTH, NORMAL},
    {QUERY_BIAS, "attention.query.bias", WIDTH, NONE, ZEROS},
    {VALUE_BIAS, "attention.value.bias", WIDTH, NONE, ZEROS},
    {PROJECTION_WEIGHT, "attention.projection.weight", WIDTH, WIDTH, NORMAL_RESIDUAL},
    {PROJECTION_BIAS, "attention.projection.bias", WIDTH, NONE, ZEROS},
    {NORM2_WEIGHT, "norm2.weight", WIDTH, NONE, ONES},
    {NORM2_BIAS, "norm2.bias", WIDTH, NONE, ZEROS},
    {UP_WEIGHT, "mlp.up.weight", WIDTHS_4, WIDTH, NORMAL},
    {UP_BIAS, "mlp.up.bias", WIDTHS_4, NONE, ZEROS},
    {DOWN_WEIGHT, "mlp.down.weight", WIDTH, WIDTHS_4, NORMAL_RESIDUAL},
    {DOWN_BIAS, "mlp.down.bias", WIDTH, NONE, ZEROS},
};
static const struct declaration final_norm[] = {
    {FINAL_NORM_WEIGHT, "final_norm.weight", WIDTH, NONE, ONES},
    {FINAL_NORM_BIAS, "final_norm.bias", WIDTH, NONE, ZEROS},
};
static const struct declaration head[] = {{HEAD_WEIGHT, "head.weight", VOCABULARY_ROWS, WIDTH, NORMAL}};
#define COUNT_OF(array) (sizeof(array) / sizeof *(array))

static uint64_t measure(enum extent extent, const struct options *options) {
  if (extent == CONTEXT) return options->context;
  if (extent == VOCABULARY_ROWS) return VOCABULARY;
  return extent * options->width;
}

static int is_norm_bias(enum gpt_slot slot) {
  return slot == NORM1_BIAS || slot == NORM2_BIAS || slot == FINAL_NORM_BIAS;
}

/* Vectors stay fp32 whatever the compute dtype: they are small, and rounding a norm's weight costs accuracy. So does
 * quantizing what turns bytes into numbers and back: the embedding and the head stay as they are. */
static void add(struct parameter_group *group, const struct options *options, const struct declaration *list,
                size_t count, const char *prefix) {
  for (const struct declaration *d = list; d < list + count; ++d) {
    if (is_norm_bias(d->slot) && options->norm == RMS_NORM) continue;
    struct parameter *parameter = &group->parameters[group->count++];
    snprintf(parameter->name, sizeof parameter->name, "%s%s", prefix, d->name);
    parameter->slot = d->slot;
    parameter->first_values = d->first_values;
    parameter->dimension_count = d->columns == NONE ? 1 : 2;
    parameter->shape[0] = measure(d->rows, options);
    parameter->shape[1] = d->columns == NONE ? 1 : measure(d->columns, options);
    parameter->dtype = d->columns == NONE ? FSDP_FLOAT32 : (fsdp_dtype)options->compute_dtype;
    parameter->quantization = d->columns == NONE || !*prefix ? 0 : (fsdp_quantization)options->quantization;
    parameter->count = parameter->shape[0] * parameter->shape[1];
  }
}

void parameter_list_embedding(struct parameter_group *group, const struct options *options) {
  snprintf(group->name, sizeof group->name, "embedding");
  add(group, options, embedding, COUNT_OF(embedding), "");
  if (options->tied) add(group, options, final_norm, COUNT_OF(final_norm), "");
}

void parameter_list_layer(struct parameter_group *group, const struct options *options, size_t layer) {
  char prefix[32];
  snprintf(group->name, sizeof group->name, "layers.%zu", layer);
  snprintf(prefix, sizeof prefix, "layers.%zu.", layer);
  add(group, options, layer_parameters, COUNT_OF(layer_parameters), prefix);
}

void parameter_list_head(struct parameter_group *group, const struct options *options) {
  snprintf(group->name, sizeof group->name, "head");
  add(group, options, final_norm, COUNT_OF(final_norm), "");
  add(group, options, head, COUNT_OF(head), "");
}

static uint64_t hash_name(const char *name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (; *name; ++name) hash = (hash ^ (uint8_t)*name) * 0x100000001b3u;
  return hash;
}

void parameter_fill(float *data, const struct parameter *parameter, const struct options *options) {
  const uint64_t key = random_mix(options->seed) ^ hash_name(parameter->name);
  /* GPT-2's choice: what is added to the residual stream starts smaller, the more layers add to it. */
  double deviation = 0.02;
  if (parameter->first_values == NORMAL_RESIDUAL) deviation /= sqrt(2.0 * (double)options->layers);
  for (uint64_t i = 0; i < parameter->count; ++i) {
    switch (parameter->first_values) {
      case ZEROS: data[i] = 0.0f; break;
      case ONES: data[i] = 1.0f; break;
      default: data[i] = (float)(deviation * random_normal(key, i)); break;
    }
  }
}
