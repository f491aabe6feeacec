/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load_hf: a GPT-2 shaped model out of a Hugging Face folder, sharded over the ranks, one layer whole at a time.
 *
 *   python3 make_folder.py DIR              such a folder, with random weights
 *   fsdp-run -n 3 load_hf DIR 5 17 42       the logits of the token after these
 *   python3 check.py DIR LOGITS 5 17 42     the same, computed in another language
 *
 * The sizes are those that make_folder.py writes into config.json; a program for real models reads it.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"

enum { LAYERS = 2, WIDTH = 48, HEADS = 3, CONTEXT = 32, VOCABULARY = 96, HIDDEN = 4 * WIDTH };

/* The parameters of this program, in the order in which they are declared. */
enum {
  NORM1_W,
  NORM1_B,
  QKV_W,
  QKV_B,
  PROJECTION_W,
  PROJECTION_B,
  NORM2_W,
  NORM2_B,
  UP_W,
  UP_B,
  DOWN_W,
  DOWN_B,
  PER_LAYER
};
enum { TOKENS, POSITIONS, NORM_W, NORM_B, OUTER };

struct declared {
  const char *name;
  uint64_t shape[2];
  uint32_t dimensions;
};
static const struct declared outer[OUTER] = {{"tokens", {VOCABULARY, WIDTH}, 2},
                                             {"positions", {CONTEXT, WIDTH}, 2},
                                             {"norm.weight", {WIDTH}, 1},
                                             {"norm.bias", {WIDTH}, 1}};
static const struct declared of_layer[PER_LAYER] = {{"norm1.weight", {WIDTH}, 1},
                                                    {"norm1.bias", {WIDTH}, 1},
                                                    {"qkv.weight", {3 * WIDTH, WIDTH}, 2},
                                                    {"qkv.bias", {3 * WIDTH}, 1},
                                                    {"projection.weight", {WIDTH, WIDTH}, 2},
                                                    {"projection.bias", {WIDTH}, 1},
                                                    {"norm2.weight", {WIDTH}, 1},
                                                    {"norm2.bias", {WIDTH}, 1},
                                                    {"up.weight", {HIDDEN, WIDTH}, 2},
                                                    {"up.bias", {HIDDEN}, 1},
                                                    {"down.weight", {WIDTH, HIDDEN}, 2},
                                                    {"down.bias", {WIDTH}, 1}};

/* GPT-2 keeps the matrices of its layers as [in, out]; here, as nearly everywhere, they are [out, in]. */
#define TRANSPOSED 0, 0, 0, FSDP_RENAME_TRANSPOSED, 0
static const fsdp_rename renames[] = {{.theirs = "wte.weight", .ours = "tokens"},
                                      {.theirs = "wpe.weight", .ours = "positions"},
                                      {.theirs = "ln_f.weight", .ours = "norm.weight"},
                                      {.theirs = "ln_f.bias", .ours = "norm.bias"},
                                      {.theirs = "h.*.ln_1.weight", .ours = "layers.*.norm1.weight"},
                                      {.theirs = "h.*.ln_1.bias", .ours = "layers.*.norm1.bias"},
                                      {"h.*.attn.c_attn.weight", "layers.*.qkv.weight", TRANSPOSED},
                                      {.theirs = "h.*.attn.c_attn.bias", .ours = "layers.*.qkv.bias"},
                                      {"h.*.attn.c_proj.weight", "layers.*.projection.weight", TRANSPOSED},
                                      {.theirs = "h.*.attn.c_proj.bias", .ours = "layers.*.projection.bias"},
                                      {.theirs = "h.*.ln_2.weight", .ours = "layers.*.norm2.weight"},
                                      {.theirs = "h.*.ln_2.bias", .ours = "layers.*.norm2.bias"},
                                      {"h.*.mlp.c_fc.weight", "layers.*.up.weight", TRANSPOSED},
                                      {.theirs = "h.*.mlp.c_fc.bias", .ours = "layers.*.up.bias"},
                                      {"h.*.mlp.c_proj.weight", "layers.*.down.weight", TRANSPOSED},
                                      {.theirs = "h.*.mlp.c_proj.bias", .ours = "layers.*.down.bias"}};

static fsdp_group *declare(fsdp_model *model, const char *group_name, const char *prefix, const struct declared *list,
                           uint64_t count) {
  fsdp_param params[PER_LAYER];
  char names[PER_LAYER][64];
  fsdp_group *group = NULL;
  for (uint64_t i = 0; i < count; ++i) {
    snprintf(names[i], sizeof names[i], "%s%s", prefix, list[i].name);
    params[i] = (fsdp_param)FSDP_PARAM_INIT;
    params[i].name = names[i], params[i].shape = list[i].shape, params[i].dimension_count = list[i].dimensions;
    params[i].flags = FSDP_PARAM_FROZEN; /* to be read only: no gradients, no states */
  }
  check(fsdp_create_group(model, group_name, params, count, sizeof *params, NULL, &group));
  return group;
}

/* Shows whole weights, which stay until fsdp_reshard. */
static void view(fsdp_group *group, uint64_t count, const float **weights) {
  fsdp_tensor tensors[PER_LAYER];
  check(fsdp_unshard(group, FSDP_EVAL, 0, NULL));
  check(fsdp_get_params(group, FSDP_EVAL, tensors, count, sizeof *tensors));
  for (uint64_t i = 0; i < count; ++i) weights[i] = tensors[i].data;
}

static void normalize(float *to, const float *from, const float *weight, const float *bias) {
  double mean = 0.0, variance = 0.0;
  for (int i = 0; i < WIDTH; ++i) mean += (double)from[i] / WIDTH;
  for (int i = 0; i < WIDTH; ++i) variance += ((double)from[i] - mean) * ((double)from[i] - mean) / WIDTH;
  for (int i = 0; i < WIDTH; ++i)
    to[i] = (float)(((double)from[i] - mean) / sqrt(variance + 1e-5)) * weight[i] + bias[i];
}

static void multiply(float *to, const float *from, const float *weight, const float *bias, int rows, int columns) {
  for (int r = 0; r < rows; ++r) {
    double sum = bias ? (double)bias[r] : 0.0;
    for (int c = 0; c < columns; ++c) sum += (double)weight[r * columns + c] * (double)from[c];
    to[r] = (float)sum;
  }
}

static void attend(float *to, const float (*qkv)[3 * WIDTH], int at) {
  enum { SIZE = WIDTH / HEADS };
  for (int head = 0; head < HEADS; ++head) {
    const float *query = qkv[at] + head * SIZE;
    double weights[CONTEXT], all = 0.0, result[SIZE] = {0};
    for (int t = 0; t <= at; ++t) {
      double score = 0.0;
      for (int i = 0; i < SIZE; ++i) score += (double)query[i] * (double)qkv[t][WIDTH + head * SIZE + i];
      all += weights[t] = exp(score / sqrt((double)SIZE));
    }
    for (int t = 0; t <= at; ++t)
      for (int i = 0; i < SIZE; ++i) result[i] += weights[t] / all * (double)qkv[t][2 * WIDTH + head * SIZE + i];
    for (int i = 0; i < SIZE; ++i) to[head * SIZE + i] = (float)result[i];
  }
}

static float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }

static void run_layer(float (*x)[WIDTH], int count, const float *const *w) {
  static float qkv[CONTEXT][3 * WIDTH];
  float normal[WIDTH], part[WIDTH], hidden[HIDDEN];
  for (int t = 0; t < count; ++t) {
    normalize(normal, x[t], w[NORM1_W], w[NORM1_B]);
    multiply(qkv[t], normal, w[QKV_W], w[QKV_B], 3 * WIDTH, WIDTH);
  }
  for (int t = 0; t < count; ++t) {
    attend(normal, (const float(*)[3 * WIDTH]) qkv, t);
    multiply(part, normal, w[PROJECTION_W], w[PROJECTION_B], WIDTH, WIDTH);
    for (int i = 0; i < WIDTH; ++i) x[t][i] += part[i];
    normalize(normal, x[t], w[NORM2_W], w[NORM2_B]);
    multiply(hidden, normal, w[UP_W], w[UP_B], HIDDEN, WIDTH);
    for (int i = 0; i < HIDDEN; ++i) hidden[i] = gelu(hidden[i]);
    multiply(part, hidden, w[DOWN_W], w[DOWN_B], WIDTH, HIDDEN);
    for (int i = 0; i < WIDTH; ++i) x[t][i] += part[i];
  }
}

/* Finds the logits of the token after the last one. */
static void find_logits(float *logits, fsdp_group *ends, fsdp_group *const *layers, const int *tokens, int count) {
  static float x[CONTEXT][WIDTH];
  const float *end[OUTER], *weights[PER_LAYER];
  view(ends, OUTER, end);
  for (int t = 0; t < count; ++t)
    for (int i = 0; i < WIDTH; ++i) x[t][i] = end[TOKENS][tokens[t] * WIDTH + i] + end[POSITIONS][t * WIDTH + i];
  for (int l = 0; l < LAYERS; ++l) {
    view(layers[l], PER_LAYER, weights);
    run_layer(x, count, weights);
    check(fsdp_reshard(layers[l], FSDP_EVAL, 0, NULL));
  }
  float last[WIDTH];
  normalize(last, x[count - 1], end[NORM_W], end[NORM_B]);
  multiply(logits, last, end[TOKENS], NULL, VOCABULARY, WIDTH); /* the head is the embedding */
  check(fsdp_reshard(ends, FSDP_EVAL, 0, NULL));
}

int main(int argc, char **argv) {
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *layers[LAYERS];
  uint32_t rank = 0;
  int tokens[CONTEXT], count = argc - 2;
  if (count < 1 || count > CONTEXT) return fprintf(stderr, "usage: load_hf FOLDER TOKEN... (%d at most)\n", CONTEXT), 2;
  for (int i = 0; i < count; ++i) {
    tokens[i] = atoi(argv[i + 2]);
    if (tokens[i] < 0 || tokens[i] >= VOCABULARY)
      return fprintf(stderr, "load_hf: %s is no token; there are %d\n", argv[i + 2], VOCABULARY), 2;
  }
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_create_model(context, NULL, &model));
  fsdp_group *ends = declare(model, "ends", "", outer, OUTER);
  for (int l = 0; l < LAYERS; ++l) {
    char name[32];
    snprintf(name, sizeof name, "layers.%d.", l);
    layers[l] = declare(model, name, name, of_layer, PER_LAYER);
  }
  check(fsdp_seal_model(model));

  fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
  options.flags = FSDP_LOAD_ALLOW_UNEXPECTED; /* attn.bias, the mask of the attention, is no weight */
  check(fsdp_load_weights(model, argv[1], FSDP_ARRAY(renames), &options, NULL));
  check(fsdp_publish_weights(model, NULL));

  float logits[VOCABULARY];
  find_logits(logits, ends, layers, tokens, count);
  check(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  for (int i = 0; rank == 0 && i < VOCABULARY; ++i) printf("%.9g\n", (double)logits[i]);
  return 0;
}
