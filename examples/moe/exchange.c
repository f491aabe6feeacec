/* SPDX-License-Identifier: Apache-2.0 */
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "../check.h"

/* Posts use two sets of boxes in turn. When a rank writes a set again, every member has posted since and so has read
 * what was there. */
struct shared {
  pthread_mutex_t mutex;
  pthread_cond_t posted_more;
  uint64_t posted[MOST_RANKS][LANES];
  struct box boxes[LANES][2][MOST_RANKS][MOST_RANKS]; /* of rank, to member */
};

struct exchange {
  struct shared *shared;
  int rank, members;
  uint64_t posted[LANES];
};

static void require(int is_true, const char *what) {
  if (is_true) return;
  fprintf(stderr, "moe: %s: %s\n", what, strerror(errno));
  exit(1);
}

static struct shared *map(const char *name, int flags) {
  const int file = shm_open(name, O_RDWR | flags, 0600);
  require(file >= 0, name);
  if (flags) require(ftruncate(file, sizeof(struct shared)) == 0, name);
  struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  require(shared != MAP_FAILED, name);
  close(file);
  return shared;
}

static void make_ready(struct shared *shared) {
  pthread_mutexattr_t mutex;
  pthread_condattr_t condition;
  pthread_mutexattr_init(&mutex);
  pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
  pthread_mutex_init(&shared->mutex, &mutex);
  pthread_condattr_init(&condition);
  pthread_condattr_setpshared(&condition, PTHREAD_PROCESS_SHARED);
  pthread_cond_init(&shared->posted_more, &condition);
}

/* Rank 0's value. All ranks wait for each other here, so it is also a barrier. */
static double from_rank_0(fsdp_context *context, int rank, double value) {
  double sum = rank == 0 ? value : 0.0;
  check(fsdp_all_reduce_values(context, NULL, &sum, 1, FSDP_VALUE_SUM));
  return sum;
}

struct exchange *exchange_open(fsdp_context *context, int members) {
  struct exchange *exchange = calloc(1, sizeof *exchange);
  uint32_t rank = 0;
  char name[64];
  require(exchange != NULL, "memory");
  check(fsdp_get_rank(context, &rank));
  exchange->rank = (int)rank, exchange->members = members;
  snprintf(name, sizeof name, "/fsdp-moe-%.0f", from_rank_0(context, exchange->rank, (double)getpid()));
  if (rank == 0) make_ready(exchange->shared = map(name, O_CREAT | O_EXCL));
  from_rank_0(context, exchange->rank, 0.0);
  if (rank != 0) exchange->shared = map(name, 0);
  from_rank_0(context, exchange->rank, 0.0);
  if (rank == 0) shm_unlink(name);
  return exchange;
}

void exchange_close(struct exchange *exchange) {
  munmap(exchange->shared, sizeof *exchange->shared);
  free(exchange);
}

static int first_member(const struct exchange *exchange) { return exchange->rank - exchange->rank % exchange->members; }

struct box *exchange_box(struct exchange *exchange, enum exchange_lane lane, int member) {
  return &exchange->shared->boxes[lane][(exchange->posted[lane] + 1) % 2][exchange->rank][member];
}

void exchange_post(struct exchange *exchange, enum exchange_lane lane) {
  struct shared *shared = exchange->shared;
  pthread_mutex_lock(&shared->mutex);
  shared->posted[exchange->rank][lane] = ++exchange->posted[lane];
  pthread_cond_broadcast(&shared->posted_more);
  pthread_mutex_unlock(&shared->mutex);
}

/* The first member that has posted less often than this rank, or -1. */
static int find_late(const struct exchange *exchange, enum exchange_lane lane) {
  for (int rank = first_member(exchange); rank < first_member(exchange) + exchange->members; ++rank)
    if (exchange->shared->posted[rank][lane] < exchange->posted[lane]) return rank;
  return -1;
}

/* Waits here do not end when the library finds a dead rank, so they have a limit of their own. */
void exchange_wait(struct exchange *exchange, enum exchange_lane lane) {
  struct shared *shared = exchange->shared;
  struct timespec limit;
  int late = 0;
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 60;
  pthread_mutex_lock(&shared->mutex);
  while ((late = find_late(exchange, lane)) >= 0 &&
         pthread_cond_timedwait(&shared->posted_more, &shared->mutex, &limit) == 0) {
  }
  pthread_mutex_unlock(&shared->mutex);
  if (late < 0) return;
  fprintf(stderr, "moe: rank %d has waited 60 s for the tokens of rank %d\n", exchange->rank, late);
  exit(1);
}

const struct box *exchange_received(struct exchange *exchange, enum exchange_lane lane, int member) {
  const int to = exchange->rank % exchange->members;
  return &exchange->shared->boxes[lane][exchange->posted[lane] % 2][first_member(exchange) + member][to];
}
