/* SPDX-License-Identifier: Apache-2.0 */
#include "options.h"

#include <errno.h>
#include <fsdp.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"

struct choice {
  const char *name;
  uint64_t value;
};
static const struct choice strategies[] = {{"no_shard", FSDP_STRATEGY_NO_SHARD},
                                           {"optim", FSDP_STRATEGY_OPTIM},
                                           {"optim_grads", FSDP_STRATEGY_OPTIM_GRADS},
                                           {"optim_grads_params", FSDP_STRATEGY_OPTIM_GRADS_PARAMS},
                                           {"ddp", FSDP_STRATEGY_NO_SHARD},
                                           {"zero1", FSDP_STRATEGY_OPTIM},
                                           {"zero2", FSDP_STRATEGY_OPTIM_GRADS},
                                           {"zero3", FSDP_STRATEGY_OPTIM_GRADS_PARAMS},
                                           {NULL, 0}};
static const struct choice dtypes[] = {{"fp32", FSDP_FLOAT32}, {"bf16", FSDP_BFLOAT16}, {NULL, 0}};
static const struct choice quantizations[] = {{"none", 0},
                                              {"fp8", FSDP_QUANTIZE_FP8},
                                              {"mxfp8", FSDP_QUANTIZE_MXFP8},
                                              {"fp8_block", FSDP_QUANTIZE_FP8_BLOCK},
                                              {NULL, 0}};
static const struct choice main_storages[] = {
    {"fp32", FSDP_MAIN_FLOAT32}, {"split16", FSDP_MAIN_SPLIT16}, {"none", FSDP_MAIN_NONE}, {NULL, 0}};
static const struct choice optimizers[] = {
    {"fp32", FSDP_OPTIMIZER_ADAMW}, {"8bit", FSDP_OPTIMIZER_ADAMW_8BIT}, {NULL, 0}};
static const struct choice unshard_modes[] = {
    {"mapped", FSDP_UNSHARD_MAPPED}, {"copied", FSDP_UNSHARD_COPIED}, {NULL, 0}};
static const struct choice outer_strategies[] = {{"no_shard", FSDP_OUTER_NO_SHARD},
                                                 {"optim", FSDP_OUTER_OPTIM},
                                                 {"hsdp", FSDP_OUTER_NO_SHARD},
                                                 {"hfsdp", FSDP_OUTER_OPTIM},
                                                 {NULL, 0}};
static const struct choice transports[] = {
    {"auto", 0}, {"nccl", FSDP_TRANSPORT_NCCL}, {"staging", FSDP_TRANSPORT_STAGING}, {NULL, 0}};
static const struct choice norms[] = {{"layernorm", LAYER_NORM}, {"rmsnorm", RMS_NORM}, {NULL, 0}};

/* A switch stores `value`; COUNT takes an integer of at least `value`; OPTIONAL is a COUNT that may be left out. */
enum flag_kind { COUNT, OPTIONAL, REAL, CHOICE, SWITCH, STRING, PATHS };
struct flag {
  const char *name;
  enum flag_kind kind;
  size_t offset;
  uint64_t value;
  const struct choice *choices;
  const char *help;
};
#define FIELD(name) offsetof(struct options, name)
static const struct flag flags[] = {
    {"--layers", COUNT, FIELD(layers), 1, NULL, "transformer blocks"},
    {"--width", COUNT, FIELD(width), 1, NULL, "elements of a token's vector"},
    {"--heads", COUNT, FIELD(heads), 1, NULL, "attention heads; must divide the width"},
    {"--context", COUNT, FIELD(context), 1, NULL, "bytes that a prediction may look back on"},
    {"--batch", COUNT, FIELD(batch), 1, NULL, "sequences of a step, over all ranks and micro-batches"},
    {"--microbatches", COUNT, FIELD(microbatches), 1, NULL, "forward and backward passes of a step"},
    {"--steps", COUNT, FIELD(steps), 0, NULL, "optimizer steps"},
    {"--seed", COUNT, FIELD(seed), 0, NULL, "of the first weights, the data order and the sample"},
    {"--lr", REAL, FIELD(lr), 0, NULL, "highest learning rate (short warmup, cosine decay to a tenth)"},
    {"--weight-decay", REAL, FIELD(weight_decay), 0, NULL, "AdamW's, on matrices only"},
    {"--clip", REAL, FIELD(clip), 0, NULL, "largest gradient norm; 0: do not clip"},
    {"--strategy", CHOICE, FIELD(strategy), 0, strategies, "what is sharded"},
    {"--prefetch", COUNT, FIELD(prefetch), 0, NULL, "groups gathered ahead"},
    {"--pending", COUNT, FIELD(pending), 1, NULL, "full gradient buffers alive at once"},
    {"--unshard", CHOICE, FIELD(unshard_mode), 0, unshard_modes, "how full weights become readable"},
    {"--reduce-each", SWITCH, FIELD(reduce_policy), FSDP_REDUCE_POLICY_EACH, NULL,
     "reduce every micro-batch's gradients"},
    {"--reduce-last", SWITCH, FIELD(reduce_policy), FSDP_REDUCE_POLICY_LAST, NULL,
     "add them up and reduce once a step"},
    {"--replicas", COUNT, FIELD(replicas), 0, NULL,
     "copies of the sharded model, each on an equal part of the ranks; 0: one"},
    {"--outer", CHOICE, FIELD(outer_strategy), 0, outer_strategies, "what replicas shard among them"},
    {"--reduction-block", COUNT, FIELD(reduction_block), 0, NULL, "ranks whose gradients are added first; 0: all"},
    {"--ranks-per-host", COUNT, FIELD(ranks_per_host), 0, NULL,
     "pretend on one host that so many ranks share one; 0: as it is"},
    {"--force-communication", SWITCH, FIELD(force), 1, NULL, "run the collectives also with one rank"},
    {"--transport", CHOICE, FIELD(transport), 0, transports, "of train_gpt_cuda: how GPUs exchange memory"},
    {"--graph", SWITCH, FIELD(graph), 1, NULL, "of train_gpt_cuda: forward and backward passes as a CUDA graph"},
    {"--recompute", SWITCH, FIELD(recompute), 1, NULL, "keep only each block's input and run it again in backward"},
    {"--compute-dtype", CHOICE, FIELD(compute_dtype), 0, dtypes, "of the compute weights (the math itself is fp32)"},
    {"--quantize", CHOICE, FIELD(quantization), 0, quantizations,
     "what the matrices of blocks are stored as (the compute dtype)"},
    {"--main", CHOICE, FIELD(main_storage), 0, main_storages,
     "what the main weights of bf16 weights are kept in (fp32); split16: 2 bytes beside them, none: nothing"},
    {"--states", CHOICE, FIELD(optimizer), 0, optimizers, "what AdamW's two moments are kept in (fp32)"},
    {"--home", STRING, FIELD(home), 0, NULL,
     "where states, and main weights of bf16 weights, are kept: host, or file:DIRECTORY on a local disk (the device)"},
    {"--home-grads", SWITCH, FIELD(home_grads), 1, NULL, "keep main gradients there, too"},
    {"--reduce-dtype", CHOICE, FIELD(reduce_dtype), 0, dtypes,
     "what gradients are rounded to before they are summed; default: fp32"},
    {"--norm", CHOICE, FIELD(norm), 0, norms, "normalization"},
    {"--tied", SWITCH, FIELD(tied), 1, NULL, "the head is the token embedding again"},
    {"--corpus", PATHS, FIELD(corpus), 0, NULL, "files and directories; default: the repository's own sources"},
    {"--save", STRING, FIELD(save), 0, NULL, "a folder for checkpoints: at the end, and at Ctrl-C or SIGTERM"},
    {"--save-every", COUNT, FIELD(save_every), 0, NULL, "... and after every so many steps; 0: not"},
    {"--keep", COUNT, FIELD(keep), 0, NULL, "so many of the newest checkpoints stay; 0: all"},
    {"--resume", SWITCH, FIELD(resume), 1, NULL, "go on with the newest checkpoint of --save, if there is one"},
    {"--json", STRING, FIELD(json), 0, NULL, "a line of numbers for each step, and one at the end"},
    {"--trace", STRING, FIELD(trace), 0, NULL, "a timeline of all ranks, for Perfetto"},
    {"--sample", OPTIONAL, FIELD(sample), 256, NULL, "print text from the trained model (256 bytes)"},
    {"--threads", COUNT, FIELD(threads), 1, NULL, "ranks as threads of this process, without a launcher"},
    {"--no-overlap", SWITCH, FIELD(no_overlap), 1, NULL, "libfsdp works on the calling thread, in call order"},
    {"--debug-delay-us", COUNT, FIELD(debug_delay_us), 0, NULL, "longest random delay before libfsdp's work"},
    {"--in-place", SWITCH, FIELD(in_place), 1, NULL, "write over one progress line, terminal or not"},
    {"--quiet", SWITCH, FIELD(quiet), 1, NULL, "no progress, no tables"},
};
enum { FLAG_COUNT = sizeof flags / sizeof *flags };

static void set_defaults(struct options *options) {
  memset(options, 0, sizeof *options);
  options->layers = 4, options->width = 320, options->heads = 5, options->context = 128;
  options->batch = 16, options->microbatches = 1, options->steps = 300, options->keep = 2, options->seed = 1,
  options->prefetch = 1;
  options->pending = 2;
  options->lr = 1e-3, options->weight_decay = 0.1, options->clip = 1.0;
  options->strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS, options->compute_dtype = FSDP_FLOAT32;
  options->norm = LAYER_NORM, options->main_storage = FSDP_MAIN_FLOAT32, options->optimizer = FSDP_OPTIMIZER_ADAMW;
}

static void print_choices(FILE *out, const struct choice *choices) {
  for (const struct choice *c = choices; c->name; ++c) fprintf(out, "%s%s", c == choices ? "" : "|", c->name);
}

/* What to write after a flag, and its default. */
static void print_value(const struct flag *flag, const struct options *defaults) {
  const char *field = (const char *)defaults + flag->offset;
  switch (flag->kind) {
    case COUNT: printf(" N (%" PRIu64 ")", *(const uint64_t *)(const void *)field); break;
    case REAL: printf(" X (%g)", *(const double *)(const void *)field); break;
    case OPTIONAL: printf(" [N]"); break;
    case STRING: printf(" PATH"); break;
    case PATHS: printf(" PATH..."); break;
    case CHOICE: putchar(' '), print_choices(stdout, flag->choices); break;
    default: break;
  }
}

static void print_help(void) {
  struct options defaults;
  set_defaults(&defaults);
  puts("train_gpt trains a byte-level GPT, its state sharded over the ranks.\n");
  for (const struct flag *f = flags; f < flags + FLAG_COUNT; ++f) {
    printf("  %s", f->name);
    print_value(f, &defaults);
    printf("\n        %s\n", f->help);
  }
}

static void fail(const char *name, const char *problem, const char *value) {
  fprintf(stderr, "train_gpt: %s %s%s%s (--help lists the options)\n", name, problem, value ? " " : "",
          value ? value : "");
  exit(2);
}

static const struct flag *find_flag(const char *name) {
  for (const struct flag *f = flags; f < flags + FLAG_COUNT; ++f) {
    if (strcmp(f->name, name) == 0) return f;
  }
  fail(name, "is not an option", NULL);
  return NULL;
}

static uint64_t parse_count(const struct flag *flag, const char *text) {
  char *end = NULL;
  errno = 0;
  const uint64_t value = strtoull(text, &end, 10);
  if (*text < '0' || *text > '9' || *end || errno) fail(flag->name, "takes a whole number, not", text);
  if (flag->kind == COUNT && value < flag->value) fail(flag->name, "must be at least 1, not", text);
  return value;
}

static double parse_real(const struct flag *flag, const char *text) {
  char *end = NULL;
  const double value = strtod(text, &end);
  if (end == text || *end || !(value >= 0.0 && value < 1e30)) fail(flag->name, "takes a number from 0, not", text);
  return value;
}

static uint64_t parse_choice(const struct flag *flag, const char *text) {
  for (const struct choice *c = flag->choices; c->name; ++c) {
    if (strcmp(c->name, text) == 0) return c->value;
  }
  fprintf(stderr, "train_gpt: %s takes one of ", flag->name);
  print_choices(stderr, flag->choices);
  fprintf(stderr, ", not %s\n", text);
  exit(2);
}

/* Reads the values that follow flag; returns how many there were. */
static int parse_values(struct options *options, const struct flag *flag, char **values, int value_count) {
  char *field = (char *)options + flag->offset;
  const int has_value = value_count > 0 && strncmp(values[0], "--", 2) != 0;
  if (flag->kind == SWITCH || (flag->kind == OPTIONAL && !has_value))
    return *(uint64_t *)(void *)field = flag->value, 0;
  if (!has_value) fail(flag->name, "needs a value", NULL);
  switch (flag->kind) {
    case REAL: *(double *)(void *)field = parse_real(flag, values[0]); return 1;
    case CHOICE: *(uint64_t *)(void *)field = parse_choice(flag, values[0]); return 1;
    case STRING: *(const char **)(void *)field = values[0]; return 1;
    case PATHS: break;
    default: *(uint64_t *)(void *)field = parse_count(flag, values[0]); return 1;
  }
  options->corpus = values;
  int count = 0;
  while (count < value_count && strncmp(values[count], "--", 2) != 0) ++count;
  options->corpus_count = (uint64_t)count;
  return count;
}

void options_parse(struct options *options, int argc, char **argv) {
  set_defaults(options);
  for (int i = 1; i < argc; ++i) {
    if (strcmp(argv[i], "--help") == 0) print_help(), exit(0);
    const struct flag *flag = find_flag(argv[i]);
    i += parse_values(options, flag, argv + i + 1, argc - i - 1);
  }
  if (!device_has_graphs() && (options->graph || options->transport)) {
    fail("--graph and --transport", "need train_gpt_cuda", NULL);
  }
  if ((options->resume || options->save_every) && !options->save) {
    fail("--resume and --save-every", "need --save", NULL);
  }
  if (options->main_storage != FSDP_MAIN_FLOAT32 && options->compute_dtype != FSDP_BFLOAT16) {
    fail("--main split16 and none", "need --compute-dtype bf16: fp32 weights are their own main weights", NULL);
  }
  if (options->home && strcmp(options->home, "host") != 0 && !options_home_directory(options)) {
    fail("--home", "takes host or file:DIRECTORY, not", options->home);
  }
  if (options->home_grads && !options->home) fail("--home-grads", "needs --home", NULL);
  if (options->width % options->heads) fail("--heads", "must divide --width", NULL);
  if (options->width > 1u << 14 || options->context > 1u << 14 || options->batch > 1u << 20 ||
      options->layers > 1u << 12) {
    fail("--layers, --width, --context or --batch", "is larger than this example can take", NULL);
  }
}

int options_batch_divides(const struct options *options, uint64_t rank, uint64_t world_size) {
  if (options->batch % (options->microbatches * world_size) == 0) return 1;
  if (rank == 0) {
    fprintf(stderr, "train_gpt: --batch %" PRIu64 " does not divide by %" PRIu64 " ranks x %" PRIu64 " micro-batches\n",
            options->batch, world_size, options->microbatches);
  }
  return 0;
}

static const char *name_of(const struct choice *choices, uint64_t value) {
  for (const struct choice *c = choices; c->name; ++c) {
    if (c->value == value) return c->name;
  }
  return "unknown";
}

const char *options_strategy_name(uint64_t strategy) { return name_of(strategies, strategy); }
const char *options_main_name(uint64_t main_storage) { return name_of(main_storages, main_storage); }
const char *options_states_name(uint64_t optimizer) { return name_of(optimizers, optimizer); }

const char *options_home_directory(const struct options *options) {
  static const char file[] = "file:";
  const size_t length = sizeof file - 1;
  if (!options->home || strncmp(options->home, file, length) != 0 || !options->home[length]) return NULL;
  return options->home + length;
}
