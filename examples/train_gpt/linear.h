/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products over rows of activations; a weight is [out_width, in_width] in C order, as PyTorch has it. */
#ifndef TRAIN_GPT_LINEAR_H
#define TRAIN_GPT_LINEAR_H

#include <stddef.h>

/** Where a gradient goes: beta 0 overwrites data, beta 1 adds to it (fsdp_acquire_grad's *accumulate). */
struct gradient {
  float *data;
  float beta;
};

/** out = beta * out + in weight^T */
void linear_forward(float *out, const float *in, const float *weight, size_t rows, size_t in_width, size_t out_width,
                    float beta);
/** d_in = d_out weight */
void linear_backward_input(float *d_in, const float *d_out, const float *weight, size_t rows, size_t in_width,
                           size_t out_width);
/** d_weight = beta * d_weight + d_out^T in */
void linear_backward_weight(struct gradient d_weight, const float *d_out, const float *in, size_t rows, size_t in_width,
                            size_t out_width);

/** Add a bias to rows that lie stride elements apart. */
void bias_forward(float *out, const float *bias, size_t rows, size_t width, size_t stride);
/** d_bias = beta * d_bias + sum over the rows of d_out */
void bias_backward(struct gradient d_bias, const float *d_out, size_t rows, size_t width, size_t stride);

/** Zero a gradient that is to be overwritten, so that the sums after it can simply add. */
void gradient_begin(struct gradient gradient, size_t count);

#endif
