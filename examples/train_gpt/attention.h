/* SPDX-License-Identifier: Apache-2.0 */
/* Causal multi-head attention over rows of (query, key, value), each width wide and cut into heads. */
#ifndef TRAIN_GPT_ATTENTION_H
#define TRAIN_GPT_ATTENTION_H

#include <stddef.h>

struct attention_shape {
  size_t sequences;
  size_t tokens; /* of each sequence */
  size_t heads;
  size_t width;
};

/** out [sequences * tokens, width]; probabilities [sequences, heads, tokens, tokens] are kept for the backward pass. */
void attention_forward(float *out, float *probabilities, const float *qkv, const struct attention_shape *shape);

/** d_qkv is overwritten; scratch has tokens * tokens elements. */
void attention_backward(float *d_qkv, const float *d_out, const float *probabilities, const float *qkv, float *scratch,
                        const struct attention_shape *shape);

#endif
