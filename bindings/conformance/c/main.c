/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The interpreter of scenarios.txt in C; ../README.md says what it does.
 *
 *   conformance threads SAVE_FOLDER LOAD_FOLDER scenarios.txt
 *   fsdp-run -n 2 --no-prefix conformance processes SAVE_FOLDER LOAD_FOLDER scenarios.txt
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "rank.h"

enum { MOST_LINES = 400, MOST_DEFINES = 64, MOST_WORLDS = 8, MOST_RANKS = 16, TIMEOUT_MS = 30000 };

typedef struct scenario {
  char name[TEXT_BYTES];
  uint32_t worlds[MOST_WORLDS];
  int world_count, line_count;
  line lines[MOST_LINES];
} scenario;

typedef struct define {
  char name[TEXT_BYTES], value[TEXT_BYTES];
} define;

static define defines[MOST_DEFINES];
static int define_count;

typedef struct rank_run {
  const scenario *scenario;
  int world_index; /* which of its worlds */
  rank_state state;
  uint32_t transcript; /* its CRC-32 */
  int call_count;
  bool is_as_expected;
} rank_run;

static const char *substitute(const char *text) {
  for (int i = 0; i < define_count; ++i)
    if (strcmp(defines[i].name, text) == 0) return defines[i].value;
  return text;
}

/* ---- lines --------------------------------------------------------------------------------------------------- */

static void add_word(line *into, char *text) {
  char *equals = strchr(text, '=');
  if (into->gives || into->fails) into->expected[into->expected_count++] = substitute(text);
  else if (strcmp(text, "->") == 0) into->gives = true;
  else if (strcmp(text, "!") == 0) into->fails = true;
  else if (equals && into->word_count > 0) {
    *equals = '\0';
    into->keys[into->key_count] = text;
    into->key_values[into->key_count++] = substitute(equals + 1);
  } else into->words[into->word_count++] = substitute(text);
}

static void cut_line(line *into, const char *text) {
  memset(into, 0, sizeof *into);
  into->only = into->but = -1;
  snprintf(into->text, sizeof into->text, "%s", text);
  into->text[strcspn(into->text, "\n")] = '\0';
  memcpy(into->cut, into->text, sizeof into->cut);
  char *rest = NULL;
  for (char *next = strtok_r(into->cut, " ", &rest); next; next = strtok_r(NULL, " ", &rest)) add_word(into, next);
  if (strcmp(word(into, 0), "on") != 0 && strcmp(word(into, 0), "off") != 0) return;
  *(strcmp(word(into, 0), "on") == 0 ? &into->only : &into->but) = (int)integer(into, 1);
  into->word_count -= 2;
  memmove(into->words, into->words + 2, (size_t)into->word_count * sizeof *into->words);
}

static bool is_for(const line *words, uint32_t rank) {
  return (words->only < 0 || (uint32_t)words->only == rank) && (words->but < 0 || (uint32_t)words->but != rank);
}

/* The next scenario of the file; false at its end. */
static bool read_scenario(FILE *file, scenario *into) {
  char text[256];
  into->line_count = into->world_count = -1;
  while (fgets(text, sizeof text, file)) {
    if (into->line_count == MOST_LINES) abort();
    line *words = &into->lines[into->line_count < 0 ? 0 : into->line_count];
    cut_line(words, text);
    if (words->word_count == 0 || words->words[0][0] == '#') continue;
    if (strcmp(words->words[0], "end") == 0) return true;
    if (strcmp(words->words[0], "define") == 0) {
      if (define_count == MOST_DEFINES) abort();
      snprintf(defines[define_count].name, TEXT_BYTES, "%s", words->words[1]);
      snprintf(defines[define_count++].value, TEXT_BYTES, "%s", words->words[2]);
    } else if (strcmp(words->words[0], "scenario") == 0) {
      snprintf(into->name, sizeof into->name, "%s", words->words[1]);
      into->world_count = words->word_count - 2;
      for (int w = 0; w < into->world_count; ++w) into->worlds[w] = (uint32_t)integer(words, w + 2);
      into->line_count = 0;
    } else ++into->line_count;
  }
  return false;
}

/* ---- a rank -------------------------------------------------------------------------------------------------- */

static void note_call(rank_run *run, fsdp_status status, int rank) {
  char text[2 * TEXT_BYTES];
  snprintf(text, sizeof text, "%d %d %d %s\n", ++run->call_count, status, rank, run->state.value);
  run->transcript = crc32_of(run->transcript, text, strlen(text));
}

static bool is_expected(const rank_run *run, const line *words, fsdp_status status, int rank) {
  if (words->fails)
    return status == atoi(words->expected[0]) && rank == atoi(words->expected[1]);
  if (status != FSDP_OK || !words->gives) return status == FSDP_OK;
  return strcmp(run->state.value, words->expected[words->expected_count == 1 ? 0 : run->world_index]) == 0;
}

static void tell(const rank_run *run, const line *words, fsdp_status status, int rank) {
  fprintf(stderr, "%s, world %u, rank %u: %s\n  gave %s %s, rank %d: %s\n", run->scenario->name, run->state.world_size,
          run->state.rank, words->text, fsdp_get_status_name(status), run->state.value, rank,
          status == FSDP_OK ? "" : fsdp_get_last_message());
}

/* Returns false if the status is not the expected one: the ranks then no longer agree on what comes next. */
static bool execute_line(rank_run *run, const line *words) {
  const fsdp_status status = execute_call(&run->state, words);
  if (strcmp(words->words[0], "param") == 0 || strcmp(words->words[0], "visit") == 0) return true;
  fsdp_error error = FSDP_ERROR_INIT;
  if (status != FSDP_OK) fsdp_get_last_error(NULL, &error);
  const int rank = status == FSDP_OK ? -1 : error.rank;
  note_call(run, status, rank);
  if (is_expected(run, words, status, rank)) return true;
  tell(run, words, status, rank);
  run->is_as_expected = false;
  return words->fails ? status == atoi(words->expected[0]) : status == FSDP_OK;
}

static void *run_rank(void *data) {
  rank_run *run = data;
  bool goes_on = true;
  for (int l = 0; goes_on && l < run->scenario->line_count; ++l)
    if (is_for(&run->scenario->lines[l], run->state.rank)) goes_on = execute_line(run, &run->scenario->lines[l]);
  if (!goes_on) fsdp_abort_context(run->state.context, "a status that was not expected");
  destroy_handles(&run->state);
  fsdp_destroy_context(run->state.context);
  printf("%s %u %u %08x\n", run->scenario->name, run->state.world_size, run->state.rank, run->transcript);
  return NULL;
}

/* ---- worlds -------------------------------------------------------------------------------------------------- */

static rank_run begin_run(const scenario *of, int world_index, uint32_t rank, fsdp_context *context, char **arguments) {
  rank_run run = {.scenario = of, .world_index = world_index, .is_as_expected = true};
  run.state = (rank_state){.context = context, .rank = rank, .world_size = of->worlds[world_index],
                           .save_folder = arguments[2], .load_folder = arguments[3]};
  return run;
}

static void need(fsdp_status status) {
  if (status == FSDP_OK) return;
  fprintf(stderr, "no context: %s\n", fsdp_get_last_message());
  exit(1);
}

static bool run_threads(const scenario *of, int world_index, char **arguments) {
  static rank_run runs[MOST_RANKS];
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  fsdp_context *contexts[MOST_RANKS];
  pthread_t threads[MOST_RANKS];
  const uint32_t world_size = of->worlds[world_index];
  options.timeout_ms = TIMEOUT_MS;
  need(fsdp_create_local_contexts(world_size, &options, contexts));
  bool is_as_expected = true;
  for (uint32_t r = 0; r < world_size; ++r) {
    runs[r] = begin_run(of, world_index, r, contexts[r], arguments);
    if (pthread_create(&threads[r], NULL, run_rank, &runs[r]) != 0) abort();
  }
  for (uint32_t r = 0; r < world_size; ++r) {
    pthread_join(threads[r], NULL);
    is_as_expected &= runs[r].is_as_expected;
  }
  return is_as_expected;
}

static bool run_process(const scenario *of, char **arguments) {
  static rank_run run;
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  fsdp_context *context = NULL;
  uint32_t rank = 0;
  const char *launched = getenv("WORLD_SIZE");
  const uint32_t world_size = launched ? (uint32_t)atoi(launched) : 1;
  options.timeout_ms = TIMEOUT_MS;
  for (int w = 0; w < of->world_count; ++w) {
    if (of->worlds[w] != world_size) continue;
    need(fsdp_create_context(&options, &context));
    need(fsdp_get_rank(context, &rank));
    run = begin_run(of, w, rank, context, arguments);
    run_rank(&run);
    return run.is_as_expected;
  }
  return true;
}

int main(int count, char **arguments) {
  static scenario next;
  FILE *file = count == 5 ? fopen(arguments[4], "r") : NULL;
  if (!file || (strcmp(arguments[1], "threads") != 0 && strcmp(arguments[1], "processes") != 0)) {
    fprintf(stderr, "usage: conformance threads|processes SAVE_FOLDER LOAD_FOLDER scenarios.txt\n");
    return 2;
  }
  bool is_as_expected = true;
  while (read_scenario(file, &next)) {
    if (strcmp(arguments[1], "processes") == 0) is_as_expected &= run_process(&next, arguments);
    for (int w = 0; strcmp(arguments[1], "threads") == 0 && w < next.world_count; ++w)
      is_as_expected &= run_threads(&next, w, arguments);
  }
  fclose(file);
  return is_as_expected ? 0 : 1;
}
