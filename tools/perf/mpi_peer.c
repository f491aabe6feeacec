/* SPDX-License-Identifier: Apache-2.0 */
/* The Open MPI side of fsdp-perf: does the collectives that fsdp-perf asks for through a shared file (peer_memory.h).
 * usage (fsdp-perf starts it): mpirun -n RANKS fsdp-perf-mpi FILE */
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "peer_memory.h"

static struct peer_memory *memory;
static int rank, size;
static float *from, *to;
static uint64_t capacity;
static int counts[PEER_MOST_RANKS]; /* elements of each rank, all equal */

static void sleep_while(uint32_t *word, uint32_t value) {
  const struct timespec limit = {1, 0};
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value) syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void *map_file(const char *path) {
  const int file = open(path, O_RDWR);
  void *data =
      file < 0 ? MAP_FAILED : mmap(NULL, sizeof(struct peer_memory), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) {
    perror(path);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  close(file);
  return data;
}

static void reserve(uint64_t bytes) {
  if (bytes <= capacity) return;
  free(from);
  free(to);
  capacity = bytes;
  if (posix_memalign((void **)&from, 4096, bytes) || posix_memalign((void **)&to, 4096, bytes))
    MPI_Abort(MPI_COMM_WORLD, 1);
  memset(from, 0, bytes);
  memset(to, 0, bytes);
}

static void run_once(uint32_t operation, uint64_t bytes) {
  const int whole = (int)(bytes / sizeof(float)), part = whole / size;
  switch (operation) {
    case PEER_ALL_GATHER: MPI_Allgather(from, part, MPI_FLOAT, to, part, MPI_FLOAT, MPI_COMM_WORLD); break;
    case PEER_ALL_GATHER_IN_PLACE:
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, to, part, MPI_FLOAT, MPI_COMM_WORLD);
      break;
    case PEER_REDUCE_SCATTER: MPI_Reduce_scatter(from, to, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case PEER_REDUCE_SCATTER_IN_PLACE:
      MPI_Reduce_scatter(MPI_IN_PLACE, from, counts, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      break;
    case PEER_REDUCE_SCATTER_BLOCK: MPI_Reduce_scatter_block(from, to, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case PEER_REDUCE_SCATTER_BLOCK_IN_PLACE:
      MPI_Reduce_scatter_block(MPI_IN_PLACE, from, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      break;
    case PEER_ALL_REDUCE: MPI_Allreduce(from, to, whole, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case PEER_BARRIER: MPI_Barrier(MPI_COMM_WORLD); break;
    default: break;
  }
}

static double measure(void) {
  const uint64_t repeats = memory->repeats;
  double start;
  uint64_t i;
  reserve(memory->bytes);
  for (i = 0; i < (uint64_t)size; ++i) counts[i] = (int)(memory->bytes / sizeof(float)) / size;
  for (i = 0; i < repeats / 8; ++i) run_once(memory->operation, memory->bytes); /* as fsdp-perf does */
  MPI_Barrier(MPI_COMM_WORLD);
  start = MPI_Wtime();
  for (i = 0; i < repeats; ++i) run_once(memory->operation, memory->bytes);
  return MPI_Wtime() - start;
}

static void finish(uint32_t command) {
  if (__atomic_add_fetch(&memory->count, 1, __ATOMIC_ACQ_REL) != (uint32_t)size) return;
  __atomic_store_n(&memory->done, command, __ATOMIC_RELEASE);
  syscall(SYS_futex, &memory->done, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

int main(int argc, char **argv) {
  uint32_t command;
  if (argc != 2) {
    fprintf(stderr, "usage: mpirun -n RANKS %s FILE (fsdp-perf --mpi starts it)\n", argv[0]);
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  memory = map_file(argv[1]);
  for (command = 1;; ++command) {
    sleep_while(&memory->command, command - 1);
    if (memory->operation == PEER_QUIT) break;
    memory->seconds[rank] = measure();
    finish(command);
  }
  MPI_Finalize();
  return 0;
}
