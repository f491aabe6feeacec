// SPDX-License-Identifier: Apache-2.0
// A look-alike of libnccl.so.2 for tests without a GPU. Ranks are threads of one process, memory belongs to the
// simulated CUDA runtime, and collectives are host functions on its streams. The library opens this shared object as it
// opens the real one (FSDP_NCCL_LIBRARY). It is stricter than NCCL: it compares the calls of the ranks, and records
// every breach of NCCL's rules. It also has NCCL's unpleasant behaviour. Each item is on by default, and most can be
// turned off by a knob:
//
//   - An abort waits for all kernels of its GPU and for the graphs that captured work of the communicator.
//   - Finalizing waits for the same, even if the communicator is aborted meanwhile.
//   - The last rank of a process to end gives back the memory of all its ranks, and waits for the GPUs of all.
//   - A call on a blocking communicator waits for peers until a communicator that shares its resources is aborted.
//   - If the call's own communicator is aborted, the call loses it while it still runs.
//   - If a split fails, its caller must abort the child.
//   - Copy engines that wait for peers notice no abort.
//   - An error stays on a communicator that does not block, and on no other.
//   - NCCL's own variables override a configuration.
//   - A kernel that finds no room on its GPU does not start.
//   - Sums go around a ring, and in 16 bits are rounded at each hop.
//   - A rank that is alone launches no kernels.
//
// It says nothing about NCCL's speed or its faults.
//
// Programs that do not call Control can set knobs for the whole process:
// SIMULATED_NCCL=rank_order_sums=1,endless_room=1. The names are those of environment.cpp; an unknown name ends the
// process.
#pragma once

#include <cstdint>
#include <string>

namespace simulated::nccl {

// Tests may set these knobs. They are 0 at first and after reset(), except for those that SIMULATED_NCCL sets.
enum class Knob : int {
  version,            // the version that ncclGetVersion reports; 0: 2.32.3
  in_progress_polls,  // every call is in progress this many times before it is done
  hang_init_rank,     // 1 + the rank that never joins a communicator ...
  spared_inits,       // ... except for the first calls of any rank that make one, this many
  hang_split_rank,    // 1 + the rank that never reaches a split
  hang_collective,    // the n-th call from now on, of any rank, ends only if it is aborted
  async_error,        // the result that the communicators of a rank report from now on ...
  async_error_rank,   // ... 1 + that rank
  abort_ms,           // time that ncclCommAbort takes beyond its waits ...
  abort_rank,         // ... 1 + the rank that takes it; 0: all
  refuse_windows,     // windows are NULL ...
  refuse_rank,        // ... 1 + the rank that gets NULL; 0: all
  window_error,       // the result of registering windows of a rank; communicators that do not block keep it ...
  window_error_rank,  // ... 1 + that rank; 0: all
  buffer_error,       // the result of ncclCommRegister, which leaves the communicator as it was
  late_handle_ms,     // a thread writes the communicator's handle this long after ncclCommInitRankConfig returned
  hang_launch,        // the n-th launch from now on stays in progress until its communicator is aborted
  let_copies_go,      // makes collectives by copy engines stop waiting for peers; nothing else ends them
  round_sums_once,    // 16-bit sums are made in rank order in fp32 and rounded once, as in no NCCL
  rank_order_sums,    // fp32 sums are made in rank order, and not around a ring
  free_alone,         // each rank gives back its own memory, as if ranks were processes
  launch_on_caller,   // the calling thread makes the launches of communicators that do not block
  instant_windows,    // ncclCommWindowDeregister removes the GPU's mapping without waiting for the GPU
  multiprocessors,    // each GPU has this many, and a kernel waits until it has one for each block; 0: 132, as an H100
  endless_room,       // kernels always find room
  copies_by_policy,   // uses copy engines only if a communicator asks for them
  lone_kernels,       // a rank that is alone launches kernels, too
  any_windows,        // windows may have memory that cannot be exported, too
};

enum class Count : int {
  communicators,   // that exist
  launches,        // groups that had collectives
  launch_threads,  // ... of communicators that do not block; each group starts a thread
  all_gathers,
  in_place_gathers,
  reduce_scatters,
  in_place_reduces,
  messages,                // that were sent
  windows,                 // that exist
  buffers,                 // of ncclCommRegister, that exist
  registered_collectives,  // with memory in windows
  buffered_collectives,    // ... or in buffers
  copy_engine_gathers,
  running,   // kernels that their streams have reached and that have not ended
  aborts,    // without those that were split off
  finished,  // communicators that ended in good order, without those that were split off
  // These values are from the configuration of the communicator that was made last. INT_MIN means that NCCL chooses.
  min_ctas,
  max_ctas,
  cga_cluster_size,
  nvls_ctas,
};

// The shared object exports these functions to tests through dlsym.
struct Control {
  void (*reset)();
  void (*set)(Knob knob, int64_t value);
  int64_t (*count)(Count count);
  const char *(*breaches)();  // one breach a line; empty: none. Valid until the next call.
};
constexpr const char *control_symbol = "simulated_nccl_control";

}  // namespace simulated::nccl
