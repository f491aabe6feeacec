/* SPDX-License-Identifier: Apache-2.0 */
#include "attention.h"

#include <cblas.h>
#include <math.h>

#include "clones.h"
#include "exp.h"

/* Where one head of one sequence begins. Query, key and value are width apart; rows are 3 * width apart. */
struct head {
  size_t qkv;
  size_t out;
  size_t probabilities;
};

static struct head find_head(const struct attention_shape *shape, size_t sequence, size_t head) {
  const size_t first_row = sequence * shape->tokens;
  const size_t column = head * (shape->width / shape->heads);
  return (struct head){first_row * 3 * shape->width + column, first_row * shape->width + column,
                       (sequence * shape->heads + head) * shape->tokens * shape->tokens};
}

/* Row i sees the tokens 0..i: their scores become probabilities, the rest becomes 0. */
CLONES static void softmax_row(float *row, size_t visible, size_t tokens) {
  float maximum = row[0];
  for (size_t j = 1; j < visible; ++j) maximum = row[j] > maximum ? row[j] : maximum;
  for (size_t j = 0; j < visible; ++j) row[j] = exp_fast(row[j] - maximum);
  float total = 0.0f;
  for (size_t j = 0; j < visible; ++j) total += row[j];
  const float factor = 1.0f / total;
  for (size_t j = 0; j < visible; ++j) row[j] *= factor;
  for (size_t j = visible; j < tokens; ++j) row[j] = 0.0f;
}

static void forward_head(float *out, float *p, const float *query, const struct attention_shape *shape) {
  const int tokens = (int)shape->tokens, size = (int)(shape->width / shape->heads), stride = 3 * (int)shape->width;
  const float *key = query + shape->width, *value = key + shape->width;
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tokens, tokens, size, 1.0f / sqrtf((float)size), query, stride,
              key, stride, 0.0f, p, tokens);
  for (size_t i = 0; i < shape->tokens; ++i) softmax_row(p + i * shape->tokens, i + 1, shape->tokens);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, tokens, size, tokens, 1.0f, p, tokens, value, stride, 0.0f,
              out, (int)shape->width);
}

void attention_forward(float *out, float *probabilities, const float *qkv, const struct attention_shape *shape) {
  for (size_t s = 0; s < shape->sequences; ++s) {
    for (size_t h = 0; h < shape->heads; ++h) {
      const struct head at = find_head(shape, s, h);
      forward_head(out + at.out, probabilities + at.probabilities, qkv + at.qkv, shape);
    }
  }
}

/* Through the softmax: d_score = p (d_p - sum(p d_p)). p is 0 beyond the diagonal, and so is d_score. */
CLONES static void softmax_backward(float *d_p, const float *p, size_t tokens) {
  for (size_t i = 0; i < tokens; ++i, d_p += tokens, p += tokens) {
    float total = 0.0f;
    for (size_t j = 0; j <= i; ++j) total += p[j] * d_p[j];
    for (size_t j = 0; j < tokens; ++j) d_p[j] = p[j] * (d_p[j] - total);
  }
}

static void backward_head(float *d_query, const float *d_out, const float *p, const float *query, float *d_p,
                          const struct attention_shape *shape) {
  const int tokens = (int)shape->tokens, width = (int)shape->width, size = width / (int)shape->heads;
  const int stride = 3 * width;
  const float scale = 1.0f / sqrtf((float)size);
  const float *key = query + width, *value = key + width;
  float *d_key = d_query + width, *d_value = d_key + width;
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, tokens, size, tokens, 1.0f, p, tokens, d_out, width, 0.0f,
              d_value, stride);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, tokens, tokens, size, 1.0f, d_out, width, value, stride, 0.0f,
              d_p, tokens);
  softmax_backward(d_p, p, shape->tokens);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, tokens, size, tokens, scale, d_p, tokens, key, stride, 0.0f,
              d_query, stride);
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, tokens, size, tokens, scale, d_p, tokens, query, stride, 0.0f,
              d_key, stride);
}

void attention_backward(float *d_qkv, const float *d_out, const float *probabilities, const float *qkv, float *scratch,
                        const struct attention_shape *shape) {
  for (size_t s = 0; s < shape->sequences; ++s) {
    for (size_t h = 0; h < shape->heads; ++h) {
      const struct head at = find_head(shape, s, h);
      backward_head(d_qkv + at.qkv, d_out + at.out, probabilities + at.probabilities, qkv + at.qkv, scratch, shape);
    }
  }
}
