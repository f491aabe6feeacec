/* SPDX-License-Identifier: Apache-2.0 */
/*
 * train_gpt: a byte-level GPT trained with its parameters, gradients and optimizer state sharded over the ranks.
 *
 *   fsdp-run -n 2 train_gpt        two ranks, each a process
 *   train_gpt --threads 2          the same with two threads of one process
 *   train_gpt_cuda                 the same with the math and libfsdp's memory on GPUs
 *
 * Plain C99 over fsdp.h, libm and a BLAS. step.c is the training step, and the file to read first.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "checkpoint.h"
#include "report.h"
#include "trace.h"

#ifdef HAVE_OPENBLAS_SET_NUM_THREADS
void openblas_set_num_threads(int count);
#endif
#ifdef HAVE_OPENBLAS_GET_CORENAME
char *openblas_get_corename(void);

/* An OpenBLAS that is older than the processor takes its oldest kernels (Prescott), three times as slow. OpenBLAS
 * reads OPENBLAS_CORETYPE when it is loaded, so the program sets it and starts again, in the same process. */
static void choose_kernels(char **argv) {
  if (getenv("OPENBLAS_CORETYPE") || strcmp(openblas_get_corename(), "Prescott") != 0) return;
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
  const int has_avx512 = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  setenv("OPENBLAS_CORETYPE", has_avx512 ? "SkylakeX" : "Haswell", 1);
  execv("/proc/self/exe", argv); /* if it fails, training is slow */
}
#endif

struct rank {
  fsdp_context *context;
  const struct options *options;
  const struct corpus *corpus;
  pthread_t thread;
  int exit_status;
};

static void train(struct rank *rank) {
  const struct options *options = rank->options;
  struct trainer trainer;
  struct report report;
  struct step_result result;
  trainer_create(&trainer, rank->context, options, rank->corpus);
  trainer.first_step = checkpoint_resume(&trainer);
  report_begin(&report, &trainer);
  int stopped = 0;
  for (uint64_t step = trainer.first_step; step < options->steps && !stopped; ++step) {
    train_step(&trainer, step, &result);
    report_step(&report, step, &result);
    stopped = checkpoint_after_step(&trainer, step + 1);
  }
  if (options->sample) {
    uint8_t *text = check_allocate(options->sample);
    sample_text(&trainer, text, options->sample);
    report_sample(&report, text, options->sample);
    free(text);
  }
  /* Gathering all weights is for comparing runs: not worth its time when the result is not read. */
  report_end(&report, options->json ? model_hash_weights(&trainer.model) : 0);
  trainer_destroy(&trainer);
}

static void *run_rank(void *argument) {
  struct rank *rank = argument;
  uint32_t index = 0, world_size = 0;
  CHECK(rank->context, fsdp_get_rank(rank->context, &index));
  CHECK(rank->context, fsdp_get_world_size(rank->context, &world_size));
  if (options_batch_divides(rank->options, index, world_size) && checkpoint_folder_is_free(rank->options, index)) {
    if (rank->options->trace) trace_write_part(rank->context, rank->options->trace);
    train(rank);
    if (rank->options->trace) trace_write(rank->context, rank->options->trace);
  } else {
    rank->exit_status = 2;
  }
  CHECK(rank->context, fsdp_close_context(rank->context));
  fsdp_destroy_context(rank->context);
  return NULL;
}

static fsdp_context_options make_context_options(const struct options *options) {
  fsdp_context_options settings = FSDP_CONTEXT_OPTIONS_INIT;
  if (options->no_overlap) settings.flags |= FSDP_CONTEXT_NO_OVERLAP;
  if (options->trace) settings.flags |= FSDP_CONTEXT_TRACE;
  device_set_context_options(&settings);
  settings.device_transport = (fsdp_device_transport)options->transport;
  settings.ranks_per_host = (uint32_t)options->ranks_per_host;
  settings.debug_delay_us = (uint32_t)options->debug_delay_us;
  settings.debug_delay_seed = options->seed;
  return settings;
}

/* One rank of several processes, or alone. */
static int run_process(const struct options *options, const struct corpus *corpus) {
  const fsdp_context_options settings = make_context_options(options);
  struct rank rank = {.options = options, .corpus = corpus};
  CHECK(NULL, fsdp_create_context(&settings, &rank.context));
  run_rank(&rank);
  return rank.exit_status;
}

static int run_threads(const struct options *options, const struct corpus *corpus) {
  const fsdp_context_options settings = make_context_options(options);
  const uint32_t count = (uint32_t)options->threads;
  struct rank *ranks = check_allocate(count * sizeof *ranks);
  fsdp_context **contexts = check_allocate(count * sizeof(fsdp_context *));
  CHECK(NULL, fsdp_create_local_contexts(count, &settings, contexts));
  for (uint32_t i = 0; i < count; ++i) {
    ranks[i] = (struct rank){.context = contexts[i], .options = options, .corpus = corpus};
    if (pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i])) {
      fprintf(stderr, "train_gpt: cannot start a thread for rank %u\n", (unsigned)i);
      exit(1);
    }
  }
  for (uint32_t i = 0; i < count; ++i) pthread_join(ranks[i].thread, NULL);
  const int exit_status = ranks[0].exit_status;
  free(contexts);
  free(ranks);
  return exit_status;
}

int main(int argc, char **argv) {
  struct options options;
  struct corpus corpus;
#ifdef HAVE_OPENBLAS_GET_CORENAME
  choose_kernels(argv);
#endif
  options_parse(&options, argc, argv);
#ifdef HAVE_OPENBLAS_SET_NUM_THREADS
  openblas_set_num_threads(
      1); /* the ranks share the machine's cores; a BLAS with threads of its own would fight them */
#endif
  corpus_load(&corpus, options.corpus, options.corpus_count);
  if (options.save) checkpoint_listen();
  const int exit_status = options.threads ? run_threads(&options, &corpus) : run_process(&options, &corpus);
  corpus_free(&corpus);
  return exit_status ? exit_status : checkpoint_exit_status();
}
