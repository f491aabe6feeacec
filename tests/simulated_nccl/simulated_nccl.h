// SPDX-License-Identifier: Apache-2.0
// A look-alike of libnccl.so.2 for tests where no GPU is: ranks are threads of one process, memory is that of the
// simulated CUDA runtime, and collectives are host functions on its streams. It is a shared object that the library
// opens as it opens the real one (FSDP_NCCL_LIBRARY). Stricter than NCCL: it compares what the ranks call, and notes
// every breach of its rules. What hurts in NCCL hurts here: an abort waits for all kernels of its GPU, and for the
// graphs that captured something of the communicator, as finalizing does, whatever is aborted meanwhile. Of ranks of
// one process the last one to end gives back the memory of all, and waits for the GPUs of all. A call of one that
// blocks waits for peers until an abort of one with which it shares its resources, and an abort of its own takes it
// away from under its caller. A child whose split has failed is its caller's to abort. Copy engines that wait for peers
// notice no abort. An error stays on a communicator that does not block, and on no other. NCCL's own variables are
// stronger than a configuration. A kernel that finds no room on its GPU does not start. Sums go around a ring, and in
// 16 bits are rounded at each hop. A rank that is alone has no kernels. Each is on by default, and most can be turned
// off by a knob. It says nothing about NCCL's speed, or its faults.
//
// Programs that do not call Control set knobs for the whole process: SIMULATED_NCCL=rank_order_sums=1,endless_room=1.
// The names are those of environment.cpp; a word that is not one of them ends the process.
#pragma once

#include <cstdint>
#include <string>

namespace simulated::nccl {

// What a test may set; all 0 at first, but for SIMULATED_NCCL, and again after reset().
enum class Knob : int {
  version,            // what ncclGetVersion says; 0: 2.32.3
  in_progress_polls,  // how often every call is in progress before it is done
  hang_init_rank,     // 1 + the rank of a communicator that never joins ...
  spared_inits,       // ... but for the first so many calls that make one, of any rank
  hang_split_rank,    // 1 + the rank that never comes to a split
  hang_collective,    // the n-th from now on, of any rank, never ends unless it is aborted
  async_error,        // the result that the communicators of a rank report from now on ...
  async_error_rank,   // ... 1 + which
  abort_ms,           // how long ncclCommAbort takes beside what it waits for ...
  abort_rank,         // ... 1 + the rank whose does; 0: all
  refuse_windows,     // windows are NULL ...
  refuse_rank,        // ... 1 + the rank for which they are; 0: for all
  window_error,       // the result of registering windows, kept by communicators that do not block, of a rank ...
  window_error_rank,  // ... 1 + which; 0: of all
  buffer_error,       // the result of ncclCommRegister, which leaves the communicator as it was
  late_handle_ms,     // the communicator's handle is written by a thread, so long after ncclCommInitRankConfig returned
  hang_launch,        // the n-th launch from now on stays in progress until its communicator is aborted
  let_copies_go,      // collectives by copy engines that wait for peers give up; nothing else ends them
  round_sums_once,    // 16-bit sums are made in rank order in fp32 and rounded once, as no NCCL does
  rank_order_sums,    // fp32 sums are made in rank order, and not around a ring
  free_alone,         // each rank gives back its own memory, as where ranks are processes
  launch_on_caller,   // launches of communicators that do not block are made by the thread that calls
  instant_windows,    // ncclCommWindowDeregister does not wait for the GPU, whose mapping it takes away
  multiprocessors,    // of each GPU: kernels have a block on each and wait for room; 0: 132, as an H100
  endless_room,       // kernels always find room
  copies_by_policy,   // copy engines only where a communicator asks for them
  lone_kernels,       // of a rank that is alone, too
  any_windows,        // of memory that cannot be exported, too
};

enum class Count : int {
  communicators,   // alive
  launches,        // groups that had collectives
  launch_threads,  // ... of communicators that do not block, each of which starts a thread
  all_gathers,
  in_place_gathers,
  reduce_scatters,
  in_place_reduces,
  messages,                // that were sent
  windows,                 // alive
  buffers,                 // alive, of ncclCommRegister
  registered_collectives,  // whose memory lies in windows
  buffered_collectives,    // ... or in buffers
  copy_engine_gathers,
  running,   // kernels whose streams have come to them, now
  aborts,    // not of those that were split off
  finished,  // communicators that ended in good order, but for those that were split off
  // Of the configuration of the communicator that was made last; INT_MIN: NCCL's own choice.
  min_ctas,
  max_ctas,
  cga_cluster_size,
  nvls_ctas,
};

// The functions that the shared object gives to tests, by dlsym.
struct Control {
  void (*reset)();
  void (*set)(Knob knob, int64_t value);
  int64_t (*count)(Count count);
  const char *(*breaches)();  // one a line; empty: none. Until the next call.
};
constexpr const char *control_symbol = "simulated_nccl_control";

}  // namespace simulated::nccl
