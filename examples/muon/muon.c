/* SPDX-License-Identifier: Apache-2.0 */
/*
 * muon: Muon for the matrices of a model and AdamW for the rest.
 *
 *   fsdp-run -n 4 muon             the ranks share the Newton-Schulz iterations: each matrix is worked on once
 *   fsdp-run -n 1 muon             the same lines, to the last digit
 *   fsdp-run -n 2 muon whiten      another use of whole matrices: a state is collected, and another one is written
 *   muon orthogonalize             prints one orthogonalized matrix
 *
 * step_muon() is the part to read. Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
 * 2024.
 */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../check.h"
#include "network.h"
#include "newton_schulz.h"

enum { STEPS = 30, SAMPLES = 32 };
static const float momentum = 0.95f, learning_rate = 0.02f, weight_decay = 0.01f;

/* Does the parameter of a shard have matrices? AdamW updates the others. */
static int is_matrix(const fsdp_shard *shard) { return shard->param_index == W1 || shard->param_index == W2; }

static float *state_of(fsdp_model *model, uint64_t shard, const char *name) {
  fsdp_tensor state = FSDP_TENSOR_INIT;
  check(fsdp_get_shard_state(model, shard, name, &state));
  return state.data;
}

typedef void (*shard_visit)(fsdp_model *model, uint64_t index, const fsdp_shard *shard, const char *state);

static void for_each_matrix_shard(fsdp_model *model, shard_visit visit, const char *state) {
  uint64_t count = 0;
  check(fsdp_get_shard_count(model, &count));
  for (uint64_t s = 0; s < count; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    check(fsdp_get_shard(model, s, &shard));
    if (is_matrix(&shard)) visit(model, s, &shard, state);
  }
}

/* m <- mu m + g, g <- g + mu m (Nesterov), on this rank's elements. */
static void add_momentum(fsdp_model *model, uint64_t index, const fsdp_shard *shard, const char *state) {
  float *m = state_of(model, index, state), *g = shard->main_grad;
  for (uint64_t i = 0; i < shard->element_count; ++i) {
    m[i] = momentum * m[i] + g[i];
    g[i] += momentum * m[i];
  }
}

/* w <- w - lr (s u + wd w), s = sqrt(max(1, rows / columns)); u is the main grad, or a state. */
static void descend(fsdp_model *model, uint64_t index, const fsdp_shard *shard, const char *state) {
  const float rows = shard->param_index == W1 ? HIDDEN : OUTPUTS, columns = shard->param_index == W1 ? INPUTS : HIDDEN;
  const float scale = sqrtf(fmaxf(1.0f, rows / columns));
  const float *u = state ? state_of(model, index, state) : shard->main_grad;
  float *w = shard->main_weight;
  for (uint64_t i = 0; i < shard->element_count; ++i) w[i] -= learning_rate * (scale * u[i] + weight_decay * w[i]);
}

/* Works on each matrix that this rank owns, in place. */
static void orthogonalize_matrices(fsdp_model *model, const fsdp_matrix_options *options) {
  check(fsdp_collect_matrices(model, options, NULL));
  for (;;) {
    fsdp_matrix matrix = FSDP_MATRIX_INIT;
    check(fsdp_next_matrix(model, NULL, &matrix));
    if (!matrix.data) break;
    for (uint64_t m = 0; m < matrix.count; ++m)
      orthogonalize((float *)((char *)matrix.data + m * matrix.stride_bytes), (int)matrix.rows, (int)matrix.columns);
  }
  check(fsdp_return_matrices(model, NULL));
}

/* Inside the update window. The matrices are whole only where Newton-Schulz needs them so. */
static void step_muon(fsdp_model *model) {
  for_each_matrix_shard(model, add_momentum, "momentum");
  orthogonalize_matrices(model, NULL); /* the main grads, in place */
  for_each_matrix_shard(model, descend, NULL);
}

/* The same with the momentum as source, and a state of its own as target: the momentum stays as it is. */
static void step_whitened(fsdp_model *model) {
  fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
  options.source = "momentum", options.target = "update";
  for_each_matrix_shard(model, add_momentum, "momentum");
  orthogonalize_matrices(model, &options);
  for_each_matrix_shard(model, descend, "update");
}

static fsdp_model *create_model(fsdp_context *context, int whitened, fsdp_group **group) {
  const uint64_t w1[] = {HIDDEN, INPUTS}, b1[] = {HIDDEN}, w2[] = {OUTPUTS, HIDDEN}, b2[] = {OUTPUTS};
  const uint64_t *shapes[PARAMS] = {w1, b1, w2, b2};
  const char *names[PARAMS] = {"w1", "b1", "w2", "b2"};
  fsdp_param params[PARAMS];
  for (int p = 0; p < PARAMS; ++p) {
    const int is_weight = p == W1 || p == W2;
    params[p] = (fsdp_param)FSDP_PARAM_INIT;
    params[p].name = names[p], params[p].shape = shapes[p], params[p].dimension_count = is_weight ? 2 : 1;
    if (is_weight) params[p].matrix = FSDP_MATRIX_LAST_TWO, params[p].optimizer = FSDP_OPTIMIZER_CALLER;
  }
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.grad_op = FSDP_GRAD_OP_SUM;
  fsdp_model *model = NULL;
  check(fsdp_create_model(context, &options, &model));
  check(fsdp_add_optimizer_state(model, "momentum", FSDP_FLOAT32)); /* of the matrices alone */
  if (whitened) check(fsdp_add_optimizer_state(model, "update", FSDP_FLOAT32));
  check(fsdp_create_group(model, "network", params, PARAMS, sizeof params[0], NULL, group));
  check(fsdp_seal_model(model));
  return model;
}

struct trainer {
  fsdp_context *context;
  fsdp_model *model;
  fsdp_group *group;
  int rank, ranks;
  float *teacher[PARAMS], *grads[PARAMS];
};

static void load_initial(struct trainer *trainer) {
  for (int p = 0; p < PARAMS; ++p) {
    const size_t count = (size_t)network_counts[p];
    trainer->teacher[p] = calloc(count, sizeof(float)), trainer->grads[p] = calloc(count, sizeof(float));
    if (!trainer->teacher[p] || !trainer->grads[p]) exit(1);
    network_initial(p, 0, trainer->grads[p]);
    check(fsdp_load_param(trainer->group, (uint64_t)p, trainer->grads[p], FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
    network_initial(p, 1, trainer->teacher[p]);
  }
  check(fsdp_publish_weights(trainer->model, NULL));
}

/* Rank r takes samples r, r + ranks, ... of the step. Returns the loss of all. */
static double backward(struct trainer *trainer, int step) {
  const float *weights[PARAMS];
  double loss = 0.0;
  check(fsdp_unshard(trainer->group, FSDP_BACKWARD, 0, NULL));
  for (int p = 0; p < PARAMS; ++p) {
    fsdp_tensor weight = FSDP_TENSOR_INIT;
    check(fsdp_get_param(trainer->group, (uint64_t)p, FSDP_BACKWARD, &weight));
    weights[p] = weight.data;
    memset(trainer->grads[p], 0, sizeof(float) * (size_t)network_counts[p]);
  }
  for (int sample = trainer->rank; sample < SAMPLES; sample += trainer->ranks)
    loss += network_sample(weights, (const float *const *)trainer->teacher, trainer->grads, step, sample);
  check(fsdp_reshard(trainer->group, FSDP_BACKWARD, 0, NULL));
  for (int p = 0; p < PARAMS; ++p)
    check(fsdp_put_grad(trainer->group, (uint64_t)p, trainer->grads[p], FSDP_FLOAT32, (uint64_t)network_counts[p], 0,
                        NULL));
  check(fsdp_reduce_grad(trainer->group, FSDP_LAST, NULL));
  check(fsdp_all_reduce_values(trainer->context, NULL, &loss, 1, FSDP_VALUE_SUM));
  return loss;
}

/* FNV-1a of all weights. */
static uint64_t hash_weights(struct trainer *trainer) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (int p = 0; p < PARAMS; ++p) {
    const size_t count = (size_t)network_counts[p];
    check(fsdp_read_param(trainer->group, (uint64_t)p, trainer->grads[p], FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
    const unsigned char *bytes = (const unsigned char *)trainer->grads[p];
    for (size_t i = 0; i < count * sizeof(float); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3u;
  }
  return hash;
}

static void train(struct trainer *trainer, int whitened) {
  for (int step = 0; step < STEPS; ++step) {
    const double loss = backward(trainer, step);
    check(fsdp_finish_grads(trainer->model, 1.0, 0, NULL)); /* opens the update window */
    whitened ? step_whitened(trainer->model) : step_muon(trainer->model);
    check(fsdp_step_adamw(trainer->model, 0.01, NULL, NULL)); /* the biases; publishes all, and closes the window */
    if (trainer->rank == 0 && (step == 0 || (step + 1) % 10 == 0)) printf("step %d  loss %.9g\n", step + 1, loss);
  }
  const uint64_t hash = hash_weights(trainer);
  if (trainer->rank == 0) printf("weights %016" PRIx64 "\n", hash);
}

/* The singular values of the result are 1.0857, 1.0627 and 0.7196. */
static int print_orthogonalized(void) {
  float matrix[12] = {1, 2, 0, 0, 1, -1, 3, 0, 1, -2, 1, 1};
  orthogonalize(matrix, 4, 3);
  for (int r = 0; r < 4; ++r)
    printf("%.5f %.5f %.5f\n", (double)matrix[3 * r], (double)matrix[3 * r + 1], (double)matrix[3 * r + 2]);
  return 0;
}

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "orthogonalize")) return print_orthogonalized();
  const int whitened = argc > 1 && !strcmp(argv[1], "whiten");
  if (argc > 1 && !whitened) return fprintf(stderr, "usage: muon [whiten | orthogonalize]\n"), 2;
  struct trainer trainer = {0};
  uint32_t rank = 0, ranks = 0;
  check(fsdp_create_context(NULL, &trainer.context));
  check(fsdp_get_rank(trainer.context, &rank));
  check(fsdp_get_world_size(trainer.context, &ranks));
  trainer.rank = (int)rank, trainer.ranks = (int)ranks;
  trainer.model = create_model(trainer.context, whitened, &trainer.group);
  load_initial(&trainer);
  train(&trainer, whitened);
  check(fsdp_close_context(trainer.context));
  for (int p = 0; p < PARAMS; ++p) free(trainer.teacher[p]), free(trainer.grads[p]);
  fsdp_destroy_model(trainer.model);
  fsdp_destroy_context(trainer.context);
  return 0;
}
