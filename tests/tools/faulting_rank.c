/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rank that uses memory of the library when it may not. usage: faulting_rank KIND [threads]. The last rank of the job
 * does so. With "threads" as a second argument the job is two threads of this process.
 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fsdp.h"

enum { COUNT = 64, THREADS = 2 };
#define CHECK(call) check(call, #call)

static const char *kind;

static void check(fsdp_status status, const char *call) {
  if (status == FSDP_OK) return;
  fsdp_error error = FSDP_ERROR_INIT;
  fsdp_get_last_error(NULL, &error);
  fprintf(stderr, "%s: %s\n", call, error.message);
  exit(1);
}

struct model {
  fsdp_model *model;
  fsdp_group *groups[2];
};

static struct model make_model(fsdp_context *context, fsdp_strategy strategy) {
  static const char *const names[] = {"embed", "layer.3\nof two lines"};
  const uint64_t shape[] = {COUNT};
  struct model made = {NULL, {NULL, NULL}};
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.strategy = strategy;
  options.unshard_mode = FSDP_UNSHARD_MAPPED;
  CHECK(fsdp_create_model(context, &options, &made.model));
  for (int g = 0; g < 2; ++g) {
    fsdp_param param = FSDP_PARAM_INIT;
    char name[32];
    snprintf(name, sizeof name, "weight.%d", g);
    param.name = name, param.shape = shape, param.dimension_count = 1;
    CHECK(fsdp_create_group(made.model, names[g], &param, 1, sizeof param, NULL, &made.groups[g]));
  }
  CHECK(fsdp_seal_model(made.model));
  CHECK(fsdp_publish_weights(made.model, NULL));
  return made;
}

static volatile float *view_of(fsdp_group *group) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  CHECK(fsdp_unshard(group, FSDP_EVAL, 0, NULL));
  CHECK(fsdp_get_param(group, 0, FSDP_EVAL, &view));
  CHECK(fsdp_reshard(group, FSDP_EVAL, 0, NULL));
  return view.data;
}

static volatile float *gradient_of(fsdp_group *group) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 0;
  CHECK(fsdp_acquire_grad(group, 0, 0, NULL, &grad, &accumulate));
  memset(grad.data, 0, COUNT * sizeof(float));
  CHECK(fsdp_reduce_grad(group, FSDP_LAST, NULL));
  return grad.data;
}

static int is(const char *word) { return strcmp(kind, word) == 0; }

static void take(int number) {
  static const char text[] = "the program's own handler\n";
  const ssize_t written = write(2, text, sizeof text - 1);
  _exit(written > 0 ? 40 + number : 1);
}

static void fault(struct model *model, volatile float *weights) {
  if (is("read")) weights[COUNT - 1] += *weights;
  if (is("write")) *weights = 1;
  if (is("null")) *(volatile float *volatile *)&weights = NULL, *weights = 1;
  if (is("raise")) raise(SIGSEGV);
  if (is("late")) *gradient_of(model->groups[1]) = 1;
  if (is("window")) CHECK(fsdp_begin_update(model->model, NULL)), weights[COUNT - 1] += *weights;
  if (is("destroyed")) fsdp_destroy_model(model->model), weights[COUNT - 1] += *weights;
  if (is("own") && signal(SIGSEGV, take) != SIG_ERR) weights[COUNT - 1] += *weights;
}

static void *live(void *context) {
  uint32_t rank = 0, world_size = 0;
  CHECK(fsdp_get_rank(context, &rank));
  CHECK(fsdp_get_world_size(context, &world_size));
  make_model(context, 0); /* not the first */
  struct model model = make_model(context, is("window") ? FSDP_STRATEGY_OPTIM_GRADS : FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  volatile float *const weights = view_of(model.groups[1]);
  double one = 1;
  CHECK(fsdp_all_reduce_values(context, NULL, &one, 1, FSDP_VALUE_SUM));
  if (rank + 1 != world_size) pause(); /* the process could otherwise end by itself first */
  fault(&model, weights);
  return NULL;
}

int main(int argc, char **argv) {
  fsdp_context *contexts[THREADS] = {NULL};
  pthread_t threads[THREADS];
  if (argc < 2) return 2;
  kind = argv[1];
  if (argc == 2) {
    CHECK(fsdp_create_context(NULL, &contexts[0]));
    live(contexts[0]);
    return 0;
  }
  CHECK(fsdp_create_local_contexts(THREADS, NULL, contexts));
  for (int r = 0; r < THREADS; ++r)
    if (pthread_create(&threads[r], NULL, live, contexts[r]) != 0) return 2;
  for (int r = 0; r < THREADS; ++r) pthread_join(threads[r], NULL);
  return 0;
}
