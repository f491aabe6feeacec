/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint.h"

#include <dirent.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "check.h"

static volatile sig_atomic_t asked; /* the signal that came to this process; 0: none */
static volatile sig_atomic_t ended; /* ... that ended the training, on whichever rank it came */

static void ask(int number) { asked = number; }

void checkpoint_listen(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = ask;
  action.sa_flags = (int)SA_RESETHAND; /* a second signal ends a job that does not reach its next step */
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
}

int checkpoint_exit_status(void) { return ended ? 128 + (int)ended : 0; }

static int has_checkpoints(const char *path) {
  DIR *folder = opendir(path);
  int found = 0;
  if (!folder) return 0;
  for (const struct dirent *entry; !found && (entry = readdir(folder));) {
    found = strncmp(entry->d_name, "step-", 5) == 0;
  }
  closedir(folder);
  return found;
}

int checkpoint_folder_is_free(const struct options *options, uint64_t rank) {
  if (!options->save || options->resume || !has_checkpoints(options->save)) return 1;
  if (rank == 0) {
    fprintf(stderr, "train_gpt: %s has checkpoints: --resume goes on with the newest; or --save elsewhere\n",
            options->save);
  }
  return 0;
}

uint64_t checkpoint_resume(struct trainer *trainer) {
  const struct options *options = trainer->options;
  fsdp_model *model = trainer->model.handle;
  fsdp_load_options settings = FSDP_LOAD_OPTIONS_INIT;
  fsdp_loaded loaded = FSDP_LOADED_INIT;
  if (!options->resume) return 0;
  /* A job that is started again by its launcher may not have come to its first checkpoint. */
  settings.flags = FSDP_LOAD_IF_ANY | FSDP_LOAD_FALLBACK;
  CHECK(trainer->context, fsdp_begin_update(model, trainer->stream));
  CHECK(trainer->context, fsdp_load(model, options->save, &settings, &loaded));
  CHECK(trainer->context, fsdp_publish_weights(model, trainer->stream));
  if (trainer->rank == 0 && !options->quiet) {
    if (loaded.name[0]) {
      printf("resumed %s/%s of %" PRIu32 " ranks\n", options->save, loaded.name, loaded.ranks);
    } else {
      printf("resumed nothing: there is no checkpoint in %s yet\n", options->save);
    }
  }
  return loaded.step;
}

/* Waits for the save that runs beside training. An error of that save ends the program here. */
static void settle(struct trainer *trainer) {
  if (!trainer->saving) return;
  CHECK(trainer->context, fsdp_wait_checkpoint(trainer->saving));
  fsdp_destroy_checkpoint(trainer->saving);
  trainer->saving = NULL;
}

static void save(struct trainer *trainer) {
  const struct options *options = trainer->options;
  fsdp_save_options settings = FSDP_SAVE_OPTIONS_INIT;
  settle(trainer);
  settings.keep = (uint32_t)options->keep;
  /* A resumed job may save a step that a damaged checkpoint has: the new one replaces it. */
  if (options->resume) settings.flags = FSDP_SAVE_REPLACE;
  CHECK(trainer->context, fsdp_begin_checkpoint(trainer->context, options->save, &settings, &trainer->saving));
  CHECK(trainer->context, fsdp_add_checkpoint_model(trainer->saving, NULL, trainer->model.handle));
  CHECK(trainer->context, fsdp_commit_checkpoint(trainer->saving));
}

int checkpoint_after_step(struct trainer *trainer, uint64_t done) {
  const struct options *options = trainer->options;
  if (!options->save) return 0;
  double stop = asked; /* the signal may have come to one rank alone, or between two steps of ranks */
  CHECK(trainer->context, fsdp_all_reduce_values(trainer->context, NULL, &stop, 1, FSDP_VALUE_MAX));
  const int due = options->save_every && done % options->save_every == 0;
  const int last = stop > 0 || done == options->steps;
  if (due || last) save(trainer);
  if (last) settle(trainer);
  if (!(stop > 0)) return 0;
  ended = (int)stop;
  if (trainer->rank == 0) {
    fprintf(stderr, "train_gpt: saved after step %" PRIu64 "; the same command with --resume goes on\n", done);
  }
  return 1;
}
