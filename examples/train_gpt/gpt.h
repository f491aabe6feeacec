/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The math of a byte-level GPT, forward and backward by hand: embedding, blocks, head. It knows nothing of ranks or
 * libfsdp: weights come in as pointers, gradients go out through pointers, and all memory is the caller's. Pointers are
 * to the device's memory, and work is in the device's order: with a GPU a call may return before the work is done.
 */
#ifndef TRAIN_GPT_GPT_H
#define TRAIN_GPT_GPT_H

#include <stddef.h>
#include <stdint.h>

#include "device.h"
#include "linear.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { VOCABULARY = 256 };

struct gpt_shape {
  size_t layers;
  size_t width;
  size_t heads;
  size_t sequences; /* in one pass of this rank */
  size_t tokens;    /* of each sequence */
  struct device *device;
};

/** The weights of a block or of the ends of the model. RMSNorm has no norm biases: those slots stay NULL. */
enum gpt_slot {
  NORM1_WEIGHT,
  NORM1_BIAS,
  QKV_WEIGHT, /* query, key and value below one another: [3 * width, width] */
  QUERY_BIAS, /* the key needs none: it would add the same to all scores of a row */
  VALUE_BIAS,
  PROJECTION_WEIGHT,
  PROJECTION_BIAS,
  NORM2_WEIGHT,
  NORM2_BIAS,
  UP_WEIGHT, /* [4 * width, width] */
  UP_BIAS,
  DOWN_WEIGHT, /* [width, 4 * width] */
  DOWN_BIAS,
  TOKEN_EMBEDDING, /* [256, width] */
  POSITION_EMBEDDING,
  FINAL_NORM_WEIGHT,
  FINAL_NORM_BIAS,
  HEAD_WEIGHT, /* [256, width]; a tied head is the token embedding again */
  SLOT_COUNT
};

struct gpt_weights {
  const float *of[SLOT_COUNT];
};
struct gpt_gradients {
  struct gradient of[SLOT_COUNT];
};

/** What a block's forward pass leaves for its backward pass; rows are sequences * tokens. */
struct block_activations {
  float *norm1;         /* [rows, width] */
  float *qkv;           /* [rows, 3 * width] */
  float *probabilities; /* [sequences, heads, tokens, tokens] */
  float *attention;     /* [rows, width] */
  float *middle;        /* [rows, width]: the residual stream between attention and MLP */
  float *norm2;         /* [rows, width] */
  float *up;            /* [rows, 4 * width] */
  float *gelu;          /* [rows, 4 * width] */
};

/** What any backward pass may overwrite. */
struct gpt_scratch {
  float *qkv;    /* [rows, 3 * width] */
  float *hidden; /* [rows, 4 * width] */
  float *narrow; /* [rows, width] */
  float *square; /* [device_parallel_heads, tokens, tokens] */
  double *sums;  /* [rows] */
};

/** x [rows, width] = token embedding + position embedding */
void embedding_forward(float *x, const uint8_t *tokens, const struct gpt_weights *weights,
                       const struct gpt_shape *shape);
void embedding_backward(struct gpt_gradients *gradients, const float *d_x, const uint8_t *tokens,
                        const struct gpt_shape *shape);

/** y = the block's output for x; pre-norm: y = m + mlp(norm2(m)), m = x + attention(norm1(x)). */
void block_forward(float *y, const float *x, const struct gpt_weights *weights, struct block_activations *kept,
                   const struct gpt_shape *shape);
/** d is dy on entry and dx on return. */
void block_backward(float *d, const float *x, const struct gpt_weights *weights, struct gpt_gradients *gradients,
                    const struct block_activations *kept, struct gpt_scratch *scratch, const struct gpt_shape *shape);

/** norm [rows, width] and logits [rows, 256] for the last block's output x. */
void head_forward(float *norm, float *logits, const float *x, const struct gpt_weights *weights,
                  const struct gpt_shape *shape);
/** Adds the mean cross entropy in nats to *loss; logits become the gradient of that mean. */
void head_loss(double *loss, float *logits, const uint8_t *targets, struct gpt_scratch *scratch,
               const struct gpt_shape *shape);
/** d [rows, width] becomes dx; norm and d_logits are what head_forward and head_loss left. */
void head_backward(float *d, const float *x, const float *norm, const float *d_logits,
                   const struct gpt_weights *weights, struct gpt_gradients *gradients, struct gpt_scratch *scratch,
                   const struct gpt_shape *shape);

#ifdef __cplusplus
}
#endif

#endif
