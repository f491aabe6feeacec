/* SPDX-License-Identifier: Apache-2.0 */
/* Random numbers by counter: a number depends only on its key and index, not on the rank or the order of the calls. */
#ifndef TRAIN_GPT_RANDOM_H
#define TRAIN_GPT_RANDOM_H

#include <math.h>
#include <stdint.h>

/** The finalizer of SplitMix64 (Steele et al. 2014). */
static inline uint64_t random_mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static inline uint64_t random_bits(uint64_t key, uint64_t index) { return random_mix(random_mix(key) ^ index); }

/** In (0, 1). */
static inline double random_uniform(uint64_t key, uint64_t index) {
  return ((double)(random_bits(key, index) >> 11) + 0.5) * 0x1p-53;
}

/** Mean 0, deviation 1, by Box and Muller. */
static inline double random_normal(uint64_t key, uint64_t index) {
  return sqrt(-2.0 * log(random_uniform(key, 2 * index))) * cos(6.283185307179586 * random_uniform(key, 2 * index + 1));
}

#endif
