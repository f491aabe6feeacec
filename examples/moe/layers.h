/* SPDX-License-Identifier: Apache-2.0 */
/* The math of the layers. It knows no ranks: each function takes rows of tokens, and a token's numbers do not depend on
 * the other rows. Matrices are [out][in], rows of tokens [row][WIDTH]. */
#ifndef MOE_LAYERS_H
#define MOE_LAYERS_H

#include <stdint.h>

/** y = x W^T, and its input's gradient, which is added: dx += dy W. */
void linear_forward(float *y, const float *w, const float *x, int rows, int out, int in);
void linear_backward(float *dx, const float *w, const float *dy, int rows, int out, int in);

/**
 * The gradient of W. The rows are those of `parts` parts, one part after the other, row_count[p] rows of each. Each
 * part is summed by itself, as ranks that have one part each do: so the bits do not depend on how many parts a rank
 * has.
 */
void linear_weight_grad(float *dw, const float *dy, const float *x, const int *row_count, int parts, int out, int in);

/** x + tanh(x W^T + b). Keeps tanh for the backward pass. */
void dense_forward(float *y, float *tanh_kept, const float *w, const float *b, const float *x, int rows);
/** In place: the gradient of y becomes that of x. du: the gradient of x W^T + b. */
void dense_backward(float *d, float *du, const float *tanh_kept, const float *w, int rows);

/** The expert that each token goes to, top-1 of softmax(x R^T), and all probabilities. */
void router_forward(int32_t *expert, float *probability, const float *router, const float *x, int rows);
/** du: the gradient of x R^T. dgate: that of the chosen probability, which scales the expert's output. */
void router_backward(float *du, const float *dgate, const int32_t *expert, const float *probability, int rows);

/** An expert: down relu(up x). Keeps relu for the backward pass. */
void expert_forward(float *y, float *relu_kept, const float *up, const float *down, const float *x, int rows);
/** dx is set; du: the gradient of up x. */
void expert_backward(float *dx, float *du, const float *relu_kept, const float *up, const float *down, const float *dy,
                     int rows);

/** The losses' sum; the logits become their own gradients of the mean over PART_TOKENS tokens. */
double cross_entropy(float *logits, const int32_t *targets, int rows);

#endif
