// SPDX-License-Identifier: Apache-2.0
// How communicators live: what is in progress, where ranks meet, how they are aborted.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

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
    auto &here = state().running[{comm_.device, comm_.owner}];
    ++here[&comm_];
    if (here.size() > 1 && comm_.config.launch_order_implicit != 1)
      state().breach(&comm_, "kernels of two communicators run on one GPU at the same time");
  }
  ~Running() {
    auto &here = state().running[{comm_.device, comm_.owner}];
    if (--here[&comm_] == 0) here.erase(&comm_);
    --comm_.running;
    state().changed.notify_all();
  }

 private:
  Comm &comm_;
};

// A copy engine waits for a peer's word in memory, and for nothing else.
template <class Come>
bool await(Lock &lock, const Comm &comm, bool by_copies, Come &&come) {
  const auto given_up = [&] { return by_copies ? state().knob(Knob::let_copies_go) != 0 : *comm.aborted; };
  state().changed.wait(lock, [&] { return given_up() || come(); });
  return !given_up();
}

void meet(Lock &lock, Comm &comm, const std::vector<Collective> &launch) {
  const uint64_t number = comm.ran++;
  const bool by_copies = is_by_copies(comm, launch);
  int64_t &hang = state().knob(Knob::hang_collective);
  if (hang > 0 && --hang == 0) return (void)await(lock, comm, by_copies, [] { return false; });
  const std::shared_ptr<Clique> clique = comm.clique;
  const auto size = static_cast<size_t>(clique->size);
  Meeting &meeting = clique->meetings[number];
  meeting.launches.resize(size);
  meeting.launches[static_cast<size_t>(comm.rank)] = std::make_shared<const std::vector<Collective>>(launch);
  ++meeting.came;
  state().changed.notify_all();
  if (!await(lock, comm, by_copies, [&] { return meeting.came == size; })) {
    if (meeting.came == size) return;
    meeting.launches[static_cast<size_t>(comm.rank)] = nullptr;  // gone before the last one came, which waits in vain
    --meeting.came;
    return;
  }
  inspect(comm, meeting);
  lock.unlock();
  const auto mine = results(comm, meeting);
  lock.lock();
  ++meeting.read;
  state().changed.notify_all();
  if (!await(lock, comm, by_copies, [&] { return meeting.read >= size; })) return;
  lock.unlock();
  store(comm, launch, mine);
  lock.lock();
  if (++meeting.read == 2 * size) clique->meetings.erase(number);
}

#if CUDART_VERSION >= 13000
// The last graph that could launch it again is gone.
void forget_captured(void *data) {
  const std::unique_ptr<Kernel> kernel(static_cast<Kernel *>(data));
  const Lock lock(state().mutex);
  --kernel->comm->graphs;
  state().changed.notify_all();
}

void keep_for_graph(fsdp_stream stream, Kernel *kernel) {
  cudaStreamCaptureStatus status;
  cudaGraph_t graph = nullptr;
  cudaUserObject_t object = nullptr;
  const bool kept =
      cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr) == cudaSuccess &&
      cudaUserObjectCreate(&object, kernel, forget_captured, 1, cudaUserObjectNoDestructorSync) == cudaSuccess &&
      cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove) == cudaSuccess;
  if (kept)
    ++kernel->comm->graphs;
  else
    state().breach(kernel->comm.get(), "a graph that cannot be followed");
}
#else
void keep_for_graph(fsdp_stream, Kernel *) {}  // for ever
#endif

void run(void *data) {
  auto *kernel = static_cast<Kernel *>(data);
  {
    Lock lock(state().mutex);
    const Running running(*kernel->comm);
    if (!*kernel->comm->aborted) meet(lock, *kernel->comm, kernel->launch);
  }
  if (!kernel->captured) delete kernel;
}

}  // namespace

// NCCL launches nothing for a rank that is alone: what is not in place is copied on the stream, which no abort ends.
void copy_alone(const Comm &comm, const std::vector<Collective> &collectives, fsdp_stream stream) {
  Meeting alone;
  alone.launches = {std::make_shared<const std::vector<Collective>>(collectives)};
  inspect(comm, alone);
  for (const Collective &call : collectives)
    if (call.from != call.to && !is_message(call))
      (void)cudaMemcpyAsync(call.to, call.from, call.count * size_of(call.type), cudaMemcpyDefault, stream);
}

// Without the lock while CUDA may keep the caller waiting for room in a stream, until an abort makes some.
class Unlocked {
 public:
  Unlocked() { state().mutex.unlock(); }
  ~Unlocked() { state().mutex.lock(); }
};

void launch(Comm &comm) {
  const auto kept = comm.shared_from_this();
  for (auto &[collectives, stream] : std::exchange(comm.pending, {})) {
    if (comm.clique->size == 1) {
      copy_alone(comm, collectives, stream);
      ++state().count(Count::launches);
      continue;
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream, &status);
    const bool captured = status == cudaStreamCaptureStatusActive;
    auto *kernel = new Kernel{comm.shared_from_this(), std::move(collectives), captured};
    if (captured) keep_for_graph(stream, kernel);
    const bool launched = [&] {
      const Unlocked unlocked;
      return cudaLaunchHostFunc(stream, run, kernel) == cudaSuccess;
    }();
    if (!launched) {
      state().breach(&comm, "a launch that CUDA refuses");
      if (!captured) delete kernel;
    }
    ++comm.launched;
    ++state().count(Count::launches);
    if (comm.config.blocking != 1) ++state().count(Count::launch_threads);
  }
}

// The flag is seen at once; then memory is given back, which waits for the GPU, also for what other communicators have
// there.
void abort(const std::shared_ptr<Comm> &comm) {
  Lock lock(state().mutex);
  if (comm->inside > 0) state().breach(comm.get(), "aborted while a thread is in a call of it");
  *comm->aborted = comm->ending = true;
  comm->pending.clear();
  if (comm->splitting) forget(std::exchange(comm->splitting, nullptr));  // NCCL gives it back itself
  state().count(Count::aborts) += !comm->split_off;
  state().changed.notify_all();
  const auto &running = state().running[{comm->device, comm->owner}];
  state().changed.wait(lock, [&] { return running.empty() && comm->graphs == 0; });
  const std::chrono::milliseconds longer(comm->split_off ? 0 : state().knob(Knob::abort_ms));
  lock.unlock();
  std::this_thread::sleep_for(longer);
  lock.lock();
  forget(comm);
}

std::shared_ptr<Comm> make_comm(const std::string &clique, int ranks, int rank, const Config &config) {
  auto comm = std::make_shared<Comm>();
  auto &shared = state().cliques[clique];
  if (!shared) shared = std::make_shared<Clique>();
  shared->size = ranks;
  shared->joined.resize(static_cast<size_t>(ranks));
  shared->joined[static_cast<size_t>(rank)] = true;
  comm->clique = shared;
  comm->id = clique;
  comm->rank = rank;
  comm->owner = std::this_thread::get_id();
  (void)cudaGetDevice(&comm->device);
  comm->config = config;
  comm->name = config.comm_name ? config.comm_name : "";
  comm->joining = true;
  state().comms[comm.get()] = comm;
  ++state().count(Count::communicators);
  return comm;
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
  if (comm.hangs || comm.launch_hangs) return false;
  if (comm.splitting) {
    if (!settled(*comm.splitting)) return false;
    __atomic_store_n(comm.split_to, comm.splitting.get(), __ATOMIC_RELEASE);
    comm.splitting = nullptr;
  }
  if (comm.finalized && (comm.graphs > 0 || comm.running > 0)) return false;
  if (comm.joining) {
    const auto &joined = comm.clique->joined;
    if (std::count(joined.begin(), joined.end(), true) < comm.clique->size) return false;
    comm.joining = false;
  }
  if (comm.waits_for_windows) {
    if (comm.clique->windows[comm.windows_made - 1].size() < static_cast<size_t>(comm.clique->size)) return false;
    comm.waits_for_windows = false;
  }
  if (int64_t &hang = state().knob(Knob::hang_launch); hang > 0 && !comm.pending.empty() && --hang == 0) {
    comm.launch_hangs = true;
    return false;
  }
  launch(comm);
  return true;
}

void State::breach(const Comm *comm, const std::string &what) {
  breaches.push_back((comm ? "'" + comm->name + "' of rank " + std::to_string(comm->rank) + ": " : "") + what);
}

int version() {
  const int64_t wanted = state().knob(Knob::version);
  return wanted ? static_cast<int>(wanted) : version_code(2, 32, 3);
}

State &state() {
  static State &only = *new State;  // never destroyed: an abort may still wait when the process ends
  return only;
}

}  // namespace simulated::nccl
