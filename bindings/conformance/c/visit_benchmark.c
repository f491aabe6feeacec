/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a visit of a group costs in C, for the bindings to be compared with: unshard, 12 views, reshard, in a world of
 * one. Prints the median of 9 rounds of 20,000 visits in microseconds, as "visit_us VALUE".
 */
#include <fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PARAMS = 12, VISITS = 20000, ROUNDS = 9 };

static void need(fsdp_status status) {
  if (status == FSDP_OK) return;
  fprintf(stderr, "%s\n", fsdp_get_last_message());
  exit(1);
}

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static double run_round(fsdp_group *group) {
  fsdp_tensor views[PARAMS] = {FSDP_TENSOR_INIT};
  const double began = now_us();
  for (int visit = 0; visit < VISITS; ++visit) {
    need(fsdp_unshard(group, FSDP_FORWARD, 0, NULL));
    for (uint64_t p = 0; p < PARAMS; ++p) {
      views[p].struct_size = sizeof *views;
      need(fsdp_get_param(group, p, FSDP_FORWARD, &views[p]));
    }
    need(fsdp_reshard(group, FSDP_FORWARD, 0, NULL));
  }
  return (now_us() - began) / VISITS;
}

static int compare(const void *a, const void *b) {
  return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

int main(void) {
  static const char *const names[PARAMS] = {"w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "w9", "w10", "w11"};
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_group *group = NULL;
  fsdp_param params[PARAMS];
  double times[ROUNDS];
  for (int p = 0; p < PARAMS; ++p) params[p] = FSDP_PARAM(names[p], 64, 64);
  need(fsdp_create_local_contexts(1, NULL, &context));
  need(fsdp_create_model(context, NULL, &model));
  need(fsdp_create_group(model, "layer", FSDP_ARRAY(params), NULL, &group));
  need(fsdp_seal_model(model));
  need(fsdp_publish_weights(model, NULL));
  run_round(group);
  for (int r = 0; r < ROUNDS; ++r) times[r] = run_round(group);
  qsort(times, ROUNDS, sizeof *times, compare);
  printf("visit_us %.3f\n", times[ROUNDS / 2]);
  fsdp_destroy_model(model);
  need(fsdp_close_context(context));
  fsdp_destroy_context(context);
  return 0;
}
