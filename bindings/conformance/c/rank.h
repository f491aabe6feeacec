/* SPDX-License-Identifier: Apache-2.0 */
/* One rank of one scenario: its handles, and the words of the line that it executes. ../README.md has the format. */
#ifndef CONFORMANCE_RANK_H
#define CONFORMANCE_RANK_H

#include <fsdp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

enum { MOST_WORDS = 32, MOST_NAMES = 16, MOST_PARAMS = 8, MOST_VISITS = 16, MOST_SPLITS = 8,
       TEXT_BYTES = 64, PATH_BYTES = 1024 };

/* A line's words: what it calls, KEY=VALUE apart from the others, and what stands behind "->" or "!". */
typedef struct line {
  char text[256], cut[256]; /* as it is written; cut at its spaces */
  const char *words[MOST_WORDS], *keys[MOST_WORDS], *key_values[MOST_WORDS], *expected[MOST_WORDS];
  int word_count, key_count, expected_count;
  int only, but;     /* the rank of "on" and "off", else -1 */
  bool gives, fails; /* "->", "!" */
} line;

typedef struct declared_param {
  char name[TEXT_BYTES];
  uint64_t shape[4], element_count, splits[MOST_SPLITS], split_count;
  uint32_t dimension_count, flags, row_dimensions, piece;
  fsdp_dtype dtype;
  fsdp_quantization quantization;
  fsdp_missing_grad missing_grad;
  fsdp_optimizer optimizer;
  fsdp_matrix_layout matrix;
  double lr_scale;
} declared_param;

/* A handle and its name. A group also has param_count and params. */
typedef struct named {
  char name[TEXT_BYTES];
  char kind; /* 'm'odel, me's'h, 'g'roup, 'c'heckpoint */
  void *handle;
  declared_param params[MOST_PARAMS];
  uint64_t param_count;
} named;

typedef struct rank_state {
  fsdp_context *context;
  uint32_t rank, world_size;
  const char *save_folder, *load_folder;
  named names[MOST_NAMES];
  size_t name_count;
  declared_param declared[MOST_PARAMS]; /* by param lines, for the next create_group */
  uint64_t declared_count;
  fsdp_visit visits[MOST_VISITS]; /* by visit lines, for the next set_schedule */
  uint64_t visit_count;
  char value[TEXT_BYTES]; /* what the call gave, "-" for nothing */
} rank_state;

/* Executes a call, or a param or visit line (which is no call), and leaves the value that it gives in state->value. */
fsdp_status execute_call(rank_state *state, const line *words);
void destroy_handles(rank_state *state);

/* Words of the line: "" or 0 if the line has no such word. */
const char *word(const line *words, int index);
int64_t integer(const line *words, int index);
double number(const line *words, int index);
const char *find_key(const line *words, const char *key);
int64_t key_or(const line *words, const char *key, int64_t otherwise);
double key_number(const line *words, const char *key);

/* Handles by name: NULL if the name is not bound. */
named *find_name(rank_state *state, const char *name, char kind);
void *handle(rank_state *state, const line *words, int index, char kind);
named *bind_name(rank_state *state, const char *name, char kind, void *handle_made);
uint64_t element_count(rank_state *state, const line *words, uint64_t index);

/* The array that the five integers from word `first` on stand for, with B + shift; free() it. */
double value_at(const rank_state *state, const line *words, int first, int64_t shift, uint64_t i);
void *make_array(const rank_state *state, const line *words, int first, int64_t shift, uint64_t count,
                 fsdp_dtype dtype);

/* The CRC-32 of IEEE 802.3 of the data, continued from `before` (0 at first). */
uint32_t crc32_of(uint32_t before, const void *data, size_t size_bytes);
void give_crc(rank_state *state, uint32_t crc);
void give_integer(rank_state *state, uint64_t value);
void give_double(rank_state *state, double value);

fsdp_status do_param(rank_state *state, const line *words);
fsdp_status do_visit(rank_state *state, const line *words);
fsdp_status do_create_mesh(rank_state *state, const line *words);
fsdp_status do_create_model(rank_state *state, const line *words);
fsdp_status do_create_group(rank_state *state, const line *words);
fsdp_status do_set_schedule(rank_state *state, const line *words);
fsdp_status do_find_group(rank_state *state, const line *words);
fsdp_status do_load_param(rank_state *state, const line *words);
fsdp_status do_read_param(rank_state *state, const line *words);
fsdp_status do_load_state(rank_state *state, const line *words);
fsdp_status do_read_state(rank_state *state, const line *words);
fsdp_status do_load_grad(rank_state *state, const line *words);
fsdp_status do_read_grad(rank_state *state, const line *words);
fsdp_status do_set_param_lr_scale(rank_state *state, const line *words);
fsdp_status do_set_param_trainable(rank_state *state, const line *words);
fsdp_status do_unshard(rank_state *state, const line *words);
fsdp_status do_reshard(rank_state *state, const line *words);
fsdp_status do_prefetch(rank_state *state, const line *words);
fsdp_status do_restore_view(rank_state *state, const line *words);
fsdp_status do_get_param(rank_state *state, const line *words);
fsdp_status do_get_params(rank_state *state, const line *words);
fsdp_status do_get_plane(rank_state *state, const line *words);
fsdp_status do_swizzle_scales(rank_state *state, const line *words);
fsdp_status do_acquire_grad(rank_state *state, const line *words);
fsdp_status do_acquire_grads(rank_state *state, const line *words);
fsdp_status do_put_grad(rank_state *state, const line *words);
fsdp_status do_complete_grad(rank_state *state, const line *words);
fsdp_status do_reduce_grad(rank_state *state, const line *words);
fsdp_status do_finish_grads(rank_state *state, const line *words);
fsdp_status do_scale_grads(rank_state *state, const line *words);
fsdp_status do_get_param_grad_norms(rank_state *state, const line *words);
fsdp_status do_get_param_weight_norms(rank_state *state, const line *words);
fsdp_status do_count_zero_grads(rank_state *state, const line *words);
fsdp_status do_get_grad_norm(rank_state *state, const line *words);
fsdp_status do_clip_grads(rank_state *state, const line *words);
fsdp_status do_check_grads(rank_state *state, const line *words);
fsdp_status do_step_adamw(rank_state *state, const line *words);
fsdp_status do_apply_grads(rank_state *state, const line *words);
fsdp_status do_round_stochastic(rank_state *state, const line *words);
fsdp_status do_collect_matrices(rank_state *state, const line *words);
fsdp_status do_change_matrices(rank_state *state, const line *words);

#endif
