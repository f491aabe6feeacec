/* SPDX-License-Identifier: Apache-2.0 */
/* The whole life of a job through the C ABI, in a world of one and with two ranks as threads; every number is checked.
 */
#define _POSIX_C_SOURCE 200809L

#include <math.h>
#include <pthread.h>

#include "check.h"

enum { EMBED = 5 * 3, FROZEN = 4, HEAD = 7 * 3, BIAS = 7, MOST = HEAD, TRAINED = EMBED + HEAD + BIAS };

static const uint64_t embed_shape[] = {5, 3}, frozen_shape[] = {4}, head_shape[] = {7, 3}, bias_shape[] = {7};

/* Parameters in declaration order: embed, frozen | head, bias. */
static const uint64_t counts[2][2] = {{EMBED, FROZEN}, {HEAD, BIAS}};
static const char *const names[2][2] = {{"embed.weight", "embed.frozen"}, {"head.weight", "head.bias"}};

typedef struct {
  fsdp_context *context;
  fsdp_model *model;
  fsdp_group *groups[2];
  uint32_t rank, ranks;
} job;

static int is_frozen(int group, int param) { return group == 0 && param == 1; }

static float initial(int group, int param, uint64_t i) { return (float)(group * 100 + param * 50) + (float)i * 0.25f; }

/* Every trained weight has the gradient rank + 1, so that the mean over the ranks is known. */
static double mean_grad(const job *j) { return (j->ranks + 1) / 2.0; }

static int near(double a, double b) { return fabs(a - b) < 1e-5; }

static void declare(job *j) {
  static int tags[4];
  fsdp_param params[4] = {FSDP_PARAM_INIT, FSDP_PARAM_INIT, FSDP_PARAM_INIT, FSDP_PARAM_INIT};
  const uint64_t *const shapes[] = {embed_shape, frozen_shape, head_shape, bias_shape};
  const uint32_t dimensions[] = {2, 1, 2, 1};
  for (int i = 0; i < 4; ++i) {
    params[i].name = names[i / 2][i % 2];
    params[i].shape = shapes[i];
    params[i].dimension_count = dimensions[i];
    params[i].user_data = &tags[i];
  }
  params[1].flags = FSDP_PARAM_FROZEN;
  params[3].lr_scale = 2;
  OK(fsdp_create_model(j->context, NULL, &j->model));
  OK(fsdp_create_group(j->model, "embed", params, 2, sizeof *params, NULL, &j->groups[0]));
  OK(fsdp_create_group(j->model, "head", params + 2, 2, sizeof *params, NULL, &j->groups[1]));
  OK(fsdp_seal_model(j->model));

  fsdp_param info = FSDP_PARAM_INIT;
  OK(fsdp_get_param_info(j->groups[1], 1, &info));
  CHECK(strcmp(info.name, "head.bias") == 0 && info.dimension_count == 1 && info.shape[0] == BIAS);
  CHECK(info.dtype == FSDP_FLOAT32 && info.granule == FSDP_GRANULE_ROW && info.lr_scale == 2);
  CHECK(info.user_data == &tags[3] && info.name != params[3].name);
}

/* Every element has one owner, and the shards of this rank are its chunks. */
static void check_layout(job *j) {
  uint64_t shard_count = 0, owned = 0;
  OK(fsdp_get_shard_count(j->model, &shard_count));
  for (uint64_t s = 0; s < shard_count; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    fsdp_chunk chunk = FSDP_CHUNK_INIT;
    fsdp_tensor state = FSDP_TENSOR_INIT;
    OK(fsdp_get_shard(j->model, s, &shard));
    OK(fsdp_get_chunk(shard.group, shard.param_index, j->rank, &chunk));
    CHECK(shard.element_count == chunk.element_count && shard.element_offset == chunk.element_offset);
    CHECK(shard.row_count == chunk.row_count && shard.row_offset == chunk.row_offset);
    CHECK(shard.state_count == 2 && shard.lr_scale == (strcmp(shard.name, "head.bias") == 0 ? 2 : 1));
    OK(fsdp_get_shard_state(j->model, s, "exp_avg_sq", &state));
    CHECK(state.element_count == shard.element_count && ((const float *)state.data)[0] == 0);
    owned += shard.element_count;
  }
  double sum = (double)owned;
  OK(fsdp_all_reduce_values(j->context, NULL, &sum, 1, FSDP_VALUE_SUM));
  CHECK(sum == TRAINED);
  for (int g = 0; g < 2; ++g)
    for (int p = 0; p < 2; ++p) {
      uint64_t next = 0;
      for (uint32_t r = 0; r < j->ranks; ++r) {
        fsdp_chunk chunk = FSDP_CHUNK_INIT;
        OK(fsdp_get_chunk(j->groups[g], (uint64_t)p, r, &chunk));
        CHECK(chunk.element_count == 0 || chunk.element_offset == next);
        next += chunk.element_count;
      }
      CHECK(next == counts[g][p]);
    }
}

static void load(job *j) {
  float data[MOST];
  for (int g = 0; g < 2; ++g)
    for (int p = 0; p < 2; ++p) {
      for (uint64_t i = 0; i < counts[g][p]; ++i) data[i] = initial(g, p, i);
      /* Rank 0 alone sets one group, and every rank sets the other. */
      const int has_data = g == 1 || j->rank == 0;
      OK(fsdp_load_param(j->groups[g], (uint64_t)p, has_data ? data : NULL, FSDP_FLOAT32, counts[g][p],
                         g == 1 ? FSDP_EVERY_RANK : 0, 0));
    }
  OK(fsdp_publish_weights(j->model, NULL));
}

/* With a constant gradient, AdamW moves every weight by lr times its lr_scale a step, whatever the gradient's size. */
static double expected(int group, int param, uint64_t i, int steps) {
  const double moved = is_frozen(group, param) ? 0 : steps * 0.1 * (group == 1 && param == 1 ? 2 : 1);
  return initial(group, param, i) - moved;
}

static void visit(job *j, int g, fsdp_phase phase, int steps) {
  OK(fsdp_unshard(j->groups[g], phase, 0, NULL));
  for (int p = 0; p < 2; ++p) {
    fsdp_tensor weight = FSDP_TENSOR_INIT;
    OK(fsdp_get_param(j->groups[g], (uint64_t)p, phase, &weight));
    CHECK(weight.element_count == counts[g][p] && weight.dtype == FSDP_FLOAT32);
    for (uint64_t i = 0; i < counts[g][p]; ++i) CHECK(near(((const float *)weight.data)[i], expected(g, p, i, steps)));
  }
  OK(fsdp_reshard(j->groups[g], phase, 0, NULL));
}

static void give_grad(job *j, int g, int p, int put) {
  float own[MOST];
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 7;
  for (uint64_t i = 0; i < counts[g][p]; ++i) own[i] = (float)(j->rank + 1);
  if (put) {
    OK(fsdp_put_grad(j->groups[g], (uint64_t)p, own, FSDP_FLOAT32, counts[g][p], 0, NULL));
    return;
  }
  OK(fsdp_acquire_grad(j->groups[g], (uint64_t)p, 0, NULL, &grad, &accumulate));
  CHECK(accumulate == 0 && grad.element_count == counts[g][p] && grad.dtype == FSDP_FLOAT32);
  memcpy(grad.data, own, counts[g][p] * sizeof *own);
}

static void backward(job *j, int steps, int put) {
  for (int g = 2; g-- > 0;) {
    visit(j, g, FSDP_BACKWARD, steps);
    for (int p = 0; p < 2; ++p)
      if (!is_frozen(g, p)) give_grad(j, g, p, put);
    OK(fsdp_reduce_grad(j->groups[g], FSDP_LAST, NULL));
  }
}

static void step(job *j, int steps) {
  const int put = steps % 2;
  for (int g = 0; g < 2; ++g) visit(j, g, FSDP_FORWARD, steps);
  backward(j, steps, put);
  OK(fsdp_finish_grads(j->model, 0.5, 0, NULL));

  double norm = 0, norms[4];
  const double whole = 0.5 * mean_grad(j) * sqrt(TRAINED);
  OK(fsdp_get_grad_norm(j->model, NULL, NULL, &norm));
  CHECK(near(norm, whole));
  OK(fsdp_get_param_grad_norms(j->model, NULL, norms, 4));
  CHECK(near(norms[0], 0.5 * mean_grad(j) * sqrt(EMBED)) && norms[1] == 0);
  OK(fsdp_clip_grads(j->model, NULL, whole / 2, NULL, &norm));
  CHECK(near(norm, whole));
  OK(fsdp_get_grad_norm(j->model, NULL, NULL, &norm));
  CHECK(near(norm, whole / 2));
  OK(fsdp_scale_grads(j->model, 2, NULL));
  int32_t found = 7;
  const char *culprit = "none";
  OK(fsdp_check_grads(j->model, NULL, &found, &culprit));
  CHECK(found == 0 && culprit == NULL);
  OK(fsdp_step_adamw(j->model, 0.1, NULL, NULL));
}

static void read_back(job *j, int steps) {
  for (int g = 0; g < 2; ++g)
    for (int p = 0; p < 2; ++p) {
      float data[MOST];
      OK(fsdp_read_param(j->groups[g], (uint64_t)p, data, FSDP_FLOAT32, counts[g][p], FSDP_EVERY_RANK, 0));
      for (uint64_t i = 0; i < counts[g][p]; ++i) CHECK(near(data[i], expected(g, p, i, steps)));
    }
}

static void check_stats(job *j) {
  fsdp_stats stats = FSDP_STATS_INIT;
  fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  OK(fsdp_get_stats(j->model, &stats));
  OK(fsdp_get_model_info(j->model, &info));
  CHECK(stats.version == 5 && stats.step == 3); /* a load, three steps, an update by hand */
  CHECK(stats.gathered_groups == 0 && stats.pending_grad_groups == 0);
  CHECK(info.element_count == TRAINED + FROZEN);
  for (fsdp_role role = FSDP_ROLE_ALL; role <= FSDP_ROLE_HOME; ++role) {
    uint64_t planned = 0, allocated = 1;
    OK(fsdp_get_role_bytes(j->model, role, j->rank, &planned));
    OK(fsdp_get_allocated_bytes(j->model, role, &allocated));
    CHECK(planned == allocated && (planned || role != FSDP_ROLE_ALL));
  }
  CHECK(j->ranks == 1 ? stats.gathers == 0 && stats.reduces == 0 : stats.gathers > 0 && stats.reduces == 6);
}

static void check_description(job *j) {
  uint64_t size = 0, given;
  OK(fsdp_describe_model(j->model, NULL, &size));
  CHECK(size > 100);
  char *text = malloc(size);
  given = size - 1;
  REFUSED(FSDP_INVALID_ARGUMENT, "fsdp_describe_model", fsdp_describe_model(j->model, text, &given));
  CHECK(given == size);
  OK(fsdp_describe_model(j->model, text, &given));
  CHECK(strlen(text) + 1 == size && text[0] == '{');
  CHECK(strstr(text, "\"head.bias\"") && strstr(text, "\"layout_hash\""));
  free(text);
}

/* Edits the weights outside a step: each one is moved up by as much as one step moves it down. */
static void edit(job *j) {
  uint64_t shard_count = 0;
  OK(fsdp_begin_update(j->model, NULL));
  OK(fsdp_get_shard_count(j->model, &shard_count));
  for (uint64_t s = 0; s < shard_count; ++s) {
    fsdp_shard shard = FSDP_SHARD_INIT;
    OK(fsdp_get_shard(j->model, s, &shard));
    for (uint64_t i = 0; i < shard.element_count; ++i) ((float *)shard.main_weight)[i] += (float)(0.1 * shard.lr_scale);
  }
  OK(fsdp_publish_weights(j->model, NULL));
}

static void live(job *j) {
  OK(fsdp_get_rank(j->context, &j->rank));
  OK(fsdp_get_world_size(j->context, &j->ranks));
  declare(j);
  check_layout(j);
  load(j);
  for (int steps = 0; steps < 3; ++steps) {
    step(j, steps);
    for (int g = 0; g < 2; ++g) visit(j, g, FSDP_EVAL, steps + 1);
    read_back(j, steps + 1);
  }
  edit(j);
  read_back(j, 2);
  check_stats(j);
  check_description(j);
  fsdp_error error = FSDP_ERROR_INIT;
  OK(fsdp_get_context_error(j->context, &error));
  CHECK(error.status == FSDP_OK && error.context_failed == 0 && error.rank == -1);
  OK(fsdp_close_context(j->context));
}

static void *run_rank(void *data) {
  live(data);
  return NULL;
}

static void world_of_one(void) {
  static const char *const variables[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
  for (int i = 0; i < 4; ++i) unsetenv(variables[i]);
  job j = {0};
  OK(fsdp_create_context(NULL, &j.context));
  live(&j);
  CHECK(j.rank == 0 && j.ranks == 1);
  fsdp_destroy_model(j.model);
  fsdp_destroy_context(j.context);
}

static void two_threads(void) {
  fsdp_context *contexts[2];
  pthread_t threads[2];
  job jobs[2] = {{0}, {0}};
  OK(fsdp_create_local_contexts(2, NULL, contexts));
  for (int r = 0; r < 2; ++r) {
    jobs[r].context = contexts[r];
    CHECK(pthread_create(&threads[r], NULL, run_rank, &jobs[r]) == 0);
  }
  for (int r = 0; r < 2; ++r) CHECK(pthread_join(threads[r], NULL) == 0);
  for (int r = 0; r < 2; ++r) {
    CHECK(jobs[r].rank == (uint32_t)r && jobs[r].ranks == 2);
    /* Any order is allowed, and the model outlives the context's handle. */
    fsdp_destroy_context(contexts[r]);
    fsdp_destroy_model(jobs[r].model);
  }
}

int main(void) {
  CHECK(strcmp(fsdp_get_version(), "0.2.0") == 0);
  world_of_one();
  two_threads();
  printf("lifecycle: ok, a world of one and two ranks as threads\n");
  return 0;
}
