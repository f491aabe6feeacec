/* SPDX-License-Identifier: Apache-2.0 */
#include "linear.h"

#include <cblas.h>
#include <string.h>

#include "clones.h"

void linear_forward(float *out, const float *in, const float *weight, size_t rows, size_t in_width, size_t out_width,
                    float beta) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)out_width, (int)in_width, 1.0f, in,
              (int)in_width, weight, (int)in_width, beta, out, (int)out_width);
}

void linear_backward_input(float *d_in, const float *d_out, const float *weight, size_t rows, size_t in_width,
                           size_t out_width) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)in_width, (int)out_width, 1.0f, d_out,
              (int)out_width, weight, (int)in_width, 0.0f, d_in, (int)in_width);
}

void linear_backward_weight(struct gradient d_weight, const float *d_out, const float *in, size_t rows, size_t in_width,
                            size_t out_width) {
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)out_width, (int)in_width, (int)rows, 1.0f, d_out,
              (int)out_width, in, (int)in_width, d_weight.beta, d_weight.data, (int)in_width);
}

CLONES void bias_forward(float *out, const float *bias, size_t rows, size_t width, size_t stride) {
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < width; ++i) out[row * stride + i] += bias[i];
  }
}

CLONES void bias_backward(struct gradient d_bias, const float *d_out, size_t rows, size_t width, size_t stride) {
  gradient_begin(d_bias, width);
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = 0; i < width; ++i) d_bias.data[i] += d_out[row * stride + i];
  }
}

void gradient_begin(struct gradient gradient, size_t count) {
  if (gradient.beta == 0.0f) memset(gradient.data, 0, count * sizeof *gradient.data);
}
