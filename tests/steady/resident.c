/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Unshards and reshards groups whose weights are already resident, PAIRS times, between two markers. A marker is a
 * write to the descriptor -1. It fails and does nothing, but appears in the thread's list of system calls
 * (syscall_test.sh).
 * usage: resident PAIRS MODE [RANKS]     MODE: mapped (published weights), held (copied, and held all the while), whole
 *                                        (FSDP_STRATEGY_NO_SHARD); RANKS: as threads, without a launcher
 */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "../abi/check.h"

enum { GROUPS = 3, MOST_RANKS = 8 };
static unsigned long pairs;
static const char *mode;

static void create_model(fsdp_context *context, fsdp_model **model, fsdp_group **groups) {
  static const float values[256 * 64] = {1};
  const uint64_t shape[] = {256, 64};
  static const char *const names[] = {"a", "b", "c"};
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  if (strcmp(mode, "held") == 0) options.unshard_mode = FSDP_UNSHARD_COPIED, options.prefetch_depth = GROUPS;
  if (strcmp(mode, "whole") == 0) options.strategy = FSDP_STRATEGY_NO_SHARD;
  OK(fsdp_create_model(context, &options, model));
  for (int g = 0; g < GROUPS; ++g) {
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = names[g];
    param.shape = shape;
    param.dimension_count = 2;
    OK(fsdp_create_group(*model, names[g], &param, 1, sizeof param, NULL, &groups[g]));
  }
  OK(fsdp_seal_model(*model));
  for (int g = 0; g < GROUPS; ++g)
    OK(fsdp_load_param(groups[g], 0, values, FSDP_FLOAT32, 256 * 64, FSDP_EVERY_RANK, 0));
  OK(fsdp_publish_weights(*model, NULL));
}

/* Visits every group. The first visit of a version may wait and move bytes; later visits find the weights resident. */
static void visit(fsdp_group **groups) {
  for (int g = 0; g < GROUPS; ++g) {
    OK(fsdp_unshard(groups[g], FSDP_EVAL, 0, NULL));
    OK(fsdp_reshard(groups[g], FSDP_EVAL, 0, NULL));
  }
}

static void *run_rank(void *argument) {
  fsdp_context *context = argument;
  fsdp_model *model;
  fsdp_group *groups[GROUPS];
  const int held = strcmp(mode, "held") == 0;
  create_model(context, &model, groups);
  if (held) OK(fsdp_unshard(groups[0], FSDP_EVAL, 0, NULL));
  for (int i = 0; i < 10 && !held; ++i) visit(groups);
  (void)!write(-1, "begin pairs", 11);
  for (unsigned long i = 0; i < pairs; ++i) {
    fsdp_group *group = groups[held ? 0 : i % GROUPS];
    OK(fsdp_unshard(group, FSDP_EVAL, 0, NULL));
    OK(fsdp_reshard(group, FSDP_EVAL, 0, NULL));
  }
  (void)!write(-1, "end pairs", 9);
  if (held) OK(fsdp_reshard(groups[0], FSDP_EVAL, 0, NULL));
  OK(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[MOST_RANKS];
  fsdp_context *contexts[MOST_RANKS];
  CHECK(argc >= 3);
  pairs = strtoul(argv[1], NULL, 10);
  mode = argv[2];
  const uint32_t ranks = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 0;
  CHECK(ranks <= MOST_RANKS);
  if (ranks == 0) {
    OK(fsdp_create_context(NULL, &contexts[0]));
    run_rank(contexts[0]);
    return 0;
  }
  OK(fsdp_create_local_contexts(ranks, NULL, contexts));
  for (uint32_t r = 0; r < ranks; ++r) CHECK(pthread_create(&threads[r], NULL, run_rank, contexts[r]) == 0);
  for (uint32_t r = 0; r < ranks; ++r) pthread_join(threads[r], NULL);
  return 0;
}
