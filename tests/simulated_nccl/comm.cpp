// SPDX-License-Identifier: Apache-2.0
// Creates communicators, and tracks which operations are in progress.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "simulated_nccl/state.h"

namespace simulated::nccl {

using Lock = std::unique_lock<std::mutex>;

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
  override_by_environment(comm->config);
  comm->name = config.comm_name ? config.comm_name : "";
  comm->joining = true;
  state().comms[comm.get()] = comm;
  shared->members.push_back(comm);
  ++state().count(Count::communicators);
  return comm;
}

namespace {

// A communicator that does not block has a thread of NCCL's for this call. Without kernels there is nothing to launch.
void start_launch(Comm &comm) {
  comm.launching = true;
  std::thread([kept = comm.shared_from_this()] {
    (void)cudaSetDevice(kept->device);
    const Lock lock(state().mutex);
    launch(*kept);
    kept->launching = false;
    state().changed.notify_all();
  }).detach();
}

bool launches_on_caller(const Comm &comm) {
  const bool without_kernels = comm.clique->size == 1 && !state().knob(Knob::lone_kernels);
  return comm.config.blocking == 1 || without_kernels || state().knob(Knob::launch_on_caller) != 0;
}

std::string place_of(const Comm &comm) {
  char place[16] = {};
  (void)cudaDeviceGetPCIBusId(place, sizeof place, comm.device);
  return place;
}

// Finds two ranks on one GPU, or on slices of one. NCCL recognizes a GPU by its place in the host.
bool shares_gpu(const Comm &comm) {
  if (comm.split_off) return false;
  for (const auto &other : comm.clique->members) {
    if (other.get() == &comm || place_of(*other) != place_of(comm)) continue;
    if (version() >= version_code(2, 30, 3) && parameter("MULTI_RANK_GPU_ENABLE").value_or(0) != 0) return false;
    state().last_error = "Duplicate GPU detected : rank " + std::to_string(comm.rank) + " and rank " +
                         std::to_string(other->rank) + " both on CUDA device " + place_of(comm);
    return true;
  }
  return false;
}

}  // namespace

// Returns whether the last operation is done. The caller must hold the lock.
bool settled(Comm &comm) {
  if (comm.polls > 0) {
    --comm.polls;
    return false;
  }
  if (comm.hangs || comm.launch_hangs || comm.launching) return false;
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
    if (shares_gpu(comm)) {
      comm.error = invalid_usage;
      comm.pending.clear();
    }
  }
  if (comm.waits_for_windows) {
    if (comm.clique->windows[comm.windows_made - 1].size() < static_cast<size_t>(comm.clique->size)) return false;
    comm.waits_for_windows = false;
  }
  if (int64_t &hang = state().knob(Knob::hang_launch); hang > 0 && !comm.pending.empty() && --hang == 0) {
    comm.launch_hangs = true;
    return false;
  }
  if (comm.pending.empty()) return true;
  if (launches_on_caller(comm)) {
    launch(comm);
    return true;
  }
  start_launch(comm);
  return false;
}

void give_up_split(Comm &comm) {
  if (!comm.splitting) return;
  const std::shared_ptr<Comm> child = std::exchange(comm.splitting, nullptr);
  child->error = internal_error;
  std::erase(child->clique->members, child);
  __atomic_store_n(comm.split_to, child.get(), __ATOMIC_RELEASE);
}

void State::breach(const Comm *comm, const std::string &what) {
  breaches.push_back((comm ? "'" + comm->name + "' of rank " + std::to_string(comm->rank) + ": " : "") + what);
}

int version() {
  const int64_t wanted = state().knob(Knob::version);
  return wanted ? static_cast<int>(wanted) : version_code(2, 32, 3);
}

State &state() {
  // It is never destroyed, because an abort may still wait when the process ends.
  static State &only = *[] {
    auto *made = new State;
    made->knobs = first_knobs();
    return made;
  }();
  return only;
}

}  // namespace simulated::nccl
