/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Trains a model of 128 MiB of weights for some steps. Then it compares the plan with the memory that the kernel
 * charges to the processes. The measure is the proportional size (PSS) in /proc/self/smaps: a page that N mappings
 * share counts 1 / N for each. What the allocator counted must be the plan, to the byte, and training must not have
 * changed it. Each process has grown by the plan of its rank, within 1 %. This is all its memory except machine code.
 * Machine code belongs to the files of the program and the system, and is loaded as it runs. With mapped weights the
 * compute weights of all ranks together are one copy, within 2 %.
 * usage: footprint mapped|copied|whole     on one rank of the launcher's
 */
#include <inttypes.h>
#include <math.h>

#include "../abi/check.h"

enum { GROUPS = 32, ROWS = 1024, COLUMNS = 1024, STEPS = 4 };
static const uint64_t group_bytes = 4ull * ROWS * COLUMNS;

/* Returns the PSS in bytes: of all memory of the process without files, or of the shared memory around an address. */
static double read_pss(const void *address) {
  FILE *file = fopen("/proc/self/smaps", "r");
  CHECK(file != NULL);
  char line[4352];
  uint64_t begin = 0, end = 0, inode = 0, wanted = 0, kib = 0;
  int counts = 0;
  double total = 0;
  for (int pass = address ? 0 : 1; pass < 2; ++pass) { /* the first finds the shared memory's number */
    rewind(file);
    while (fgets(line, sizeof line, file)) {
      char path[16] = "";
      if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64 " %15s", &begin, &end, &inode, path) >= 3) {
        if (pass == 0 && (uintptr_t)address >= begin && (uintptr_t)address < end) wanted = inode;
        counts = address ? inode == wanted : path[0] != '/' || strncmp(path, "/memfd:", 7) == 0;
      } else if (pass == 1 && counts && sscanf(line, "Pss: %" SCNu64 " kB", &kib) == 1) {
        total += 1024.0 * (double)kib;
      }
    }
  }
  fclose(file);
  CHECK(!address || wanted != 0);
  return total;
}

static void create_groups(fsdp_model *model, fsdp_group **groups, float *values) {
  const uint64_t shape[] = {ROWS, COLUMNS};
  for (int g = 0; g < GROUPS; ++g) {
    char name[16];
    fsdp_param param = FSDP_PARAM_INIT;
    snprintf(name, sizeof name, "layer.%d", g);
    param.name = name;
    param.shape = shape;
    param.dimension_count = 2;
    OK(fsdp_create_group(model, name, &param, 1, sizeof param, NULL, &groups[g]));
  }
  OK(fsdp_seal_model(model));
  for (int g = 0; g < GROUPS; ++g)
    OK(fsdp_load_param(groups[g], 0, values, FSDP_FLOAT32, ROWS * COLUMNS, FSDP_EVERY_RANK, 0));
  OK(fsdp_publish_weights(model, NULL));
}

/* Computes gradients of a loss that pulls every weight to 1. Reads every weight and writes every gradient. */
static void train_step(fsdp_model *model, fsdp_group **groups) {
  for (int g = GROUPS; g-- > 0;) {
    fsdp_tensor full = FSDP_TENSOR_INIT, grad = FSDP_TENSOR_INIT;
    int32_t accumulate = 0;
    OK(fsdp_unshard(groups[g], FSDP_BACKWARD, 0, NULL));
    OK(fsdp_get_param(groups[g], 0, FSDP_BACKWARD, &full));
    OK(fsdp_acquire_grad(groups[g], 0, 0, NULL, &grad, &accumulate));
    for (uint64_t i = 0; i < full.element_count; ++i) ((float *)grad.data)[i] = ((const float *)full.data)[i] - 1;
    OK(fsdp_reshard(groups[g], FSDP_BACKWARD, 0, NULL));
    OK(fsdp_reduce_grad(groups[g], FSDP_LAST, NULL));
  }
  OK(fsdp_finish_grads(model, 1.0, 0, NULL));
  OK(fsdp_step_adamw(model, 0.1, NULL, NULL));
}

static int within(const char *what, uint32_t rank, double got, double expected, double tolerance) {
  const double off = got / expected - 1;
  const int good = fabs(off) <= tolerance;
  printf("%s rank %u: %s %.2f MiB, expected %.2f MiB: %+.2f %%\n", good ? "good" : "BAD", rank, what, got / 1048576,
         expected / 1048576, 100 * off);
  return good;
}

static int check_plan(fsdp_model *model, uint32_t rank, uint64_t *planned) {
  uint64_t all = 0;
  int good = 1;
  for (fsdp_role role = FSDP_ROLE_STAGING; role >= FSDP_ROLE_ALL; --role) {
    OK(fsdp_get_role_bytes(model, role, rank, planned));
    OK(fsdp_get_allocated_bytes(model, role, &all));
    good &= all == *planned;
  }
  printf("%s rank %u: %" PRIu64 " bytes allocated, %" PRIu64 " planned\n", good ? "good" : "BAD", rank, all, *planned);
  return good;
}

int main(int argc, char **argv) {
  static float values[ROWS * COLUMNS];
  fsdp_context *context;
  fsdp_model *model;
  fsdp_group *groups[GROUPS];
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  uint64_t planned = 0;
  uint32_t rank = 0;
  CHECK(argc == 2);
  const char *mode = argv[1];
  if (strcmp(mode, "copied") == 0) options.unshard_mode = FSDP_UNSHARD_COPIED;
  if (strcmp(mode, "whole") == 0) options.strategy = FSDP_STRATEGY_NO_SHARD;
  memset(values, 1, sizeof values); /* the program's own memory is allocated before it is measured */
  const double before = read_pss(NULL);
  OK(fsdp_create_context(NULL, &context));
  OK(fsdp_get_rank(context, &rank));
  OK(fsdp_create_model(context, &options, &model));
  create_groups(model, groups, values);
  int good = check_plan(model, rank, &planned);
  for (int step = 0; step < STEPS; ++step) train_step(model, groups);
  good &= check_plan(model, rank, &planned);

  fsdp_tensor full = FSDP_TENSOR_INIT;
  OK(fsdp_unshard(groups[0], FSDP_EVAL, 0, NULL));
  OK(fsdp_get_param(groups[0], 0, FSDP_EVAL, &full));
  const int mapped = strcmp(mode, "mapped") == 0;
  double sums[] = {1, 0};
  OK(fsdp_all_reduce_values(context, NULL, sums, 1,
                            FSDP_VALUE_SUM)); /* from here to the next all_reduce all ranks only read */
  const double grown = read_pss(NULL) - before;
  sums[1] = mapped ? read_pss(full.data) : 0;
  OK(fsdp_all_reduce_values(context, NULL, &sums[1], 1, FSDP_VALUE_SUM));
  good &= within("the process has grown by", rank, grown, (double)planned, 0.01);
  if (mapped) good &= within("compute weights of all ranks", rank, sums[1], (double)(GROUPS * group_bytes), 0.02);
  OK(fsdp_reshard(groups[0], FSDP_EVAL, 0, NULL));
  OK(fsdp_close_context(context));
  fsdp_destroy_model(model);
  fsdp_destroy_context(context);
  return good ? 0 : 1;
}
