/* SPDX-License-Identifier: Apache-2.0 */
/* The command line. */
#ifndef TRAIN_GPT_OPTIONS_H
#define TRAIN_GPT_OPTIONS_H

#include <stdint.h>

enum norm_kind { LAYER_NORM = 1, RMS_NORM = 2 };

struct options {
  uint64_t layers, width, heads, context;
  uint64_t batch; /* sequences of one step, over all ranks */
  uint64_t microbatches;
  uint64_t steps;
  uint64_t seed;
  uint64_t prefetch, pending;
  uint64_t threads; /* ranks as threads of this process; 0: one rank, joined through the launcher's variables */
  uint64_t sample;  /* bytes of text to print at the end */
  uint64_t debug_delay_us;
  uint64_t replicas, reduction_block, ranks_per_host; /* of the mesh; 0: the library's defaults */
  uint64_t save_every, keep;
  uint64_t strategy, compute_dtype, quantization, reduce_dtype, unshard_mode, reduce_policy, norm, outer_strategy,
      transport, main_storage, optimizer; /* the enums' values; 0: libfsdp's default */
  uint64_t recompute, tied, no_overlap, quiet, in_place, force, graph, resume, home_grads; /* switches */
  double lr, weight_decay, clip;
  const char *json, *trace, *save;
  const char *home; /* of main weights and states: "host", "file:" and a directory, or NULL: memory of the device */
  char **corpus;    /* paths, not owned */
  uint64_t corpus_count;
};

/** Reads the command line over the defaults. Prints what is wrong and exits with 2, or with 0 after --help. */
void options_parse(struct options *options, int argc, char **argv);

/** Explains on rank 0 why the batch does not divide and returns 0; 1 if it does. */
int options_batch_divides(const struct options *options, uint64_t rank, uint64_t world_size);

/** The name that --strategy takes for a value. */
const char *options_strategy_name(uint64_t strategy);
/** ... and --main, and --states. */
const char *options_main_name(uint64_t main_storage);
const char *options_states_name(uint64_t optimizer);
/** ... and the directory of --home file:DIRECTORY; NULL if it is no file. */
const char *options_home_directory(const struct options *options);

#endif
