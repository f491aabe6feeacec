/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loaded in front of a program (LD_PRELOAD): counts what each of its steps costs besides time, without a change to the
 * program. A step ends where fsdp_step_adamw returns. The hooks count from the end of step STEADY_FIRST (default 2) to
 * that of STEADY_LAST (default: the last one). They count calls of the allocator and of mmap and the like, calls that
 * make a descriptor or a thread, minor page faults, and open descriptors. They also ask what libfsdp has allocated, and
 * what it had planned. When it ends the process writes a line about each step to standard error, with the milliseconds
 * since STEADY_SPAN ends (default 2) before: no wait that this step saw is longer than those (judge.py). With
 * STEADY_TRACE set, each counted call is shown with its callers as it happens. If ranks are threads, each rank's steps
 * count. glibc only: its own names of the allocator spare a search for them.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#undef _FILE_OFFSET_BITS /* open and open64 stay two names */
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fsdp.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *memory);

enum kind { ALLOCATE, FREE, MAP, DESCRIPTOR, THREAD, KINDS };
static const char *const kind_names[] = {"allocations", "frees", "maps", "descriptors", "threads"};

enum { MOST_ENDS = 256 };
struct snapshot {
  double at_ms;
  unsigned long calls[KINDS];
  long faults, open;
  uint64_t allocated, planned; /* by libfsdp, bytes; 0 where ranks are threads */
};
static _Atomic unsigned long calls[KINDS];
static atomic_bool counting, tracing;
static unsigned long first_end = 2, last_end = MOST_ENDS, span = 2;
static unsigned long step_ends;             /* this and the snapshots: under the mutex */
static struct snapshot ends[MOST_ENDS + 1]; /* the first one: the start */
static pthread_mutex_t snapshot_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local int inside; /* calls that a hook makes itself are not counted */

static void show(const char *what) {
  void *frames[24];
  ++inside;
  const int count = backtrace(frames, 24);
  dprintf(STDERR_FILENO, "steady_hooks: %s called by\n", what);
  backtrace_symbols_fd(frames + 2, count - 2, STDERR_FILENO);
  --inside;
}

static void note(enum kind kind, const char *what) {
  if (inside) return;
  atomic_fetch_add(&calls[kind], 1);
  if (atomic_load(&tracing) && atomic_load(&counting)) show(what);
}

/* ---- counts ---- */

void *malloc(size_t size) {
  note(ALLOCATE, "malloc");
  return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
  note(ALLOCATE, "calloc");
  return __libc_calloc(count, size);
}
void *realloc(void *memory, size_t size) {
  note(ALLOCATE, "realloc");
  return __libc_realloc(memory, size);
}
void *memalign(size_t alignment, size_t size) {
  note(ALLOCATE, "memalign");
  return __libc_memalign(alignment, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
  note(ALLOCATE, "aligned_alloc");
  return __libc_memalign(alignment, size);
}
int posix_memalign(void **memory, size_t alignment, size_t size) {
  note(ALLOCATE, "posix_memalign");
  *memory = __libc_memalign(alignment, size);
  return *memory ? 0 : 12; /* ENOMEM */
}
void free(void *memory) {
  if (memory) note(FREE, "free");
  __libc_free(memory);
}

/* A hook that counts and calls the next definition of its name. */
#define NEXT(kind, result, name, parameters, arguments)     \
  result name parameters {                                  \
    static result(*next) parameters;                        \
    if (!next) *(void **)(&next) = dlsym(RTLD_NEXT, #name); \
    note(kind, #name);                                      \
    return next arguments;                                  \
  }
NEXT(MAP, void *, mmap, (void *at, size_t size, int protection, int flags, int fd, off_t offset),
     (at, size, protection, flags, fd, offset))
NEXT(MAP, void *, mmap64, (void *at, size_t size, int protection, int flags, int fd, off64_t offset),
     (at, size, protection, flags, fd, offset))
NEXT(MAP, int, munmap, (void *at, size_t size), (at, size))
NEXT(MAP, int, mprotect, (void *at, size_t size, int protection), (at, size, protection))
NEXT(MAP, int, madvise, (void *at, size_t size, int advice), (at, size, advice))
NEXT(MAP, int, brk, (void *end), (end))
NEXT(MAP, void *, sbrk, (intptr_t increment), (increment))
NEXT(DESCRIPTOR, int, socket, (int domain, int type, int protocol), (domain, type, protocol))
NEXT(DESCRIPTOR, int, socketpair, (int domain, int type, int protocol, int fds[2]), (domain, type, protocol, fds))
NEXT(DESCRIPTOR, int, accept4, (int fd, __SOCKADDR_ARG address, socklen_t *size, int flags), (fd, address, size, flags))
NEXT(DESCRIPTOR, int, dup, (int fd), (fd))
NEXT(DESCRIPTOR, int, dup2, (int fd, int other), (fd, other))
NEXT(DESCRIPTOR, int, dup3, (int fd, int other, int flags), (fd, other, flags))
NEXT(DESCRIPTOR, int, memfd_create, (const char *name, unsigned flags), (name, flags))
NEXT(DESCRIPTOR, int, eventfd, (unsigned value, int flags), (value, flags))
NEXT(DESCRIPTOR, int, pipe, (int fds[2]), (fds))
NEXT(DESCRIPTOR, int, pipe2, (int fds[2], int flags), (fds, flags))
NEXT(DESCRIPTOR, int, epoll_create1, (int flags), (flags))
NEXT(DESCRIPTOR, int, timerfd_create, (int clock, int flags), (clock, flags))
NEXT(DESCRIPTOR, FILE *, fopen, (const char *path, const char *mode), (path, mode))
NEXT(THREAD, int, pthread_create,
     (pthread_t * thread, const pthread_attr_t *attributes, void *(*run)(void *), void *argument),
     (thread, attributes, run, argument))

/* The mode is passed only if a file may be made. Otherwise it is read as some number and not used. */
#define NEXT_OPEN(name, parameters, ...)                    \
  int name parameters {                                     \
    static int(*next) parameters;                           \
    if (!next) *(void **)(&next) = dlsym(RTLD_NEXT, #name); \
    va_list list;                                           \
    va_start(list, flags);                                  \
    const mode_t mode = va_arg(list, mode_t);               \
    va_end(list);                                           \
    note(DESCRIPTOR, #name);                                \
    return next(__VA_ARGS__, flags, mode);                  \
  }
NEXT_OPEN(open, (const char *path, int flags, ...), path)
NEXT_OPEN(open64, (const char *path, int flags, ...), path)
NEXT_OPEN(openat, (int folder, const char *path, int flags, ...), folder, path)
NEXT_OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path)

/*
 * When two threads are inside OpenBLAS at once for the first time, it maps another buffer and touches its pages. This
 * may happen in any step, so only one thread may enter at a time.
 */
void cblas_sgemm(int order, int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
  static void (*next)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
  pthread_mutex_lock(&one);
  if (!next) *(void **)(&next) = dlsym(RTLD_NEXT, "cblas_sgemm");
  next(order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  pthread_mutex_unlock(&one);
}

/* ---- steps ---- */

/* Uses system calls only, so that the count changes nothing. It subtracts three for ., .. and the folder itself. */
static long count_open(void) {
  static char entries[16384];
  long count = -3, size = 0;
  const long folder = syscall(SYS_openat, AT_FDCWD, "/proc/self/fd", O_RDONLY | O_DIRECTORY, 0);
  while ((size = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0) {
    for (long at = 0; at < size; ++count) {
      uint16_t length = 0; /* d_reclen lies behind an inode and an offset of 8 bytes each */
      memcpy(&length, entries + at + 16, sizeof length);
      at += length;
    }
  }
  syscall(SYS_close, folder);
  return count;
}

/* Reads the clock that libfsdp uses for waits. */
static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static void take(struct snapshot *snapshot) {
  struct rusage usage;
  snapshot->at_ms = now_ms();
  for (int kind = 0; kind < KINDS; ++kind) snapshot->calls[kind] = atomic_load(&calls[kind]);
  snapshot->open = count_open();
  getrusage(RUSAGE_SELF, &usage);
  snapshot->faults = usage.ru_minflt;
}

/* Reads the library's own count. footprint.c compares the memory that the kernel charges. */
static void take_memory(struct snapshot *snapshot, fsdp_model *model) {
  static fsdp_status (*get_allocated)(fsdp_model *, fsdp_role, uint64_t *);
  static fsdp_status (*get_planned)(fsdp_model *, fsdp_role, uint32_t, uint64_t *);
  const char *rank = getenv("RANK");
  uint64_t allocated = 0, planned = 0;
  if (!get_allocated) *(void **)(&get_allocated) = dlsym(RTLD_NEXT, "fsdp_get_allocated_bytes");
  if (!get_planned) *(void **)(&get_planned) = dlsym(RTLD_NEXT, "fsdp_get_role_bytes");
  if (!rank || get_allocated(model, FSDP_ROLE_ALL, &allocated)) return;
  if (get_planned(model, FSDP_ROLE_ALL, (uint32_t)strtoul(rank, NULL, 10), &planned)) return;
  snapshot->allocated = allocated;
  snapshot->planned = planned;
}

fsdp_status fsdp_step_adamw(fsdp_model *model, double lr, const fsdp_adamw_options *options, fsdp_stream stream) {
  static fsdp_status (*next)(fsdp_model *, double, const fsdp_adamw_options *, fsdp_stream);
  if (!next) *(void **)(&next) = dlsym(RTLD_NEXT, "fsdp_step_adamw");
  const fsdp_status status = next(model, lr, options, stream);
  pthread_mutex_lock(&snapshot_mutex);
  if (step_ends < last_end) {
    struct snapshot *const last = &ends[++step_ends];
    take(last);
    take_memory(last, model);
    atomic_store(&counting, step_ends >= first_end && step_ends < last_end);
  }
  pthread_mutex_unlock(&snapshot_mutex);
  return status;
}

__attribute__((constructor)) static void begin(void) {
  void *frame;
  if (getenv("STEADY_FIRST")) first_end = strtoul(getenv("STEADY_FIRST"), NULL, 10);
  if (getenv("STEADY_LAST")) last_end = strtoul(getenv("STEADY_LAST"), NULL, 10);
  if (getenv("STEADY_SPAN")) span = strtoul(getenv("STEADY_SPAN"), NULL, 10);
  if (last_end > MOST_ENDS) last_end = MOST_ENDS;
  memset(ends, 0, sizeof ends); /* its pages are there */
  ends[0].at_ms = now_ms();
  backtrace(&frame, 1); /* loads what it needs now, and not in the middle of a count */
  atomic_store(&tracing, getenv("STEADY_TRACE") != NULL);
}

static void write_step(unsigned long step, const char *rank) {
  const struct snapshot *now = &ends[step], *before = &ends[step - 1];
  char line[512];
  int size = snprintf(line, sizeof line, "steady_hooks: rank %s step %lu ms %.3f", rank ? rank : "-", step,
                      now->at_ms - ends[step > span ? step - span : 0].at_ms);
  for (int kind = 0; kind < KINDS; ++kind)
    size += snprintf(line + size, sizeof line - (size_t)size, " %s %lu", kind_names[kind],
                     now->calls[kind] - before->calls[kind]);
  snprintf(line + size, sizeof line - (size_t)size, " open %ld faults %ld allocated %" PRIu64 " planned %" PRIu64 "\n",
           now->open - before->open, now->faults - before->faults, now->allocated, now->planned);
  (void)!write(STDERR_FILENO, line, strlen(line));
}

/* A process that never ends a step, such as a launcher, prints nothing. */
__attribute__((destructor)) static void end(void) {
  const char *rank = getenv("RANK");
  atomic_store(&counting, false);
  ++inside;
  for (unsigned long step = first_end + 1; step <= step_ends; ++step) write_step(step, rank);
}
