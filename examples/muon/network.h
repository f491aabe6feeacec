/* SPDX-License-Identifier: Apache-2.0 */
/* A network of two layers that learns another one: y = w2 tanh(w1 x + b1) + b2. */
#ifndef MUON_NETWORK_H
#define MUON_NETWORK_H

enum { INPUTS = 16, HIDDEN = 48, OUTPUTS = 8, PARAMS = 4 };
enum { W1, B1, W2, B2 };

extern const int network_counts[PARAMS];

/* The weights that every run begins with; `teacher`: those that the network is to learn. */
void network_initial(int param, int teacher, float *weights);
/* Adds the gradients of sample number `sample` of step `step`, and returns its loss. Both are rounded to multiples of
 * 2^-22, so that sums of them are exact: they have the same bits in whatever order ranks add them. */
double network_sample(const float *const weights[PARAMS], const float *const teacher[PARAMS],
                      float *const grads[PARAMS], int step, int sample);

#endif
