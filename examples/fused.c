/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fused: a layer of two kernels that get their weights as pointers only.
 *
 *   fsdp-run -n 2 fused
 *
 * A fused kernel takes pointers, so the library cannot gather one matrix while it works on another. Here the layer's
 * group has two pieces. While the kernel of one piece computes, the other piece needs no memory. The program fits y =
 * sin x with a layer of 16 neurons; each rank sees its own points.
 *
 *   fsdp-run -n 2 --debug fused --keep
 *
 * With --keep the layer keeps the pointer of a forward pass and reads through it after the reshard. That is a mistake:
 * the buffer may hold another piece by then. Debug mode shows it: copied weights are overwritten with NaN when they are
 * released. (A read of mapped weights faults, and fsdp-run names the group.)
 */
#include <math.h>
#include <string.h>

#include "check.h"

enum { STEPS = 400, POINTS = 32, NEURONS = 16, HIDDEN = 0, OUTPUT = 1 };

/* The kernels see only these pointers, and call nothing of the library. */
struct hidden_view {
  const float *weight, *bias; /* NEURONS each */
};
struct output_view {
  const float *weight; /* NEURONS */
};

static struct {
  fsdp_model *model;
  fsdp_group *layer;
} net;

static const float *view(uint64_t param, fsdp_phase phase) {
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  check(fsdp_get_param(net.layer, param, phase, &tensor));
  return tensor.data;
}

static struct hidden_view hold_hidden(fsdp_phase phase) {
  check(fsdp_unshard_piece(net.layer, HIDDEN, phase, 0, NULL));
  return (struct hidden_view){view(0, phase), view(1, phase)};
}

static struct output_view hold_output(fsdp_phase phase) {
  check(fsdp_unshard_piece(net.layer, OUTPUT, phase, 0, NULL));
  return (struct output_view){view(2, phase)};
}

static void reshard(uint32_t piece, fsdp_phase phase) { check(fsdp_reshard_piece(net.layer, piece, phase, 0, NULL)); }

/* Two kernels: hidden = tanh(weight x + bias), and output = weight . hidden. */
static void compute_hidden(struct hidden_view view, const float x[POINTS], float hidden[POINTS][NEURONS]) {
  for (int i = 0; i < POINTS; ++i)
    for (int n = 0; n < NEURONS; ++n) hidden[i][n] = tanhf(view.weight[n] * x[i] + view.bias[n]);
}

static void compute_output(struct output_view view, float hidden[POINTS][NEURONS], float y[POINTS]) {
  for (int i = 0; i < POINTS; ++i) {
    y[i] = 0.0f;
    for (int n = 0; n < NEURONS; ++n) y[i] += view.weight[n] * hidden[i][n];
  }
}

/* Gradients of the mean of (y - target)^2 / 2. The last piece of the forward pass comes first. */
static void backward(const float x[POINTS], float hidden[POINTS][NEURONS], const float difference[POINTS]) {
  float grads[3][NEURONS], to_hidden[POINTS][NEURONS];
  memset(grads, 0, sizeof grads);
  const struct output_view output = hold_output(FSDP_BACKWARD);
  for (int i = 0; i < POINTS; ++i)
    for (int n = 0; n < NEURONS; ++n) {
      grads[2][n] += difference[i] * hidden[i][n] / POINTS;
      to_hidden[i][n] = difference[i] * output.weight[n] * (1.0f - hidden[i][n] * hidden[i][n]);
    }
  reshard(OUTPUT, FSDP_BACKWARD);
  for (int i = 0; i < POINTS; ++i) /* the inputs need no gradient, so this piece is not gathered */
    for (int n = 0; n < NEURONS; ++n) {
      grads[0][n] += to_hidden[i][n] * x[i] / POINTS;
      grads[1][n] += to_hidden[i][n] / POINTS;
    }
  for (uint64_t p = 0; p < 3; ++p) check(fsdp_put_grad(net.layer, p, grads[p], FSDP_FLOAT32, NEURONS, 0, NULL));
  check(fsdp_reduce_grad(net.layer, FSDP_LAST, NULL));
}

static double train_step(const float x[POINTS]) {
  float hidden[POINTS][NEURONS], y[POINTS];
  double loss = 0.0;
  compute_hidden(hold_hidden(FSDP_FORWARD), x, hidden);
  reshard(HIDDEN, FSDP_FORWARD);
  compute_output(hold_output(FSDP_FORWARD), hidden, y);
  reshard(OUTPUT, FSDP_FORWARD);
  for (int i = 0; i < POINTS; ++i) {
    y[i] -= sinf(x[i]);
    loss += 0.5 * y[i] * y[i] / POINTS;
  }
  backward(x, hidden, y);
  check(fsdp_finish_grads(net.model, 1.0, 0, NULL));
  check(fsdp_step_adamw(net.model, 0.02, NULL, NULL));
  return loss;
}

/* The mistake: the pointer is used after the reshard. */
static void keep_too_long(void) {
  const struct hidden_view kept = hold_hidden(FSDP_FORWARD);
  const float held = kept.weight[0];
  reshard(HIDDEN, FSDP_FORWARD);
  printf("fused: while it was held the weight was %.3f, after the reshard the view shows %s\n", held,
         isnan(kept.weight[0]) ? "NaN" : "a number; run with --debug");
}

static void declare(fsdp_context *context) {
  fsdp_param params[] = {FSDP_PARAM("hidden.weight", NEURONS), FSDP_PARAM("hidden.bias", NEURONS),
                         FSDP_PARAM("output.weight", NEURONS)};
  params[2].piece = OUTPUT; /* the others are in piece 0, HIDDEN */
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.unshard_mode = FSDP_UNSHARD_COPIED;
  options.flags = FSDP_MODEL_FORCE_COMMUNICATION; /* one rank alone shows the same */
  check(fsdp_create_model(context, &options, &net.model));
  check(fsdp_create_group(net.model, "layer", params, 3, sizeof *params, NULL, &net.layer));
  /* The visits name pieces, so the plan has a buffer for each. The hidden piece has no BACKWARD visit. */
  const fsdp_visit visits[] = {{0, FSDP_FORWARD, FSDP_PIECE(HIDDEN)},
                               {0, FSDP_FORWARD, FSDP_PIECE(OUTPUT)},
                               {0, FSDP_BACKWARD, FSDP_PIECE(OUTPUT)}};
  fsdp_schedule_options schedule = FSDP_SCHEDULE_OPTIONS_INIT;
  schedule.visits = visits, schedule.visit_count = 3, schedule.visit_stride = sizeof *visits;
  check(fsdp_set_schedule(net.model, FSDP_SCHEDULE_VISITS, &schedule));
  check(fsdp_seal_model(net.model));
}

static void load(void) {
  float values[NEURONS];
  for (uint64_t p = 0; p < 3; ++p) {
    for (int n = 0; n < NEURONS; ++n) values[n] = p == 2 ? 0.1f : (float)((7 * n + 3 * (int)p) % 11 - 5) / 4.0f;
    check(fsdp_load_param(net.layer, p, values, FSDP_FLOAT32, NEURONS, FSDP_EVERY_RANK, 0));
  }
  check(fsdp_publish_weights(net.model, NULL));
}

int main(int argc, char **argv) {
  fsdp_context *context = NULL;
  uint32_t rank = 0, world_size = 0;
  check(fsdp_create_context(NULL, &context));
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &world_size));
  declare(context);
  load();
  const int keeps = argc > 1 && strcmp(argv[1], "--keep") == 0;
  if (keeps && rank == 0) keep_too_long();

  float x[POINTS];
  for (int i = 0; i < POINTS; ++i)
    x[i] = -3.0f + 6.0f * (float)(i * (int)world_size + (int)rank) / (float)(POINTS * (int)world_size);
  double loss = 0.0;
  for (int step = 0; step < STEPS && !keeps; ++step) loss = train_step(x);

  check(fsdp_close_context(context));
  fsdp_destroy_model(net.model);
  fsdp_destroy_context(context);
  if (keeps) return 0;
  if (!(loss < 0.005)) return fprintf(stderr, "rank %u: the loss is %g\n", rank, loss), 1;
  if (rank == 0) printf("fused: ok, the loss is below 0.005\n");
  return 0;
}
