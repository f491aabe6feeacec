/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hello_rank: join the job, ask for rank and world size, add up one number over all ranks, leave.
 *
 *   fsdp-run -n 2 hello_rank     two ranks, each a process
 *   hello_rank 2                 two ranks, each a thread of this process
 */
#include <pthread.h>

#include "check.h"

enum { MOST_RANKS = 64 };

/* What a rank does is the same, whether it is a process or a thread. */
static void *run_rank(void *argument) {
  fsdp_context *context = argument;
  uint32_t rank = 0, world_size = 0;
  check(fsdp_get_rank(context, &rank));
  check(fsdp_get_world_size(context, &world_size));
  printf("rank %u of %u says hello\n", rank, world_size);

  double sum = rank + 1.0; /* in place: this rank's number goes in, the sum of all comes out */
  check(fsdp_all_reduce_values(context, NULL, &sum, 1, FSDP_VALUE_SUM));
  const double expected = world_size * (world_size + 1.0) / 2.0;
  if (sum != expected) {
    fprintf(stderr, "rank %u: the sum is %g, expected %g\n", rank, sum, expected);
    exit(1);
  }
  check(fsdp_close_context(context)); /* waits for the others: none takes this rank's leaving for a failure */
  fsdp_destroy_context(context);
  if (rank == 0) printf("hello_rank: ok, 1 + .. + %u = %g\n", world_size, sum);
  return NULL;
}

static void run_threads(uint32_t count) {
  fsdp_context *contexts[MOST_RANKS] = {NULL};
  pthread_t threads[MOST_RANKS];
  check(fsdp_create_local_contexts(count, NULL, contexts));
  for (uint32_t i = 0; i < count; ++i) {
    if (pthread_create(&threads[i], NULL, run_rank, contexts[i])) exit(1);
  }
  for (uint32_t i = 0; i < count; ++i) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
  const int count = argc > 1 ? atoi(argv[1]) : 0;
  if (argc > 1 && (count < 1 || count > MOST_RANKS)) {
    fprintf(stderr, "usage: hello_rank [number of threads, 1 to %d]\n", MOST_RANKS);
    return 2;
  }
  if (count) {
    run_threads((uint32_t)count);
  } else {
    fsdp_context *context = NULL;
    check(fsdp_create_context(NULL, &context)); /* NULL: the launcher's variables, or a world of one */
    run_rank(context);
  }
  return 0;
}
