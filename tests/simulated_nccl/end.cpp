// SPDX-License-Identifier: Apache-2.0
// Ends communicators. Each rank's call ends its own communicator. The last of these calls in a process releases the
// memory of all its ranks, and waits for the GPUs of all of them.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "simulated_nccl/state.h"

namespace simulated::nccl {
namespace {

using Lock = std::unique_lock<std::mutex>;

bool is_idle(const Comm &comm) { return comm.running == 0 && comm.graphs == 0; }

bool is_assembled(const Comm &comm) {
  const auto &joined = comm.clique->joined;
  return !comm.error && std::count(joined.begin(), joined.end(), true) == comm.clique->size;
}

void forget(const std::shared_ptr<Comm> &comm) {
  state().count(Count::windows) -= static_cast<int64_t>(comm->windows.size());
  state().count(Count::buffers) -= static_cast<int64_t>(comm->buffers.size());
  --state().count(Count::communicators);
  comm->windows.clear();
  comm->buffers.clear();
  std::erase(comm->clique->members, comm);
  state().gone.push_back(comm);
}

// Returns the communicators that lose their memory in this end. The list is empty if a later end releases it.
std::vector<std::shared_ptr<Comm>> freed_by(const std::shared_ptr<Comm> &comm) {
  const auto &members = comm->clique->members;
  if (!is_assembled(*comm) || state().knob(Knob::free_alone)) return {comm};
  const bool last = std::all_of(members.begin(), members.end(), [](const auto &member) { return member->ended; });
  return last ? members : std::vector<std::shared_ptr<Comm>>();
}

// Starts the thread that waits for the stream's work and then for the GPU's work.
void end(Lock &lock, const std::shared_ptr<Comm> &comm) {
  comm->ended = true;
  state().comms.erase(comm.get());
  const auto freed = freed_by(comm);
  for (const auto &member : freed) state().changed.wait(lock, [&] { return is_idle(*member); });
  for (const auto &member : freed) await_gpu(lock, *member);
  for (const auto &member : freed) forget(member);
  state().changed.notify_all();
}

}  // namespace

void await_gpu(Lock &lock, const Comm &comm) {
  const auto &running = state().running[{comm.device, comm.owner}];
  state().changed.wait(lock, [&] { return running.empty(); });
}

// The flag is seen at once. The end joins NCCL's own threads: a launch stops, and finalizing stops when its graphs are
// gone.
void abort(const std::shared_ptr<Comm> &comm) {
  Lock lock(state().mutex);
  if (comm->inside > 0) state().breach(comm.get(), "aborted while a thread is in a call of it");
  *comm->aborted = comm->ending = true;
  comm->pending.clear();
  give_up_split(*comm);
  state().count(Count::aborts) += !comm->split_off;
  state().changed.notify_all();
  state().changed.wait(lock, [&] { return !comm->launching && (!comm->finalized || is_idle(*comm)); });
  const int64_t slow = state().knob(Knob::abort_rank);
  const bool takes_long = !comm->split_off && (slow == 0 || slow == comm->rank + 1);
  const std::chrono::milliseconds longer(takes_long ? state().knob(Knob::abort_ms) : 0);
  lock.unlock();
  std::this_thread::sleep_for(longer);
  lock.lock();
  end(lock, comm);
}

void destroy(const std::shared_ptr<Comm> &comm) {
  Lock lock(state().mutex);
  if (!comm->finalized || comm->polls > 0 || comm->running)
    state().breach(comm.get(), "destroyed while it may be at work");
  comm->ending = true;
  state().count(Count::finished) += !comm->split_off;
  end(lock, comm);
}

}  // namespace simulated::nccl
