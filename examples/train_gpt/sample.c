/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "random.h"
#include "step.h"

/* Logits after one sequence of `tokens` bytes. Every rank must come here: a gather is collective. */
static void predict(struct trainer *trainer, size_t tokens, float *logits) {
  struct model *model = &trainer->model;
  struct workspace *work = &trainer->workspace;
  struct gpt_weights weights;
  struct gpt_shape shape = trainer->shape;
  shape.sequences = 1;
  shape.tokens = tokens;
  model_unshard(model, PART_EMBEDDING, 0, FSDP_EVAL, &weights);
  embedding_forward(work->x[0], work->tokens, &weights, &shape);
  model_reshard(model, PART_EMBEDDING, 0, FSDP_EVAL);
  for (size_t i = 0; i < shape.layers; ++i) {
    model_unshard(model, PART_BLOCK, i, FSDP_EVAL, &weights);
    block_forward(work->x[i + 1], work->x[i], &weights, &work->kept[0], &shape);
    model_reshard(model, PART_BLOCK, i, FSDP_EVAL);
  }
  model_unshard(model, PART_HEAD, 0, FSDP_EVAL, &weights);
  head_forward(work->norm, work->logits, work->x[shape.layers], &weights, &shape);
  model_reshard(model, PART_HEAD, 0, FSDP_EVAL);
  device_download(shape.device, logits, work->logits + (tokens - 1) * VOCABULARY, VOCABULARY * sizeof *logits);
}

/* One byte with the model's probabilities, sharpened a little; uniform in (0, 1) decides. */
static uint8_t choose(const float *logits, double uniform) {
  const double sharpness = 1.0 / 0.8;
  double weights[VOCABULARY], total = 0.0, maximum = logits[0];
  for (int i = 1; i < VOCABULARY; ++i) maximum = logits[i] > maximum ? logits[i] : maximum;
  for (int i = 0; i < VOCABULARY; ++i) total += weights[i] = exp(sharpness * (logits[i] - maximum));
  double left = uniform * total;
  for (int i = 0; i < VOCABULARY; ++i) {
    left -= weights[i];
    if (left < 0.0) return (uint8_t)i;
  }
  return VOCABULARY - 1;
}

void sample_text(struct trainer *trainer, uint8_t *text, size_t count) {
  struct workspace *work = &trainer->workspace;
  uint8_t *window = work->rows;
  float logits[VOCABULARY];
  const size_t context = trainer->shape.tokens;
  size_t used = 1;
  window[0] = '\n';
  for (size_t i = 0; i < count; ++i) {
    device_upload(work->device, work->tokens, window, used);
    predict(trainer, used, logits);
    text[i] = choose(logits, random_uniform(~trainer->options->seed, i));
    if (used == context) memmove(window, window + 1, --used);
    window[used++] = text[i];
  }
}
