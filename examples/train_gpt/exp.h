/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TRAIN_GPT_EXP_H
#define TRAIN_GPT_EXP_H

#include <stdint.h>
#include <string.h>

/**
 * e^x to about one part in 10^7, by the reduction and polynomial of Cephes' expf (Moshier). Without a call or a branch
 * a compiler can vectorize the loops around it, which libm's expf prevents: softmax and GELU would else cost as much as
 * the matrix products.
 */
static inline float exp_fast(float x) {
  /* Narrower than float's range, so that products with the result do not become subnormal, which is slow. */
  x = x < -60.0f ? -60.0f : x;
  x = x > 60.0f ? 60.0f : x;
  const float round = 12582912.0f; /* 1.5 * 2^23: adding and subtracting it rounds to an integer */
  const float n = (x * 1.44269504f + round) - round;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float mantissa = p * r * r + r + 1.0f;
  const int32_t bits = (int32_t)(((uint32_t)(int32_t)n + 127u) << 23);
  float power;
  memcpy(&power, &bits, sizeof power);
  return mantissa * power;
}

#endif
