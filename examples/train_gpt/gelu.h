/* SPDX-License-Identifier: Apache-2.0 */
/* GELU in its tanh form (Hendrycks and Gimpel 2016), written as x * sigmoid(2u) since (1 + tanh u) / 2 = sigmoid(2u).
 */
#ifndef TRAIN_GPT_GELU_H
#define TRAIN_GPT_GELU_H

#include <stddef.h>

void gelu_forward(float *out, const float *in, size_t count);
/** d is the gradient of the output on entry and of the input on return. */
void gelu_backward(float *d, const float *in, size_t count);

#endif
