/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moe: a mixture of experts, whose experts have a mesh of their own.
 *
 *   moe --ranks 4                  four ranks, each a thread; each has a half of the experts (expert-parallel 2)
 *   fsdp-run -n 4 moe              four ranks, each a process
 *   moe --ranks 1                  one rank with all experts: it prints the same lines, to the last digit
 *
 * Dense layers and the router are sharded over all ranks, experts over those ranks that have the same experts. Tokens
 * travel to experts and back in memory of the program's own (exchange.c). step.c is the training step, and the file to
 * read first.
 */
#include <inttypes.h>
#include <pthread.h>
#include <string.h>

#include "../check.h"
#include "step.h"

static struct options {
  int ranks, expert_parallel, steps; /* 0 ranks: processes of a launcher; expert_parallel 0: the default */
  const char *save, *load;
} options = {0, 0, 20, NULL, NULL};

static void end_with_usage(void) {
  fprintf(stderr,
          "usage: moe [--ranks 1|2|4] [--expert-parallel 1|2] [--steps N] [--save DIR] [--load DIR]\n"
          "  --ranks            threads; without it ranks are processes that a launcher started\n"
          "  --expert-parallel  ranks that have all experts between them; default: 2, or 1 with one rank\n"
          "  --steps            steps to train; default 20\n"
          "  --save, --load     folder for a checkpoint after the last step, or to go on from\n");
  exit(2);
}

static int parse_number(const char *text) {
  char *end = NULL;
  const long number = strtol(text, &end, 10);
  if (*end || end == text || number < 0 || number > 1000000) end_with_usage();
  return (int)number;
}

static void parse_options(int argc, char **argv) {
  for (int i = 1; i < argc; i += 2) {
    if (i + 1 == argc) end_with_usage();
    const char *value = argv[i + 1];
    if (!strcmp(argv[i], "--ranks"))
      options.ranks = parse_number(value);
    else if (!strcmp(argv[i], "--expert-parallel"))
      options.expert_parallel = parse_number(value);
    else if (!strcmp(argv[i], "--steps"))
      options.steps = parse_number(value);
    else if (!strcmp(argv[i], "--save"))
      options.save = value;
    else if (!strcmp(argv[i], "--load"))
      options.load = value;
    else
      end_with_usage();
  }
}

static int find_expert_parallel(int ranks) {
  const int found = options.expert_parallel ? options.expert_parallel : ranks > 1 ? 2 : 1;
  if ((ranks == 1 || ranks == 2 || ranks == MOST_RANKS) && found <= 2 && found <= ranks) return found;
  fprintf(stderr,
          "moe: ranks %d, expert-parallel %d: there must be 1, 2 or 4 ranks, and expert-parallel is 1 or 2\n",
          ranks, found);
  exit(2);
}

static struct trainer *create_trainer(fsdp_context *context) {
  struct trainer *trainer = calloc(1, sizeof *trainer);
  uint32_t ranks = 0;
  if (!trainer) exit(1);
  check(fsdp_get_world_size(context, &ranks));
  const int expert_parallel = find_expert_parallel((int)ranks);
  model_create(&trainer->model, context, expert_parallel);
  trainer->exchange = exchange_open(context, expert_parallel);
  trainer->parts = ranks == 1 ? PARTS : 1;
  trainer->first_part = trainer->model.rank % PARTS;
  trainer->tokens = trainer->parts * PART_TOKENS;
  model_load_initial(&trainer->model);
  return trainer;
}

/* Any number of ranks may load what others have saved, with experts divided in another way. */
static uint64_t load(struct trainer *trainer) {
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  if (!options.load) return 0;
  check(fsdp_begin_update(trainer->model.handle, NULL));
  check(fsdp_load(trainer->model.handle, options.load, NULL, &loaded));
  check(fsdp_publish_weights(trainer->model.handle, NULL));
  return loaded.step;
}

static void print_end(struct trainer *trainer) {
  const uint64_t hash = model_hash(&trainer->model);
  double *counts = trainer->counts;
  check(fsdp_all_reduce_values(trainer->model.context, NULL, counts, EXPERTS, FSDP_VALUE_SUM));
  if (trainer->model.rank != 0) return;
  printf("tokens of the experts: %.0f %.0f %.0f %.0f\n", counts[0], counts[1], counts[2], counts[3]);
  printf("weights %016" PRIx64 "\n", hash);
}

static void *run_rank(void *argument) {
  fsdp_context *context = argument;
  struct trainer *trainer = create_trainer(context);
  const uint64_t first = load(trainer);
  for (uint64_t step = first; step < first + (uint64_t)options.steps; ++step) {
    const struct step_result result = train_step(trainer, step);
    if (trainer->model.rank == 0)
      printf("step %" PRIu64 "  loss %.17g  norm %.6g\n", step + 1, result.loss, result.norm);
  }
  if (options.save) check(fsdp_save(trainer->model.handle, options.save, NULL));
  print_end(trainer);
  check(fsdp_close_context(context));
  model_destroy(&trainer->model);
  exchange_close(trainer->exchange);
  fsdp_destroy_context(context);
  free(trainer);
  return NULL;
}

static void run_threads(uint32_t count) {
  fsdp_context *contexts[MOST_RANKS] = {NULL};
  pthread_t threads[MOST_RANKS];
  check(fsdp_create_local_contexts(count, NULL, contexts));
  for (uint32_t i = 0; i < count; ++i)
    if (pthread_create(&threads[i], NULL, run_rank, contexts[i])) exit(1);
  for (uint32_t i = 0; i < count; ++i) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
  parse_options(argc, argv);
  if (options.ranks) {
    find_expert_parallel(options.ranks);
    run_threads((uint32_t)options.ranks);
  } else {
    fsdp_context *context = NULL;
    check(fsdp_create_context(NULL, &context));
    run_rank(context);
  }
  return 0;
}
