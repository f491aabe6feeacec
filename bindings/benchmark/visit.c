/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a visit of a group costs in C: unshard, 12 views, reshard, in a world of one. run.sh compares it with other
 * languages, whose programs do the same. Prints nanoseconds, the median of 9 rounds of 20,000 visits.
 *
 *   visit params    fsdp_get_params for all views of a visit: what others are compared with
 *   visit param     fsdp_get_param for each
 *   visit kept      the views of the first visit, whose addresses are fixed
 */
#include <fsdp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { VIEWS = 12, VISITS = 20000, ROUNDS = 9 };

static fsdp_group *group;
static fsdp_tensor views[VIEWS];
static float sum; /* what is read, so that nothing is left out */

static void check(fsdp_status status) {
  if (status == FSDP_OK) return;
  fprintf(stderr, "visit: %s\n", fsdp_get_last_message());
  exit(1);
}

static void get_views(const char *how) {
  if (strcmp(how, "params") == 0) check(fsdp_get_params(group, FSDP_FORWARD, views, VIEWS, sizeof *views));
  for (uint64_t p = 0; p < VIEWS && strcmp(how, "param") == 0; ++p) {
    views[p].struct_size = sizeof *views;
    check(fsdp_get_param(group, p, FSDP_FORWARD, &views[p]));
  }
}

static double time_visits(const char *how) {
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  for (int visit = 0; visit < VISITS; ++visit) {
    check(fsdp_unshard(group, FSDP_FORWARD, 0, NULL));
    get_views(how);
    for (int p = 0; p < VIEWS; ++p) sum += *(const float *)views[p].data;
    check(fsdp_reshard(group, FSDP_FORWARD, 0, NULL));
  }
  clock_gettime(CLOCK_MONOTONIC, &ended);
  return ((double)(ended.tv_sec - began.tv_sec) * 1e9 + (double)(ended.tv_nsec - began.tv_nsec)) / VISITS;
}

static int compare(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }

int main(int count, char **arguments) {
  const char *how = count > 1 ? arguments[1] : "params";
  fsdp_context *context = NULL;
  fsdp_model *model = NULL;
  fsdp_param params[VIEWS];
  char names[VIEWS][8];
  check(fsdp_create_local_contexts(1, NULL, &context));
  check(fsdp_create_model(context, NULL, &model));
  for (int p = 0; p < VIEWS; ++p) {
    snprintf(names[p], sizeof names[p], "w%d", p);
    params[p] = FSDP_PARAM("", 64, 64);
    params[p].name = names[p];
  }
  check(fsdp_create_group(model, "layer", FSDP_ARRAY(params), NULL, &group));
  check(fsdp_seal_model(model));
  check(fsdp_publish_weights(model, NULL));
  check(fsdp_unshard(group, FSDP_FORWARD, 0, NULL));
  get_views("params");
  check(fsdp_reshard(group, FSDP_FORWARD, 0, NULL));
  double times[ROUNDS];
  time_visits(how);
  for (int round = 0; round < ROUNDS; ++round) times[round] = time_visits(how);
  qsort(times, ROUNDS, sizeof *times, compare);
  printf("%.1f\n", times[ROUNDS / 2]);
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  return sum == 0 ? 0 : 1; /* the weights were never loaded */
}
