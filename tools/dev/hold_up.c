// SPDX-License-Identifier: Apache-2.0
// Makes threads pause at random after they have waited, read, written or released a lock. A busy machine does the same,
// but rarely at the place that matters. Preloaded by hold_up.py. HOLD_UP_EVERY: one of so many such places holds a
// thread up. HOLD_UP_MS: the longest pause. HOLD_UP_SEED: another seed chooses other places.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static uint64_t every = 300, longest_ms = 200, seed = 1;

static uint64_t number_of(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 10) : otherwise;
}

__attribute__((constructor)) static void read_environment(void) {
  every = number_of("HOLD_UP_EVERY", every);
  longest_ms = number_of("HOLD_UP_MS", longest_ms);
  seed = number_of("HOLD_UP_SEED", seed) * 0x9E3779B97F4A7C15u ^ (uint64_t)getpid();
}

static uint64_t next_random(void) {
  static __thread uint64_t state;
  if (!state) state = (seed ^ (uint64_t)syscall(SYS_gettid) << 32) | 1;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * 0x2545F4914F6CDD1Du >> 32;
}

// Pauses in `weight` of `every` cases. Calls the kernel itself, because functions that sleep may be replaced as well.
static void hold_up(uint64_t weight) {
  const uint64_t drawn = next_random();
  if (drawn % every >= weight) return;
  const int saved = errno;
  const uint64_t ms = drawn / every % longest_ms + 1;
  const struct timespec time = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
  syscall(SYS_nanosleep, &time, NULL);
  errno = saved;
}

#define NEXT(name)               \
  static __typeof__(&name) next; \
  if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

struct start {
  void *(*routine)(void *);
  void *argument;
};

static void *run(void *argument) {
  const struct start start = *(struct start *)argument;
  free(argument);
  hold_up(every / 4);
  return start.routine(start.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument) {
  NEXT(pthread_create);
  struct start *start = malloc(sizeof *start);
  if (!start) return EAGAIN;
  *start = (struct start){routine, argument};
  const int result = next(thread, attributes, run, start);
  if (result) free(start);
  return result;
}

int poll(struct pollfd *entries, nfds_t count, int timeout) {
  NEXT(poll);
  const int result = next(entries, count, timeout);
  hold_up(2);
  return result;
}

ssize_t read(int fd, void *to, size_t bytes) {
  NEXT(read);
  const ssize_t result = next(fd, to, bytes);
  hold_up(1);
  return result;
}

ssize_t write(int fd, const void *from, size_t bytes) {
  NEXT(write);
  hold_up(1);
  return next(fd, from, bytes);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  NEXT(recvmsg);
  const ssize_t result = next(fd, message, flags);
  hold_up(1);
  return result;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  NEXT(sendmsg);
  hold_up(1);
  return next(fd, message, flags);
}

int nanosleep(const struct timespec *time, struct timespec *left) {
  NEXT(nanosleep);
  const int result = next(time, left);
  hold_up(1);
  return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left) {
  NEXT(clock_nanosleep);
  const int result = next(clock, flags, time, left);
  hold_up(1);
  return result;
}

int pthread_mutex_unlock(pthread_mutex_t *mutex) {
  NEXT(pthread_mutex_unlock);
  static __thread unsigned count;
  const int result = next(mutex);
  if (++count % 64 == 0) hold_up(2);
  return result;
}
