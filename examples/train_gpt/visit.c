/* SPDX-License-Identifier: Apache-2.0 */
/* A visit of the model: the full weights and gradients of one group, from unshard to reshard. */
#include <string.h>

#include "check.h"
#include "model.h"

struct parameter_group *model_get_group(struct model *model, enum model_part part, size_t layer) {
  if (part == PART_BLOCK) return &model->groups[1 + layer];
  return part == PART_EMBEDDING || model->tied ? &model->groups[0] : &model->groups[model->group_count - 1];
}

static int needs(const struct model *model, enum model_part part, enum gpt_slot slot) {
  switch (part) {
    case PART_BLOCK: return 1;
    case PART_EMBEDDING: return slot == TOKEN_EMBEDDING || slot == POSITION_EMBEDDING;
    default: return slot >= FINAL_NORM_WEIGHT || (model->tied && slot == TOKEN_EMBEDDING);
  }
}

/* The slot of a part's parameter: for the tied head's weight it is that of the token embedding. */
static enum gpt_slot place(enum model_part part, enum gpt_slot slot) {
  return part == PART_HEAD && slot == TOKEN_EMBEDDING ? HEAD_WEIGHT : slot;
}

/* The math reads fp32: other compute weights are widened for the time of the visit. */
static const float *read_as_float(struct model *model, const fsdp_tensor *tensor, uint64_t *converted) {
  if (tensor->dtype == FSDP_FLOAT32) return tensor->data;
  float *out = model->converted + *converted;
  device_widen_bfloat16(model->device, out, tensor->data, tensor->element_count);
  *converted += tensor->element_count;
  return out;
}

/* Sets the block of elements that share a scale. */
static void set_block(struct quantized *weights, fsdp_quantization quantization, int columns) {
  switch (quantization) {
    case FSDP_QUANTIZE_MXFP8:
      weights->block_rows = columns ? 32 : 1;
      weights->block_columns = columns ? 1 : 32;
      return;
    case FSDP_QUANTIZE_FP8_BLOCK: weights->block_rows = weights->block_columns = 128; return;
    default: /* all of it */
      weights->block_rows = weights->codes.shape[0];
      weights->block_columns = weights->codes.shape[1];
  }
}

/* Widens codes, times their scales. A product with the transpose, as in BACKWARD, reads the codes of columns. */
static const float *read_quantized(struct model *model, const struct parameter_group *group, size_t index,
                                   fsdp_phase phase, uint64_t *converted) {
  struct quantized weights = {.codes = FSDP_TENSOR_INIT, .scales = FSDP_TENSOR_INIT};
  const fsdp_quantization quantization = group->parameters[index].quantization;
  const int columns = quantization == FSDP_QUANTIZE_MXFP8 && phase == FSDP_BACKWARD;
  CHECK(model->context,
        fsdp_get_plane(group->handle, index, phase, columns ? FSDP_PLANE_COLUMN : FSDP_PLANE_ROW, &weights.codes));
  CHECK(model->context, fsdp_get_plane(group->handle, index, phase,
                                       columns ? FSDP_PLANE_COLUMN_SCALE : FSDP_PLANE_ROW_SCALE, &weights.scales));
  set_block(&weights, quantization, columns);
  float *out = model->converted + *converted;
  device_dequantize(model->device, out, &weights);
  *converted += weights.codes.element_count;
  return out;
}

void model_unshard(struct model *model, enum model_part part, size_t layer, fsdp_phase phase,
                   struct gpt_weights *weights) {
  struct parameter_group *group = model_get_group(model, part, layer);
  uint64_t converted = 0;
  CHECK(model->context, fsdp_unshard(group->handle, phase, 0, device_stream(model->device)));
  memset(weights, 0, sizeof *weights);
  for (size_t k = 0; k < group->count; ++k) {
    const enum gpt_slot slot = group->parameters[k].slot;
    if (!needs(model, part, slot)) continue;
    if (group->parameters[k].quantization) {
      weights->of[place(part, slot)] = read_quantized(model, group, k, phase, &converted);
      continue;
    }
    fsdp_tensor tensor = FSDP_TENSOR_INIT;
    CHECK(model->context, fsdp_get_param(group->handle, k, phase, &tensor));
    weights->of[place(part, slot)] = read_as_float(model, &tensor, &converted);
  }
}

void model_reshard(struct model *model, enum model_part part, size_t layer, fsdp_phase phase) {
  CHECK(model->context,
        fsdp_reshard(model_get_group(model, part, layer)->handle, phase, 0, device_stream(model->device)));
}

void model_acquire_grads(struct model *model, enum model_part part, size_t layer, struct gpt_gradients *gradients) {
  struct parameter_group *group = model_get_group(model, part, layer);
  memset(gradients, 0, sizeof *gradients);
  for (size_t k = 0; k < group->count; ++k) {
    const enum gpt_slot slot = group->parameters[k].slot;
    if (!needs(model, part, slot)) continue;
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    CHECK(model->context, fsdp_acquire_grad(group->handle, k, 0, device_stream(model->device), &grad, &accumulate));
    gradients->of[place(part, slot)] = (struct gradient){grad.data, (float)accumulate};
  }
}
