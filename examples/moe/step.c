/* SPDX-License-Identifier: Apache-2.0 */
#include "step.h"

#include <string.h>

#include "../check.h"
#include "../train_gpt/random.h"
#include "layers.h"

/* A group's weights are held only while they are read. The gradients of weights read none, so they can be computed
 * later. */
static void hold(fsdp_group *group, fsdp_phase phase) { check(fsdp_unshard(group, phase, 0, NULL)); }
static void give_back(fsdp_group *group, fsdp_phase phase) { check(fsdp_reshard(group, phase, 0, NULL)); }

static void reduce(fsdp_group *group, int is_last) { check(fsdp_reduce_grad(group, is_last ? FSDP_LAST : 0, NULL)); }

/* -- tokens on their way to experts and back --------------------------------------------------------------------- */

static int owner_of(const struct trainer *trainer, int expert) { return expert / trainer->model.experts; }

static void copy_row(float *to, const float *from) { memcpy(to, from, WIDTH * sizeof *to); }

/* Rows go to the ranks that have their tokens' experts, in the order of the tokens. */
static void send_rows(struct trainer *trainer, enum exchange_lane lane, const struct block *block, const float *rows) {
  for (int member = 0; member < trainer->model.expert_parallel; ++member)
    exchange_box(trainer->exchange, lane, member)->count = 0;
  for (int i = 0; i < trainer->tokens; ++i) {
    struct box *box = exchange_box(trainer->exchange, lane, owner_of(trainer, block->expert[i]));
    box->expert[box->count] = block->expert[i];
    box->part[box->count] = trainer->first_part + i / PART_TOKENS;
    copy_row(box->rows[box->count++], rows + i * WIDTH);
  }
  exchange_post(trainer->exchange, lane);
}

/* What experts send back has the order in which it was sent to them. */
static void receive_rows(struct trainer *trainer, enum exchange_lane lane, const struct block *block, float *rows) {
  int next[MOST_RANKS] = {0};
  exchange_wait(trainer->exchange, lane);
  for (int i = 0; i < trainer->tokens; ++i) {
    const int owner = owner_of(trainer, block->expert[i]);
    copy_row(rows + i * WIDTH, exchange_received(trainer->exchange, lane, owner)->rows[next[owner]++]);
  }
}

/* The rows for one of this rank's experts, after `row` rows of others; returns the number of rows then. */
static int take_rows(struct trainer *trainer, struct routed *routed, int expert, int row) {
  for (int member = 0; member < trainer->model.expert_parallel; ++member) {
    const struct box *box = exchange_received(trainer->exchange, LANE_FORWARD, member);
    for (int place = 0; place < box->count; ++place) {
      if (box->expert[place] != trainer->model.first_expert + expert) continue;
      ++routed->rows[expert][box->part[place]];
      routed->member[row] = member, routed->place[row] = place;
      copy_row(routed->in + row++ * WIDTH, box->rows[place]);
    }
  }
  return row;
}

static int count_rows(const struct routed *routed, int expert) {
  int count = 0;
  for (int part = 0; part < PARTS; ++part) count += routed->rows[expert][part];
  return count;
}

static int count_all_rows(const struct trainer *trainer, const struct routed *routed) {
  int count = 0;
  for (int e = 0; e < trainer->model.experts; ++e) count += count_rows(routed, e);
  return count;
}

static void send_back(struct trainer *trainer, enum exchange_lane lane, const struct routed *routed,
                      const float *rows) {
  const int count = count_all_rows(trainer, routed);
  for (int row = 0; row < count; ++row)
    copy_row(exchange_box(trainer->exchange, lane, routed->member[row])->rows[routed->place[row]], rows + row * WIDTH);
  exchange_post(trainer->exchange, lane);
}

/* -- forward ----------------------------------------------------------------------------------------------------- */

/* The target of a token is a fixed function of it. A part's tokens depend on step, micro-batch and part alone. */
static void load_tokens(struct trainer *trainer, struct pass *pass, int number) {
  pass->number = number;
  for (int i = 0; i < trainer->tokens; ++i) {
    const uint64_t part = (uint64_t)(number * PARTS + trainer->first_part + i / PART_TOKENS);
    const double u = random_uniform(trainer->step * MICROBATCHES * PARTS + part, (uint64_t)(i % PART_TOKENS));
    pass->token[i] = (int32_t)(u * u * VOCABULARY); /* some tokens, and so some experts, are frequent */
    pass->target[i] = (pass->token[i] * 37 + 11) % VOCABULARY;
  }
}

static void embedding_forward(struct trainer *trainer, struct pass *pass) {
  fsdp_group *group = trainer->model.embedding;
  hold(group, FSDP_FORWARD);
  const float *weights = model_weights(group, 0, FSDP_FORWARD);
  for (int i = 0; i < trainer->tokens; ++i) copy_row(pass->x[0] + i * WIDTH, weights + pass->token[i] * WIDTH);
  give_back(group, FSDP_FORWARD);
}

/* The dense layer and the router, which sends the tokens to their experts. */
static void dense_group_forward(struct trainer *trainer, struct pass *pass, int number) {
  fsdp_group *group = trainer->model.dense[number];
  struct block *block = &pass->block[number];
  hold(group, FSDP_FORWARD);
  dense_forward(block->dense, block->tanh_kept, model_weights(group, DENSE_WEIGHT, FSDP_FORWARD),
                model_weights(group, DENSE_BIAS, FSDP_FORWARD), pass->x[number], trainer->tokens);
  router_forward(block->expert, block->probability, model_weights(group, DENSE_ROUTER, FSDP_FORWARD), block->dense,
                 trainer->tokens);
  give_back(group, FSDP_FORWARD);
  send_rows(trainer, LANE_FORWARD, block, block->dense);
  for (int i = 0; i < trainer->tokens; ++i) trainer->counts[block->expert[i]] += 1.0;
}

static void expert_group_forward(struct trainer *trainer, struct pass *pass, int number) {
  fsdp_group *group = trainer->model.expert[number];
  struct routed *routed = &pass->block[number].routed;
  exchange_wait(trainer->exchange, LANE_FORWARD);
  memset(routed->rows, 0, sizeof routed->rows);
  hold(group, FSDP_FORWARD);
  const float *up = model_weights(group, EXPERT_UP, FSDP_FORWARD);
  const float *down = model_weights(group, EXPERT_DOWN, FSDP_FORWARD);
  for (int e = 0, row = 0; e < trainer->model.experts; ++e) {
    const int first = row;
    row = take_rows(trainer, routed, e, row);
    expert_forward(routed->out + first * WIDTH, routed->relu_kept + first * HIDDEN, up + e * HIDDEN * WIDTH,
                   down + e * HIDDEN * WIDTH, routed->in + first * WIDTH, row - first);
  }
  give_back(group, FSDP_FORWARD);
  send_back(trainer, LANE_FORWARD, routed, routed->out);
}

static float gate_of(const struct block *block, int token) {
  return block->probability[token * EXPERTS + block->expert[token]];
}

static void add_expert_outputs(struct trainer *trainer, struct pass *pass, int number) {
  struct block *block = &pass->block[number];
  receive_rows(trainer, LANE_FORWARD, block, block->expert_out);
  for (int i = 0; i < trainer->tokens * WIDTH; ++i)
    pass->x[number + 1][i] = block->dense[i] + gate_of(block, i / WIDTH) * block->expert_out[i];
}

static void head_forward(struct trainer *trainer, struct pass *pass) {
  fsdp_group *group = trainer->model.head;
  hold(group, FSDP_FORWARD);
  linear_forward(pass->logits, model_weights(group, 0, FSDP_FORWARD), pass->x[BLOCKS], trainer->tokens, VOCABULARY,
                 WIDTH);
  give_back(group, FSDP_FORWARD);
  for (int part = 0; part < trainer->parts; ++part) {
    const int first = part * PART_TOKENS;
    trainer->loss[pass->number][trainer->first_part + part] =
        cross_entropy(pass->logits + first * VOCABULARY, pass->target + first, PART_TOKENS);
  }
}

/* -- backward: gradients of inputs ------------------------------------------------------------------------------- */

/* Sends the experts of a block the gradients of their outputs. */
static void send_gradients(struct trainer *trainer, struct pass *pass, int number) {
  struct block *block = &pass->block[number];
  float rows[TOKENS * WIDTH];
  for (int i = 0; i < trainer->tokens; ++i) {
    block->d_gate[i] = 0.0f;
    for (int c = i * WIDTH; c < (i + 1) * WIDTH; ++c) {
      rows[c] = gate_of(block, i) * pass->d[c];
      block->d_gate[i] += pass->d[c] * block->expert_out[c];
    }
  }
  send_rows(trainer, LANE_BACKWARD, block, rows);
}

static void head_backward(struct trainer *trainer, struct pass *pass) {
  fsdp_group *group = trainer->model.head;
  memset(pass->d, 0, sizeof pass->d);
  hold(group, FSDP_BACKWARD);
  linear_backward(pass->d, model_weights(group, 0, FSDP_BACKWARD), pass->logits, trainer->tokens, VOCABULARY, WIDTH);
  give_back(group, FSDP_BACKWARD);
  send_gradients(trainer, pass, BLOCKS - 1);
}

static void expert_group_backward(struct trainer *trainer, struct pass *pass, int number) {
  fsdp_group *group = trainer->model.expert[number];
  struct routed *routed = &pass->block[number].routed;
  const int count = count_all_rows(trainer, routed);
  exchange_wait(trainer->exchange, LANE_BACKWARD);
  for (int row = 0; row < count; ++row)
    copy_row(routed->d_out + row * WIDTH,
             exchange_received(trainer->exchange, LANE_BACKWARD, routed->member[row])->rows[routed->place[row]]);
  hold(group, FSDP_BACKWARD);
  const float *up = model_weights(group, EXPERT_UP, FSDP_BACKWARD);
  const float *down = model_weights(group, EXPERT_DOWN, FSDP_BACKWARD);
  for (int e = 0, row = 0; e < trainer->model.experts; row += count_rows(routed, e++))
    expert_backward(routed->d_in + row * WIDTH, routed->d_relu + row * HIDDEN, routed->relu_kept + row * HIDDEN,
                    up + e * HIDDEN * WIDTH, down + e * HIDDEN * WIDTH, routed->d_out + row * WIDTH,
                    count_rows(routed, e));
  give_back(group, FSDP_BACKWARD);
  send_back(trainer, LANE_BACKWARD, routed, routed->d_in);
}

static void dense_group_backward(struct trainer *trainer, struct pass *pass, int number) {
  fsdp_group *group = trainer->model.dense[number];
  struct block *block = &pass->block[number];
  float from_expert[TOKENS * WIDTH];
  receive_rows(trainer, LANE_BACKWARD, block, from_expert);
  for (int i = 0; i < trainer->tokens * WIDTH; ++i) pass->d[i] += from_expert[i];
  router_backward(block->d_router, block->d_gate, block->expert, block->probability, trainer->tokens);
  hold(group, FSDP_BACKWARD);
  linear_backward(pass->d, model_weights(group, DENSE_ROUTER, FSDP_BACKWARD), block->d_router, trainer->tokens, EXPERTS,
                  WIDTH);
  dense_backward(pass->d, block->d_dense, block->tanh_kept, model_weights(group, DENSE_WEIGHT, FSDP_BACKWARD),
                 trainer->tokens);
  give_back(group, FSDP_BACKWARD);
  if (number > 0) send_gradients(trainer, pass, number - 1);
}

/* -- backward: gradients of weights, delayed --------------------------------------------------------------------- */

static void weight_grad(const struct trainer *trainer, fsdp_group *group, uint64_t param, const float *dy,
                        const float *x, int out, int in) {
  const int row_count[PARTS] = {PART_TOKENS, PART_TOKENS};
  linear_weight_grad(model_grad(group, param), dy, x, row_count, trainer->parts, out, in);
}

static void head_weights(struct trainer *trainer, struct pass *pass, int is_last) {
  fsdp_group *group = trainer->model.head;
  weight_grad(trainer, group, 0, pass->logits, pass->x[BLOCKS], VOCABULARY, WIDTH);
  reduce(group, is_last);
}

static void dense_group_weights(struct trainer *trainer, struct pass *pass, int number, int is_last) {
  fsdp_group *group = trainer->model.dense[number];
  const struct block *block = &pass->block[number];
  float ones[TOKENS];
  for (int i = 0; i < TOKENS; ++i) ones[i] = 1.0f;
  weight_grad(trainer, group, DENSE_WEIGHT, block->d_dense, pass->x[number], WIDTH, WIDTH);
  weight_grad(trainer, group, DENSE_BIAS, block->d_dense, ones, WIDTH, 1);
  weight_grad(trainer, group, DENSE_ROUTER, block->d_router, block->dense, EXPERTS, WIDTH);
  reduce(group, is_last);
}

/* An expert without tokens has a gradient of zeros. A rank that left out the reduce would stop the others. */
static void expert_group_weights(struct trainer *trainer, struct pass *pass, int number, int is_last) {
  fsdp_group *group = trainer->model.expert[number];
  const struct routed *routed = &pass->block[number].routed;
  float *up = model_grad(group, EXPERT_UP), *down = model_grad(group, EXPERT_DOWN);
  for (int e = 0, row = 0; e < trainer->model.experts; row += count_rows(routed, e++)) {
    linear_weight_grad(up + e * HIDDEN * WIDTH, routed->d_relu + row * HIDDEN, routed->in + row * WIDTH,
                       routed->rows[e], PARTS, HIDDEN, WIDTH);
    linear_weight_grad(down + e * HIDDEN * WIDTH, routed->d_out + row * WIDTH, routed->relu_kept + row * HIDDEN,
                       routed->rows[e], PARTS, WIDTH, HIDDEN);
  }
  reduce(group, is_last);
}

/* An embedding is a linear layer whose inputs are rows with a single 1. */
static void embedding_weights(struct trainer *trainer, struct pass *pass, int is_last) {
  float one_hot[TOKENS * VOCABULARY] = {0.0f};
  for (int i = 0; i < trainer->tokens; ++i) one_hot[i * VOCABULARY + pass->token[i]] = 1.0f;
  weight_grad(trainer, trainer->model.embedding, 0, one_hot, pass->d, VOCABULARY, WIDTH);
  reduce(trainer->model.embedding, is_last);
}

/* -- the order --------------------------------------------------------------------------------------------------- */

/*
 * The forward pass of micro-batch n goes up while the backward pass of n - 1 comes down. Between a send and its wait
 * there is work of the other pass, or the gradients of weights, which no rank waits for. So dense groups and groups of
 * experts take turns in both directions. Each rank does this in the same order, which it knows by construction: no call
 * depends on which tokens came.
 */
static void sweep(struct trainer *trainer, int n, int count) {
  struct pass *forth = n < count ? &trainer->pass[n % 2] : NULL;
  struct pass *back = n > 0 ? &trainer->pass[(n + 1) % 2] : NULL;
  const int is_last = n == count;
  if (forth) load_tokens(trainer, forth, n * trainer->model.halves + trainer->model.half);
  if (forth) embedding_forward(trainer, forth);
  if (back) head_backward(trainer, back);
  for (int up = 0, down = BLOCKS - 1; up < BLOCKS; ++up, --down) {
    if (forth) dense_group_forward(trainer, forth, up);
    if (back) expert_group_backward(trainer, back, down);
    if (back && up == 0) head_weights(trainer, back, is_last);
    if (back && up > 0) dense_group_weights(trainer, back, down + 1, is_last);
    if (forth) expert_group_forward(trainer, forth, up);
    if (back) dense_group_backward(trainer, back, down);
    if (back) expert_group_weights(trainer, back, down, is_last);
    if (forth) add_expert_outputs(trainer, forth, up);
  }
  if (back) dense_group_weights(trainer, back, 0, is_last);
  if (back) embedding_weights(trainer, back, is_last);
  if (forth) head_forward(trainer, forth);
}

/* Losses are added in the order of micro-batches and parts, on any number of ranks. */
static double mean_loss(struct trainer *trainer) {
  const double *losses = trainer->loss[0];
  double sum = 0.0;
  check(fsdp_all_reduce_values(trainer->model.context, NULL, trainer->loss[0], MICROBATCHES * PARTS, FSDP_VALUE_SUM));
  for (int i = 0; i < MICROBATCHES * PARTS; ++i) sum += losses[i];
  return sum / (MICROBATCHES * TOKENS);
}

struct step_result train_step(struct trainer *trainer, uint64_t step) {
  struct step_result result;
  const int count = MICROBATCHES / trainer->model.halves;
  fsdp_model *model = trainer->model.handle;
  fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
  adamw.weight_decay = 0.01;
  trainer->step = step;
  memset(trainer->loss, 0, sizeof trainer->loss);
  for (int n = 0; n <= count; ++n) sweep(trainer, n, count);
  result.loss = mean_loss(trainer);
  /* The library divides by the number of the model's ranks, for experts, too. This scale divides by the micro-batches
   * and parts of one rank. */
  check(fsdp_finish_grads(model, 1.0 / (count * trainer->parts), 0, NULL));
  check(fsdp_get_grad_norm(model, NULL, NULL, &result.norm));
  check(fsdp_step_adamw(model, 0.005, &adamw, NULL));
  return result;
}
