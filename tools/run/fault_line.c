/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into the ranks of fsdp-run --debug. If a rank faults in memory that the library lent, one line on standard
 * error names the group. Then the process ends as it would have ended without this handler.
 *
 * The library writes what each address range holds into views-PID.txt of the directory FSDP_DEBUG_VIEWS
 * (lib/engine/model/debug_views.h). The handler reads that file with calls that are safe in a handler, on a stack that
 * may be a small alternate one: so it keeps nothing but three short lines, and allocates nothing.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <ucontext.h>
#include <unistd.h>

enum { LINE_BYTES = 512, PATH_BYTES = 4096 };

struct line {
  size_t length;
  char text[LINE_BYTES];
};

static char directory[PATH_BYTES];
static struct sigaction former_segv, former_bus;

static void add(struct line *line, const char *text) {
  const size_t length = strnlen(text, sizeof line->text - 1 - line->length);
  memcpy(line->text + line->length, text, length);
  line->length += length;
  line->text[line->length] = '\0';
}

static void add_number(struct line *line, uintptr_t number, unsigned base) {
  char digits[24];
  size_t at = sizeof digits;
  digits[--at] = '\0';
  do digits[--at] = "0123456789abcdef"[number % base];
  while ((number /= base) != 0);
  add(line, digits + at);
}

/* Cuts the next word of the line off; the last one is the rest of it. */
static char *take_word(char **rest) {
  char *const word = *rest;
  char *const end = strchr(word, ' ');
  if (!end) return word;
  *end = '\0';
  *rest = end + 1;
  return word;
}

static uintptr_t take_address(const char **rest) {
  uintptr_t address = 0;
  for (; **rest && **rest != ' '; ++*rest)
    address = address * 16 + (uintptr_t)(**rest <= '9' ? **rest - '0' : **rest - 'a' + 10);
  if (**rest) ++*rest;
  return address;
}

/* The line that begins at the offset, without its end; how many bytes it has in the file, 0 after the last one. */
static off_t read_line(int file, off_t offset, struct line *line) {
  const ssize_t got = pread(file, line->text, sizeof line->text - 1, offset);
  char *const end = got > 0 ? memchr(line->text, '\n', (size_t)got) : NULL;
  if (!end) return 0;
  *end = '\0';
  line->length = (size_t)(end - line->text);
  return (off_t)line->length + 1;
}

/* The last line whose range contains the address says what is there now. */
static int find_range(int file, uintptr_t address, struct line *found) {
  struct line line;
  off_t offset = 0, length;
  int is_found = 0;
  while ((length = read_line(file, offset, &line)) != 0) {
    const char *at = line.text;
    const uintptr_t begin = take_address(&at), end = take_address(&at);
    offset += length;
    if (address < begin || address >= end) continue;
    found->length = 0;
    add(found, at);
    is_found = 1;
  }
  return is_found;
}

/* A path of PATH_BYTES would fill much of a small alternate stack, so the file is opened relative to the directory. */
static int open_views(void) {
  struct line name = {0, ""};
  const int folder = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -1;
  add(&name, "views-");
  add_number(&name, (uintptr_t)getpid(), 10);
  add(&name, ".txt");
  const int file = openat(folder, name.text, O_RDONLY | O_CLOEXEC);
  close(folder);
  return file;
}

enum access { READ, WRITE, JUMP, UNKNOWN };
static const char *const access_names[] = {"a read in", "a write into", "a jump into", "an access to"};

#if defined(__x86_64__)
enum { WRITE_BIT = 2, FETCH_BIT = 16 };
static enum access access_of(const void *context) {
  const greg_t code = ((const ucontext_t *)context)->uc_mcontext.gregs[REG_ERR];
  if (code & FETCH_BIT) return JUMP;
  return code & WRITE_BIT ? WRITE : READ;
}
#else
static enum access access_of(const void *context) {
  (void)context;
  return UNKNOWN;
}
#endif

struct wording {
  const char *kind, *what;
  const char *reasons[UNKNOWN + 1];
};

#define READ_ONLY ", which is read-only"
#define RELEASED ", which this rank has released (fsdp_reshard, fsdp_discard_step)"
#define IN_WINDOW ", which cannot be read in the update window"
#define GIVEN_BACK ", which this rank has given back (fsdp_reduce_grad, fsdp_complete_grad, fsdp_discard_step)"
#define DESTROYED ", whose model has been destroyed"

/* Why an access to memory that is mapped and protected faults. */
static const struct wording wordings[] = {
    {"weights", "the weights", {RELEASED, READ_ONLY, "", READ_ONLY " or released (fsdp_reshard, fsdp_discard_step)"}},
    {"whole-weights", "the weights", {IN_WINDOW, READ_ONLY, "", READ_ONLY ", and cannot be read in the update window"}},
    {"gathered", "the gathered weights", {"", "", "", ""}},
    {"gradient", "the gradient", {GIVEN_BACK, GIVEN_BACK, "", GIVEN_BACK}},
    {"destroyed", "former memory", {DESTROYED, DESTROYED, DESTROYED, DESTROYED}},
};

static const char *reason_of(const struct wording *known, enum access access, const siginfo_t *info) {
  const int is_protected = info->si_signo == SIGSEGV && info->si_code == SEGV_ACCERR;
  return is_protected || strcmp(known->kind, "destroyed") == 0 ? known->reasons[access] : "";
}

/* range: KIND RANK MODEL GROUP */
static void describe(struct line *line, struct line *range, enum access access, const siginfo_t *info) {
  char *rest = range->text;
  const char *const kind = take_word(&rest), *const rank = take_word(&rest), *const model = take_word(&rest);
  for (size_t i = 0; i < sizeof wordings / sizeof *wordings; ++i) {
    if (strcmp(kind, wordings[i].kind) != 0) continue;
    const char *const parts[] = {access_names[access],
                                 " ",
                                 wordings[i].what,
                                 " of group '",
                                 rest,
                                 "' (rank ",
                                 rank,
                                 ", model ",
                                 model,
                                 ")",
                                 reason_of(&wordings[i], access, info)};
    for (size_t p = 0; p < sizeof parts / sizeof *parts; ++p) add(line, parts[p]);
    return;
  }
}

static void explain(const siginfo_t *info, const void *context) {
  struct line line = {0, ""}, range;
  const int file = open_views();
  if (file < 0) return;
  if (find_range(file, (uintptr_t)info->si_addr, &range)) {
    add(&line, info->si_signo == SIGBUS ? "fsdp: SIGBUS at 0x" : "fsdp: SIGSEGV at 0x");
    add_number(&line, (uintptr_t)info->si_addr, 16);
    add(&line, ": ");
    describe(&line, &range, access_of(context), info);
    line.text[line.length++] = '\n';
    if (write(2, line.text, line.length) < 0) errno = 0; /* the reader is gone */
  }
  close(file);
}

/* A fault happens again after the return, and then ends the process; a signal that a process sent does not. */
static void handle(int number, siginfo_t *info, void *context) {
  const int code = errno;
  const int is_fault = info->si_code > 0;
  if (is_fault) explain(info, context);
  sigaction(number, number == SIGBUS ? &former_bus : &former_segv, NULL);
  if (!is_fault) raise(number);
  errno = code;
}

static void install(int number, struct sigaction *former) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  sigemptyset(&action.sa_mask);
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  if (sigaction(number, NULL, former) == 0 && !(former->sa_flags & SA_SIGINFO) && former->sa_handler == SIG_DFL)
    sigaction(number, &action, NULL);
}

__attribute__((constructor)) static void start(void) {
  const char *const given = getenv("FSDP_DEBUG_VIEWS");
  if (!given || !*given || strlen(given) >= sizeof directory) return;
  strcpy(directory, given);
  install(SIGSEGV, &former_segv);
  install(SIGBUS, &former_bus);
}
