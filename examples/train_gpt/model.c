/* SPDX-License-Identifier: Apache-2.0 */
#include "model.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"

static void list_parameters(struct model *model, const struct options *options) {
  model->group_count = model->layers + (model->tied ? 1 : 2);
  model->groups = check_allocate(model->group_count * sizeof *model->groups);
  parameter_list_embedding(&model->groups[0], options);
  for (size_t i = 0; i < model->layers; ++i) parameter_list_layer(&model->groups[1 + i], options, i);
  if (!model->tied) parameter_list_head(&model->groups[1 + model->layers], options);
}

static void declare_group(struct model *model, struct parameter_group *group) {
  fsdp_param params[MOST_PARAMETERS];
  for (size_t i = 0; i < group->count; ++i) {
    const struct parameter *parameter = &group->parameters[i];
    params[i] = (fsdp_param)FSDP_PARAM_INIT;
    params[i].name = parameter->name;
    params[i].shape = parameter->shape;
    params[i].dimension_count = parameter->dimension_count;
    params[i].dtype = parameter->dtype;
    params[i].quantization = parameter->quantization;
    if (parameter->dimension_count < 2) params[i].flags = FSDP_PARAM_NO_DECAY;
  }
  CHECK(model->context,
        fsdp_create_group(model->handle, group->name, params, group->count, sizeof *params, NULL, &group->handle));
}

/* The embedding is visited first and last in both directions, which the default order does not include. */
static void declare_tied_visits(struct model *model) {
  const size_t layers = model->layers;
  const uint64_t count = 2 * (layers + 2);
  fsdp_visit *visits = check_allocate(count * sizeof *visits);
  for (size_t i = 0; i < count; ++i) {
    const size_t stop = i < count / 2 ? i : count - 1 - i; /* 0 embedding, 1.. layers, layers + 1 the head */
    visits[i].group_index = stop > layers ? 0 : (uint32_t)stop;
    visits[i].phase = i < count / 2 ? FSDP_FORWARD : FSDP_BACKWARD;
  }
  fsdp_schedule_options schedule = FSDP_SCHEDULE_OPTIONS_INIT;
  schedule.visits = visits;
  schedule.visit_count = count;
  schedule.visit_stride = sizeof(fsdp_visit);
  CHECK(model->context, fsdp_set_schedule(model->handle, FSDP_SCHEDULE_VISITS, &schedule));
  free(visits);
}

/* Only bf16 weights have main weights of their own, unless they are kept in nothing. */
static void set_homes(fsdp_model_options *settings, const struct options *options) {
  if (!options->home) return;
  settings->home_directory = options_home_directory(options);
  settings->state_home = settings->home_directory ? FSDP_HOME_FILE : FSDP_HOME_HOST;
  if (options->compute_dtype != FSDP_FLOAT32 && options->main_storage != FSDP_MAIN_NONE && !options->quantization)
    settings->main_home = settings->state_home;
  if (options->home_grads) settings->grad_home = settings->state_home;
}

static void declare(struct model *model, const struct options *options) {
  fsdp_model_options settings = FSDP_MODEL_OPTIONS_INIT;
  settings.strategy = (fsdp_strategy)options->strategy;
  settings.grad_dtype = FSDP_FLOAT32; /* the math is fp32, whatever the weights are stored in */
  settings.reduce_dtype = (fsdp_dtype)options->reduce_dtype;
  settings.unshard_mode = (fsdp_unshard_mode)options->unshard_mode;
  settings.reduce_policy = (fsdp_reduce_policy)options->reduce_policy;
  settings.main_storage = model->main_storage;
  settings.rounding_seed = options->seed;
  settings.optimizer = model->optimizer;
  settings.prefetch_depth = (uint32_t)options->prefetch;
  set_homes(&settings, options);
  if (options->save) settings.save_staging_bytes = 32u << 20; /* planned here, instead of at every save */
  if (options->prefetch == 0) settings.flags |= FSDP_MODEL_NO_PREFETCH;
  if (options->force) settings.flags |= FSDP_MODEL_FORCE_COMMUNICATION;
  /* A tied embedding's gradient is lent during the whole backward pass; leave the layers their buffers all the same. */
  settings.max_pending_groups = (uint32_t)options->pending + (model->tied ? 1 : 0);
  settings.outer_strategy = (fsdp_outer_strategy)options->outer_strategy;
  fsdp_mesh_options arrangement = FSDP_MESH_OPTIONS_INIT;
  arrangement.replicate_size = (uint32_t)options->replicas;
  arrangement.reduction_block_size = (uint32_t)options->reduction_block;
  fsdp_mesh *mesh = NULL;
  CHECK(model->context, fsdp_create_mesh(model->context, &arrangement, &mesh));
  settings.mesh = mesh;
  CHECK(model->context, fsdp_create_model(model->context, &settings, &model->handle));
  fsdp_destroy_mesh(mesh);
  for (size_t i = 0; i < model->group_count; ++i) declare_group(model, &model->groups[i]);
  if (model->tied) declare_tied_visits(model);
}

static uint64_t count_elements(const struct parameter_group *group) {
  uint64_t count = 0;
  for (size_t i = 0; i < group->count; ++i) count += group->parameters[i].count;
  return count;
}

static uint64_t find_largest(const struct model *model, int whole_group) {
  uint64_t largest = 0;
  for (size_t i = 0; i < model->group_count; ++i) {
    const struct parameter_group *group = &model->groups[i];
    for (size_t k = 0; k < group->count; ++k) {
      const uint64_t count = whole_group ? count_elements(group) : group->parameters[k].count;
      largest = count > largest ? count : largest;
    }
  }
  return largest;
}

static void load_first_weights(struct model *model, const struct options *options) {
  float *data = check_allocate(find_largest(model, 0) * sizeof *data);
  for (size_t i = 0; i < model->group_count; ++i) {
    struct parameter_group *group = &model->groups[i];
    for (size_t k = 0; k < group->count; ++k) {
      const uint64_t count = group->parameters[k].count;
      parameter_fill(data, &group->parameters[k], options);
      CHECK(model->context, fsdp_load_param(group->handle, k, data, FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
    }
  }
  free(data);
}

void model_create(struct model *model, fsdp_context *context, struct device *device, const struct options *options) {
  *model = (struct model){0};
  model->context = context;
  model->device = device;
  model->layers = options->layers;
  model->tied = options->tied != 0;
  model->main_storage = (fsdp_main_storage)options->main_storage;
  model->optimizer = (fsdp_optimizer)options->optimizer;
  list_parameters(model, options);
  declare(model, options);
  CHECK(context, fsdp_seal_model(model->handle));
  load_first_weights(model, options);
  CHECK(context, fsdp_publish_weights(model->handle, device_stream(device)));
  if (options->compute_dtype != FSDP_FLOAT32 || options->quantization) {
    model->converted = device_allocate(device, find_largest(model, 1) * sizeof *model->converted);
  }
}

void model_destroy(struct model *model) {
  fsdp_destroy_model(model->handle);
  free(model->groups);
  device_free(model->device, model->converted);
}

static uint64_t hash_bytes(uint64_t hash, const void *data, uint64_t size_bytes) {
  const uint8_t *bytes = data;
  for (uint64_t i = 0; i < size_bytes; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  return hash;
}

uint64_t model_hash_weights(struct model *model) {
  float *data = check_allocate(find_largest(model, 0) * sizeof *data);
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < model->group_count; ++i) {
    const struct parameter_group *group = &model->groups[i];
    for (size_t k = 0; k < group->count; ++k) {
      const uint64_t count = group->parameters[k].count;
      CHECK(model->context, fsdp_read_param(group->handle, k, data, FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
      hash = hash_bytes(hash, data, count * sizeof *data);
    }
  }
  free(data);
  return hash;
}

/* MXFP8 has two forms of a byte each, with a scale for 32; FP8 has one scale, FP8 blocks one for 128 x 128. */
static uint64_t count_compute_bytes(const struct parameter *parameter) {
  const uint64_t *shape = parameter->shape;
  switch (parameter->quantization) {
    case FSDP_QUANTIZE_FP8: return parameter->count + 4;
    case FSDP_QUANTIZE_MXFP8: return 2 * (parameter->count + parameter->count / 32);
    case FSDP_QUANTIZE_FP8_BLOCK: return parameter->count + 4 * ((shape[0] + 127) / 128) * ((shape[1] + 127) / 128);
    default: return parameter->count * fsdp_get_dtype_size(parameter->dtype);
  }
}

/* Bytes of main weights for each element: fp32 compute weights are the main weights, and quantized ones have fp32 main
 * weights beside them. */
static uint64_t get_main_size(const struct model *model, const struct parameter *parameter) {
  if (parameter->quantization) return sizeof(float);
  if (parameter->dtype == FSDP_FLOAT32 || model->main_storage == FSDP_MAIN_NONE) return 0;
  return model->main_storage == FSDP_MAIN_SPLIT16 ? sizeof(int16_t) : sizeof(float);
}

/* Two moments: fp32, or codes of a byte with an fp32 scale for each 256. Small parameters have fp32. */
static uint64_t count_state_bytes(const struct model *model, const struct parameter *parameter) {
  if (model->optimizer != FSDP_OPTIMIZER_ADAMW_8BIT || parameter->count < 4096)
    return 2 * parameter->count * sizeof(float);
  return 2 * (parameter->count + (parameter->count + 255) / 256 * sizeof(float));
}

uint64_t model_count_unsharded_bytes(const struct model *model) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < model->group_count; ++i) {
    const struct parameter_group *group = &model->groups[i];
    for (size_t k = 0; k < group->count; ++k) {
      const struct parameter *parameter = &group->parameters[k];
      bytes += count_compute_bytes(parameter) + parameter->count * (get_main_size(model, parameter) + sizeof(float)) +
               count_state_bytes(model, parameter);
    }
  }
  return bytes;
}
