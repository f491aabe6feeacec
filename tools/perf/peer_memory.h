/* SPDX-License-Identifier: Apache-2.0 */
/* What fsdp-perf and the ranks of a peer's job share: a file that both map. fsdp-perf raises `command`, the job's ranks
 * do what the request says, write their seconds, and the last one raises `done` to it. Both sides sleep on the futexes,
 * so that they do not disturb each other's measurements. */
#ifndef PERF_PEER_MEMORY_H
#define PERF_PEER_MEMORY_H

#include <stdint.h>

enum { PEER_MOST_RANKS = 256 };

enum peer_operation {
  PEER_QUIT,
  PEER_ALL_GATHER,
  PEER_ALL_GATHER_IN_PLACE,
  PEER_REDUCE_SCATTER, /* MPI_Reduce_scatter */
  PEER_REDUCE_SCATTER_IN_PLACE,
  PEER_REDUCE_SCATTER_BLOCK, /* MPI_Reduce_scatter_block */
  PEER_REDUCE_SCATTER_BLOCK_IN_PLACE,
  PEER_ALL_REDUCE,
  PEER_BARRIER
};

struct peer_memory {
  uint32_t command; /* atomic; from 1 */
  uint32_t done;    /* atomic */
  uint32_t count;   /* atomic: ranks that have finished the command */
  uint32_t operation;
  uint64_t bytes; /* of the full buffer, fp32 */
  uint64_t repeats;
  double seconds[PEER_MOST_RANKS]; /* of all repeats */
};

#endif
