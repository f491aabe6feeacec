/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm (Ba et al. 2016) where a bias is given, RMSNorm (Zhang and Sennrich 2019) where it is NULL. */
#ifndef TRAIN_GPT_NORM_H
#define TRAIN_GPT_NORM_H

#include <stddef.h>

#include "linear.h"

/** out = (in - mean) * rstd * weight + bias, row by row; RMSNorm takes the mean as 0. */
void norm_forward(float *out, const float *in, const float *weight, const float *bias, size_t rows, size_t width);

/**
 * Adds the input's gradient to d_in, where the residual stream's gradient already is. The rows' statistics are taken
 * again from the input: cheaper than keeping them apart for every norm of every layer.
 */
void norm_backward(float *d_in, struct gradient d_weight, struct gradient d_bias, const float *d_out, const float *in,
                   const float *weight, size_t rows, size_t width);

#endif
