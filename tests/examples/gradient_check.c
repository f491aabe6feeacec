/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compares the example's backward pass with central differences of its forward pass. The sources of train_gpt are
 * compiled here with float meaning double, so that the comparison holds to 1e-7 and rounding does not hide errors.
 */
#include <cblas.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __clang__
#pragma clang diagnostic ignored "-Wkeyword-macro"
#endif
/* exp.h works on the bits of a float, so these functions replace it. */
#define TRAIN_GPT_EXP_H
#define exp_fast exp
#define float double
#define sqrtf sqrt
#define cblas_sgemm cblas_dgemm

#include "../../examples/train_gpt/attention.c"
#include "../../examples/train_gpt/block.c"
#include "../../examples/train_gpt/embedding.c"
#include "../../examples/train_gpt/gelu.c"
#include "../../examples/train_gpt/head.c"
#include "../../examples/train_gpt/linear.c"
#include "../../examples/train_gpt/norm.c"

enum { LAYERS = 2, WIDTH = 18, HEADS = 3, SEQUENCES = 2, TOKENS = 5, ROWS = SEQUENCES * TOKENS, PARTS = LAYERS + 1 };

static const struct gpt_shape shape = {LAYERS, WIDTH, HEADS, SEQUENCES, TOKENS, NULL};
static const size_t slot_count[SLOT_COUNT] = {WIDTH,
                                              WIDTH,
                                              3 * WIDTH *WIDTH,
                                              WIDTH,
                                              WIDTH,
                                              WIDTH *WIDTH,
                                              WIDTH,
                                              WIDTH,
                                              WIDTH,
                                              4 * WIDTH *WIDTH,
                                              4 * WIDTH,
                                              4 * WIDTH *WIDTH,
                                              WIDTH,
                                              VOCABULARY *WIDTH,
                                              TOKENS *WIDTH,
                                              WIDTH,
                                              WIDTH,
                                              VOCABULARY *WIDTH};

/* Part 0 consists of the embedding and the head; part i is block i - 1. */
struct network {
  int rms, tied;
  struct gpt_weights weights[PARTS];
  struct gpt_gradients gradients[PARTS];
  struct block_activations kept[LAYERS];
  struct gpt_scratch scratch;
  double *x[LAYERS + 1], *d, *norm, *logits;
  uint8_t tokens[ROWS], targets[ROWS];
};

static uint64_t state = 1;
static double uniform(void) { /* xorshift64*, in [-1, 1) */
  state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
  return (double)(state * 2685821657736338717u >> 11) * 0x1p-52 - 1.0;
}

static double *allocate(size_t count, double scale) {
  double *data = malloc(count * sizeof *data);
  if (!data) exit(1);
  for (size_t i = 0; i < count; ++i) data[i] = scale * uniform();
  return data;
}

static int has_slot(const struct network *n, int part, int slot) {
  if ((part == 0) != (slot >= TOKEN_EMBEDDING)) return 0;
  return !(n->rms && (slot == NORM1_BIAS || slot == NORM2_BIAS || slot == FINAL_NORM_BIAS)) &&
         !(n->tied && slot == HEAD_WEIGHT);
}

static void create(struct network *n, int rms, int tied) {
  memset(n, 0, sizeof *n);
  n->rms = rms, n->tied = tied;
  for (int part = 0; part < PARTS; ++part) {
    for (int slot = 0; slot < SLOT_COUNT; ++slot) {
      if (!has_slot(n, part, slot)) continue;
      n->weights[part].of[slot] = allocate(slot_count[slot], 0.6);
      n->gradients[part].of[slot].data = allocate(slot_count[slot], 1.0);
    }
  }
  if (tied) n->weights[0].of[HEAD_WEIGHT] = n->weights[0].of[TOKEN_EMBEDDING];
  if (tied) n->gradients[0].of[HEAD_WEIGHT].data = n->gradients[0].of[TOKEN_EMBEDDING].data;
  for (int i = 0; i < LAYERS; ++i) {
    struct block_activations *kept = &n->kept[i];
    kept->norm1 = allocate(ROWS * WIDTH, 1), kept->qkv = allocate(3 * ROWS * WIDTH, 1);
    kept->probabilities = allocate(SEQUENCES * HEADS * TOKENS * TOKENS, 1), kept->attention = allocate(ROWS * WIDTH, 1);
    kept->middle = allocate(ROWS * WIDTH, 1), kept->norm2 = allocate(ROWS * WIDTH, 1);
    kept->up = allocate(4 * ROWS * WIDTH, 1), kept->gelu = allocate(4 * ROWS * WIDTH, 1);
  }
  for (int i = 0; i <= LAYERS; ++i) n->x[i] = allocate(ROWS * WIDTH, 1);
  n->d = allocate(ROWS * WIDTH, 1), n->norm = allocate(ROWS * WIDTH, 1), n->logits = allocate(ROWS * VOCABULARY, 1);
  n->scratch = (struct gpt_scratch){allocate(3 * ROWS * WIDTH, 1), allocate(4 * ROWS * WIDTH, 1),
                                    allocate(ROWS * WIDTH, 1), allocate(TOKENS * TOKENS, 1), NULL};
  for (int i = 0; i < ROWS; ++i) n->tokens[i] = (uint8_t)(7 * i % 11), n->targets[i] = (uint8_t)(5 * i % 13);
}

static double forward(struct network *n) {
  embedding_forward(n->x[0], n->tokens, &n->weights[0], &shape);
  for (int i = 0; i < LAYERS; ++i) block_forward(n->x[i + 1], n->x[i], &n->weights[i + 1], &n->kept[i], &shape);
  head_forward(n->norm, n->logits, n->x[LAYERS], &n->weights[0], &shape);
  double loss = 0.0;
  head_loss(&loss, n->logits, n->targets, &n->scratch, &shape);
  return loss;
}

/* beta 0 overwrites, 1 adds; a tied head writes first, so the embedding always adds to it. */
static void backward(struct network *n, double beta) {
  for (int part = 0; part < PARTS; ++part) {
    for (int slot = 0; slot < SLOT_COUNT; ++slot) n->gradients[part].of[slot].beta = beta;
  }
  if (n->tied) n->gradients[0].of[TOKEN_EMBEDDING].beta = 1.0;
  head_backward(n->d, n->x[LAYERS], n->norm, n->logits, &n->weights[0], &n->gradients[0], &n->scratch, &shape);
  for (int i = LAYERS - 1; i >= 0; --i) {
    block_backward(n->d, n->x[i], &n->weights[i + 1], &n->gradients[i + 1], &n->kept[i], &n->scratch, &shape);
  }
  embedding_backward(&n->gradients[0], n->d, n->tokens, &shape);
}

static double difference(struct network *n, double *weight) {
  const double h = 1e-5, kept = *weight;
  *weight = kept + h;
  const double above = forward(n);
  *weight = kept - h;
  const double below = forward(n);
  *weight = kept;
  return (above - below) / (2 * h);
}

/* Checks at most 60 elements of each parameter, spread evenly. */
static double check_slot(struct network *n, int part, int slot) {
  double *weight = (double *)n->weights[part].of[slot];
  const double *gradient = n->gradients[part].of[slot].data;
  double worst = 0.0;
  for (size_t i = 0; i < slot_count[slot]; i += 1 + slot_count[slot] / 60) {
    /* The backward pass ran twice: once overwriting, once adding. */
    const double error = fabs(difference(n, weight + i) - gradient[i] / 2.0);
    worst = error > worst ? error : worst;
  }
  return worst;
}

static int check(int rms, int tied) {
  static struct network n; /* small and short-lived: what it allocates ends with the program */
  create(&n, rms, tied);
  for (int pass = 0; pass < 2; ++pass) {
    forward(&n);
    backward(&n, pass);
  }
  int failures = 0;
  double worst = 0.0;
  for (int part = 0; part < PARTS; ++part) {
    for (int slot = 0; slot < SLOT_COUNT; ++slot) {
      if (!has_slot(&n, part, slot)) continue;
      const double error = check_slot(&n, part, slot);
      worst = error > worst ? error : worst;
      if (!(error < 1e-8)) ++failures, printf("part %d slot %d: differs by %g\n", part, slot, error);
    }
  }
  printf("%s, %s head: largest difference %.1e\n", rms ? "RMSNorm" : "LayerNorm", tied ? "tied" : "untied", worst);
  return failures;
}

int main(void) {
  int failures = 0;
  for (int i = 0; i < 4; ++i) failures += check(i & 1, i >> 1);
  return failures ? 1 : 0;
}
