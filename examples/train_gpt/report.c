/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static const char *const role_names[] = {"total",     "compute", "main",   "grad",
                                         "optimizer", "gather",  "reduce", "staging"};
enum { ROLES = FSDP_ROLE_STAGING + 1, LATE_STEPS = 20 };

static double now_seconds(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void get_memory(const struct trainer *trainer, uint32_t rank, uint64_t bytes[ROLES]) {
  for (fsdp_role role = FSDP_ROLE_ALL; role < ROLES; ++role)
    CHECK(trainer->context, fsdp_get_role_bytes(trainer->model.handle, role, rank, &bytes[role]));
}

static void print_header(const struct trainer *trainer) {
  const struct options *options = trainer->options;
  fsdp_model_info info = FSDP_MODEL_INFO_INIT;
  CHECK(trainer->context, fsdp_get_model_info(trainer->model.handle, &info));
  printf("libfsdp %s, %" PRIu32 " %s, strategy %s\n", fsdp_get_version(), trainer->world_size,
         trainer->world_size == 1 ? "rank" : "ranks", options_strategy_name(options->strategy));
  printf("model   %.2f M parameters: %" PRIu64 " layers, width %" PRIu64 ", %" PRIu64 " heads, context %" PRIu64 "\n",
         1e-6 * (double)info.element_count, options->layers, options->width, options->heads, options->context);
  printf("corpus  %zu bytes of %zu files\n", trainer->corpus->size, trainer->corpus->file_count);
  if (options->main_storage != FSDP_MAIN_FLOAT32 || options->optimizer != FSDP_OPTIMIZER_ADAMW) {
    printf("adamw   main weights %s, states %s\n", options_main_name(options->main_storage),
           options_states_name(options->optimizer));
  }
  printf("step    %" PRIu64 " sequences in %" PRIu64 " micro-batches, %" PRIu64 " steps\n", options->batch,
         options->microbatches, options->steps);
  fflush(stdout);
}

/* A run that goes on keeps the lines of the steps before; lines of steps that were not saved are written anew. */
static FILE *open_json(const char *path, uint64_t first_step) {
  FILE *file = first_step ? fopen(path, "r+") : NULL;
  if (!file) return fopen(path, "w");
  char line[512];
  long kept = 0;
  uint64_t step = 0;
  while (fgets(line, sizeof line, file) && sscanf(line, "{\"step\": %" SCNu64, &step) == 1 && step <= first_step) {
    kept = ftell(file);
  }
  if (fseek(file, kept, SEEK_SET) || ftruncate(fileno(file), kept)) return fclose(file), NULL;
  return file;
}

void report_begin(struct report *report, struct trainer *trainer) {
  memset(report, 0, sizeof *report);
  if (trainer->rank != 0) return;
  const struct options *options = trainer->options;
  report->trainer = trainer;
  report->in_place = options->in_place || isatty(STDOUT_FILENO);
  if (options->json && !(report->json = open_json(options->json, trainer->first_step))) {
    fprintf(stderr, "train_gpt: --json %s: %s\n", options->json, strerror(errno));
    exit(2);
  }
  if (!options->quiet) print_header(trainer);
  report->started = report->last_step = now_seconds();
}

static void print_progress(struct report *report, uint64_t done, const struct step_result *result, double now) {
  const struct options *options = report->trainer->options;
  const double elapsed = now - report->started;
  const uint64_t made = done - report->trainer->first_step; /* by this run */
  const double tokens = (double)(made * options->batch * options->context);
  const unsigned left = (unsigned)(elapsed / (double)made * (double)(options->steps - done) + 0.5);
  printf("%sstep %5" PRIu64 "/%" PRIu64 "  loss %.4f  %6.0f tokens/s  %2um%02us left%s", report->in_place ? "\r" : "",
         done, options->steps, result->loss, tokens / elapsed, left / 60, left % 60,
         report->in_place && done < options->steps ? "" : "\n");
  fflush(stdout);
  report->last_line = now;
}

/* On a terminal a few times a second; in a log about twenty lines. */
static int is_due(const struct report *report, uint64_t done, double now) {
  const uint64_t steps = report->trainer->options->steps;
  if (done == report->trainer->first_step + 1 || done == steps) return 1;
  return report->in_place ? now - report->last_line > 0.2 : done % (steps / 20 + 1) == 0;
}

void report_step(struct report *report, uint64_t step, const struct step_result *result) {
  if (!report->trainer) return;
  const struct options *options = report->trainer->options;
  const double now = now_seconds();
  if (report->json) {
    fprintf(report->json,
            "{\"step\": %" PRIu64 ", \"loss\": %.17g, \"grad_norm\": %.17g, \"lr\": %.17g, \"tokens_per_s\": %.1f}\n",
            step + 1, result->loss, result->grad_norm, result->lr,
            (double)(options->batch * options->context) / (now - report->last_step));
    fflush(report->json); /* a killed run continues from its last checkpoint, which is saved after this line is
                             written */
  }
  report->last_step = now;
  if (step + LATE_STEPS >= options->steps) report->late_loss += result->loss, ++report->late_steps;
  if (!options->quiet && is_due(report, step + 1, now)) print_progress(report, step + 1, result, now);
}

void report_sample(struct report *report, const uint8_t *text, size_t count) {
  if (!report->trainer) return;
  printf("\n--- sample ---\n");
  for (size_t i = 0; i < count; ++i) {
    const int printable = text[i] == '\n' || text[i] == '\t' || (text[i] >= ' ' && text[i] < 127);
    putchar(printable ? text[i] : '?');
  }
  printf("\n--- end ---\n");
  fflush(stdout);
}

static double to_mib(uint64_t bytes) { return (double)bytes / (1024.0 * 1024.0); }

/* The loss of one batch is noisy, so the result is the mean over the last steps. */
static void print_result(const struct report *report) {
  const uint64_t late = report->late_steps;
  if (late == 0) return;
  printf("\nloss %.4f nats per byte, the mean of the last %" PRIu64 " steps\n", report->late_loss / (double)late, late);
}

/* What this rank keeps elsewhere, and how long its updates have waited for the disk. */
static void print_home(const struct trainer *trainer) {
  if (!trainer->options->home) return;
  uint64_t bytes = 0;
  fsdp_stats stats = FSDP_STATS_INIT;
  CHECK(trainer->context, fsdp_get_allocated_bytes(trainer->model.handle, FSDP_ROLE_HOME, &bytes));
  CHECK(trainer->context, fsdp_get_stats(trainer->model.handle, &stats));
  printf("home of rank 0 (%s): %.2f MiB; %.2f MiB read, %.2f MiB written, waited %.2f s for the disk\n",
         trainer->options->home, to_mib(bytes), to_mib(stats.home_read_bytes), to_mib(stats.home_written_bytes),
         1e-9 * (double)stats.home_wait_ns);
}

/* "state" is what the optimizer needs between steps; the pools are what sharding costs on top of it. */
static void print_memory(const struct report *report) {
  const struct trainer *trainer = report->trainer;
  const double whole = (double)model_count_unsharded_bytes(&trainer->model);
  printf("\nmemory in MiB; state = compute + main + grad + optimizer, one unsharded copy of it has %.2f MiB\n",
         whole / (1024.0 * 1024.0));
  printf("rank");
  for (int role = 1; role < ROLES; ++role) printf(" %9s", role_names[role]);
  printf(" %9s  %s\n", "total", "state of one copy");
  for (uint32_t rank = 0; rank < trainer->world_size; ++rank) {
    uint64_t bytes[ROLES];
    get_memory(trainer, rank, bytes);
    printf("%4" PRIu32, rank);
    for (int role = 1; role < ROLES; ++role) printf(" %9.2f", to_mib(bytes[role]));
    const uint64_t state =
        bytes[FSDP_ROLE_COMPUTE] + bytes[FSDP_ROLE_MAIN] + bytes[FSDP_ROLE_GRAD] + bytes[FSDP_ROLE_OPTIMIZER];
    printf(" %9.2f  %.1f %%\n", to_mib(bytes[0]), 100.0 * (double)state / whole);
  }
  print_home(trainer);
  fflush(stdout);
}

static void write_end(const struct report *report, uint64_t weights_hash) {
  const struct trainer *trainer = report->trainer;
  fprintf(report->json,
          "{\"weights_hash\": \"%016" PRIx64 "\", \"ranks\": %" PRIu32 ", \"unsharded_bytes\": %" PRIu64
          ", \"role_bytes\": [",
          weights_hash, trainer->world_size, model_count_unsharded_bytes(&trainer->model));
  for (uint32_t rank = 0; rank < trainer->world_size; ++rank) {
    uint64_t bytes[ROLES];
    get_memory(trainer, rank, bytes);
    fprintf(report->json, "%s{", rank ? ", " : "");
    for (int role = 0; role < ROLES; ++role) {
      fprintf(report->json, "%s\"%s\": %" PRIu64, role ? ", " : "", role_names[role], bytes[role]);
    }
    fprintf(report->json, "}");
  }
  fprintf(report->json, "]}\n");
}

void report_end(struct report *report, uint64_t weights_hash) {
  if (!report->trainer) return;
  if (!report->trainer->options->quiet) {
    print_result(report);
    print_memory(report);
  }
  if (!report->json) return;
  write_end(report, weights_hash);
  if (fclose(report->json)) {
    fprintf(stderr, "train_gpt: --json %s: %s\n", report->trainer->options->json, strerror(errno));
    exit(1);
  }
}
