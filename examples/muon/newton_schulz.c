/* SPDX-License-Identifier: Apache-2.0 */
#include "newton_schulz.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float *make(size_t count) {
  float *made = calloc(count, sizeof *made);
  if (!made) exit(1);
  return made;
}

static void transpose(float *to, const float *from, int rows, int columns) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
}

/* to = a b^T; a has `rows` rows of `length`, b has `columns` rows of it. */
static void multiply_transposed(float *to, const float *a, const float *b, int rows, int columns, int length) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      float sum = 0.0f;
      for (int i = 0; i < length; ++i) sum += a[r * length + i] * b[c * length + i];
      to[r * columns + c] = sum;
    }
}

/* x <- scale x + b x, where b is `rows` x `rows`. */
static void add_product(float *x, const float *b, float scale, float *room, int rows, int columns) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      float sum = scale * x[r * columns + c];
      for (int i = 0; i < rows; ++i) sum += b[r * rows + i] * x[i * columns + c];
      room[r * columns + c] = sum;
    }
  memcpy(x, room, sizeof *x * (size_t)rows * (size_t)columns);
}

/* One step: x <- 3.4445 x + (-4.775 a + 2.0315 a a) x with a = x x^T. */
static void iterate(float *x, float *a, float *b, float *room, int rows, int columns) {
  multiply_transposed(a, x, x, rows, rows, columns);
  multiply_transposed(b, a, a, rows, rows, rows); /* a is symmetric */
  for (int i = 0; i < rows * rows; ++i) b[i] = -4.775f * a[i] + 2.0315f * b[i];
  add_product(x, b, 3.4445f, room, rows, columns);
}

static void divide_by_norm(float *x, int count) {
  double squares = 0.0;
  for (int i = 0; i < count; ++i) squares += (double)x[i] * (double)x[i];
  const float norm = (float)sqrt(squares) + 1e-7f;
  for (int i = 0; i < count; ++i) x[i] /= norm;
}

/* The products are smaller if there are fewer rows than columns. */
void orthogonalize(float *matrix, int rows, int columns) {
  const int tall = rows > columns, short_side = tall ? columns : rows, long_side = tall ? rows : columns;
  const size_t count = (size_t)rows * (size_t)columns, square = (size_t)short_side * (size_t)short_side;
  float *x = make(count), *room = make(count), *a = make(square), *b = make(square);
  if (tall)
    transpose(x, matrix, rows, columns);
  else
    memcpy(x, matrix, count * sizeof *x);
  divide_by_norm(x, (int)count);
  for (int step = 0; step < 5; ++step) iterate(x, a, b, room, short_side, long_side);
  if (tall)
    transpose(matrix, x, columns, rows);
  else
    memcpy(matrix, x, count * sizeof *x);
  free(x), free(room), free(a), free(b);
}
