// SPDX-License-Identifier: Apache-2.0
// How communicators live: what is in progress, where ranks meet, how they are aborted.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "simulated_nccl/state.h"

namespace simulated::nccl {
namespace {

using Lock = std::unique_lock<std::mutex>;

// One launch as the stream sees it: what a graph captured may run often.
struct Kernel {
  std::shared_ptr<Comm> comm;
  std::vector<Collective> launch;
  bool captured;
};

// Kernels of two communicators on one GPU may wait for each other for ever, unless they have one order.
class Running {
 public:
  explicit Running(Comm &comm) : comm_(comm) {
    ++comm_.running;
    auto &here = state().running[{comm_.device, comm_.rank}];
    ++here[&comm_];
    if (here.size() > 1 && comm_.config.launch_order_implicit != 1)
      state().breach(&comm_, "kernels of two communicators run on one GPU at the same time");
  }
  ~Running() {
    auto &here = state().running[{comm_.device, comm_.rank}];
    if (--here[&comm_] == 0) here.erase(&comm_);
    --comm_.running;
    state().changed.notify_all();
  }

 private:
  Comm &comm_;
};

template <class Come>
bool await(Lock &lock, const Comm &comm, Come &&come) {
  state().changed.wait(lock, [&] { return comm.aborted || come(); });
  return !comm.aborted;
}

void meet(Lock &lock, Comm &comm, const std::vector<Collective> &launch) {
  const uint64_t number = comm.ran++;
  int64_t &hang = state().knob(Knob::hang_collective);
  if (hang > 0 && --hang == 0) return (void)await(lock, comm, [] { return false; });
  const std::shared_ptr<Clique> clique = comm.clique;
  const auto size = static_cast<size_t>(clique->size);
  Meeting &meeting = clique->meetings[number];
  meeting.launches.resize(size);
  meeting.launches[static_cast<size_t>(comm.rank)] = &launch;
  ++meeting.came;
  state().changed.notify_all();
  if (!await(lock, comm, [&] { return meeting.came == size; })) return;
  inspect(comm, meeting);
  lock.unlock();
  const auto mine = results(comm, meeting);
  lock.lock();
  ++meeting.read;
  state().changed.notify_all();
  if (!await(lock, comm, [&] { return meeting.read >= size; })) return;
  lock.unlock();
  store(comm, launch, mine);
  lock.lock();
  if (++meeting.read == 2 * size) clique->meetings.erase(number);
}

void run(void *data) {
  auto *kernel = static_cast<Kernel *>(data);
  {
    Lock lock(state().mutex);
    const Running running(*kernel->comm);
    if (!kernel->comm->aborted) meet(lock, *kernel->comm, kernel->launch);
  }
  if (!kernel->captured) delete kernel;
}

}  // namespace

void launch(Comm &comm) {
  for (auto &[collectives, stream] : comm.pending) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream, &status);
    const bool captured = status == cudaStreamCaptureStatusActive;
    auto *kernel = new Kernel{comm.shared_from_this(), std::move(collectives), captured};
    if (captured) state().kept.emplace_back(kernel, [](void *kept) { delete static_cast<Kernel *>(kept); });
    if (cudaLaunchHostFunc(stream, run, kernel) != cudaSuccess) {
      state().breach(&comm, "a launch that CUDA refuses");
      if (!captured) delete kernel;
    }
    ++comm.launched;
    ++state().count(Count::launches);
  }
  comm.pending.clear();
}

void abort(const std::shared_ptr<Comm> &comm) {
  std::this_thread::sleep_for(std::chrono::milliseconds([] {
    const Lock lock(state().mutex);
    return state().knob(Knob::abort_ms);
  }()));
  Lock lock(state().mutex);
  comm->aborted = true;
  ++state().count(Count::aborts);
  state().changed.notify_all();
  state().changed.wait(lock, [&] { return comm->running == 0; });
  forget(comm);
}

void forget(const std::shared_ptr<Comm> &comm) {
  state().count(Count::windows) -= static_cast<int64_t>(comm->windows.size());
  state().count(Count::buffers) -= static_cast<int64_t>(comm->buffers.size());
  --state().count(Count::communicators);
  state().comms.erase(comm.get());
}

// Is what was called last done? With the lock held.
bool settled(Comm &comm) {
  if (comm.polls > 0) {
    --comm.polls;
    return false;
  }
  if (comm.hangs) return false;
  if (comm.joining) {
    const auto &joined = comm.clique->joined;
    if (std::count(joined.begin(), joined.end(), true) < comm.clique->size) return false;
    comm.joining = false;
  }
  if (comm.waits_for_windows) {
    if (comm.clique->windows[comm.windows_made - 1].size() < static_cast<size_t>(comm.clique->size)) return false;
    comm.waits_for_windows = false;
  }
  launch(comm);
  return true;
}

void State::breach(const Comm *comm, const std::string &what) {
  breaches.push_back((comm ? "'" + comm->name + "' of rank " + std::to_string(comm->rank) + ": " : "") + what);
}

State &state() {
  static State the_state;
  return the_state;
}

}  // namespace simulated::nccl
