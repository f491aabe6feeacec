/* SPDX-License-Identifier: Apache-2.0 */
#include "norm.h"

#include <math.h>

#include "clones.h"

#define NORM_EPSILON 1e-5f
enum { LANES = 16 };

struct row_statistics {
  float mean;
  float rstd; /* 1 / standard deviation */
};

static float add_lanes(const float *lanes) {
  float sum = 0.0f;
  for (int i = 0; i < LANES; ++i) sum += lanes[i];
  return sum;
}

/* The sum of (a - shift)(b - shift). In lanes, so that the compiler may vectorize without changing the order of a sum.
 */
static float dot(const float *a, const float *b, float shift, size_t count) {
  float lanes[LANES] = {0};
  size_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int k = 0; k < LANES; ++k) lanes[k] += (a[i + k] - shift) * (b[i + k] - shift);
  }
  for (int k = 0; i < count; ++i, ++k) lanes[k] += (a[i] - shift) * (b[i] - shift);
  return add_lanes(lanes);
}

static float sum(const float *a, size_t count) {
  float lanes[LANES] = {0};
  size_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int k = 0; k < LANES; ++k) lanes[k] += a[i + k];
  }
  for (int k = 0; i < count; ++i, ++k) lanes[k] += a[i];
  return add_lanes(lanes);
}

static struct row_statistics measure_row(const float *in, int centered, size_t width) {
  struct row_statistics row = {0.0f, 0.0f};
  if (centered) row.mean = sum(in, width) / (float)width;
  row.rstd = 1.0f / sqrtf(dot(in, in, row.mean, width) / (float)width + NORM_EPSILON);
  return row;
}

CLONES void norm_forward(float *out, const float *in, const float *weight, const float *bias, size_t rows,
                         size_t width) {
  for (size_t r = 0; r < rows; ++r, in += width, out += width) {
    const struct row_statistics row = measure_row(in, bias != NULL, width);
    for (size_t i = 0; i < width; ++i) out[i] = (in[i] - row.mean) * row.rstd * weight[i];
    if (bias) bias_forward(out, bias, 1, width, width);
  }
}

/* With n = (x - mean) rstd and g = d_out weight:  d_in += rstd (g - mean(g) - n mean(g n)); RMSNorm lacks mean(g). */
static void backward_row(float *d_in, float *d_weight, const float *d_out, const float *in, const float *weight,
                         struct row_statistics row, int centered, size_t width) {
  float g_lanes[LANES] = {0}, gn_lanes[LANES] = {0};
  for (size_t i = 0; i < width; ++i) {
    const float n = (in[i] - row.mean) * row.rstd;
    const float g = d_out[i] * weight[i];
    g_lanes[i % LANES] += g;
    gn_lanes[i % LANES] += g * n;
    d_weight[i] += d_out[i] * n;
  }
  const float g_mean = centered ? add_lanes(g_lanes) / (float)width : 0.0f;
  const float gn_mean = add_lanes(gn_lanes) / (float)width;
  for (size_t i = 0; i < width; ++i) {
    const float n = (in[i] - row.mean) * row.rstd;
    d_in[i] += row.rstd * (d_out[i] * weight[i] - g_mean - n * gn_mean);
  }
}

CLONES void norm_backward(float *d_in, struct gradient d_weight, struct gradient d_bias, const float *d_out,
                          const float *in, const float *weight, size_t rows, size_t width) {
  const int centered = d_bias.data != NULL;
  gradient_begin(d_weight, width);
  if (centered) bias_backward(d_bias, d_out, rows, width, width);
  for (size_t r = 0; r < rows; ++r, in += width, d_in += width, d_out += width) {
    const struct row_statistics row = measure_row(in, centered, width);
    backward_row(d_in, d_weight.data, d_out, in, weight, row, centered, width);
  }
}
