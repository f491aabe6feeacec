// SPDX-License-Identifier: Apache-2.0
// Communicators know two kinds of memory: windows, which are collective, and buffers.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>

#include "simulated_nccl/call.h"

using namespace simulated::nccl;
using Lock = std::unique_lock<std::mutex>;

namespace {

bool refuses_window(const Comm &comm) {
  const int64_t rank = state().knob(Knob::refuse_rank);
  return state().knob(Knob::refuse_windows) != 0 && (rank == 0 || rank == comm.rank + 1);
}

template <class Function>
Function driver(const char *name) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  (void)cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
  return reinterpret_cast<Function>(function);
}

// Peers map memory when they get its handle.
bool is_exportable(void *data) {
  CUmemGenericAllocationHandle handle{};
  if (driver<PFN_cuMemRetainAllocationHandle_v11000>("cuMemRetainAllocationHandle")(&handle, data)) return false;
  int file = -1;
  const CUresult result = driver<PFN_cuMemExportToShareableHandle_v10020>("cuMemExportToShareableHandle")(
      &file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (result == CUDA_SUCCESS) ::close(file);
  (void)driver<PFN_cuMemRelease_v10020>("cuMemRelease")(handle);
  return result == CUDA_SUCCESS;
}

// On a communicator that does not block, the error stays. A blocking one reports it once; before 2.28, NCCL's thread
// for such a call also sets the abort flag silently.
Result spoil(Lock &lock, Comm &comm, Result error) {
  if (comm.config.blocking != 1) {
    comm.error = error;
    return begin(lock, comm);
  }
  if (simulated::nccl::version() < version_code(2, 28)) *comm.aborted = true;
  state().changed.notify_all();
  return error;
}

// Returns whether a running kernel reads or writes this region.
bool is_at_work(const Comm &comm, const Region &region) {
  const auto inside = [&](const std::byte *data) { return data >= region.data && data < region.data + region.bytes; };
  return std::any_of(comm.at_work.begin(), comm.at_work.end(), [&](const auto *launch) {
    return std::any_of(launch->begin(), launch->end(),
                       [&](const Collective &call) { return inside(call.from) || inside(call.to); });
  });
}

template <class Owned>
std::unique_ptr<Owned> take_out(Comm &comm, std::vector<std::unique_ptr<Owned>> &all, const void *one) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto &mine) { return mine.get() == one; });
  if (found == all.end()) {
    state().breach(&comm, "memory is deregistered that is not registered with the communicator");
    return nullptr;
  }
  auto taken = std::move(*found);
  all.erase(found);
  return taken;
}

}  // namespace

EXPORT Result ncclCommWindowRegister(Comm *handle, void *data, size_t size, Window **window, int flags) {
  Lock lock(state().mutex);
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  check_idle(*comm, "ncclCommWindowRegister");
  if (comm->error) return comm->error;
  if (const int64_t error = state().knob(Knob::window_error)) {
    const int64_t rank = state().knob(Knob::window_error_rank);
    if (rank == 0 || rank == comm->rank + 1) {
      state().last_error = "memory of a wrong kind (simulated)";
      return spoil(lock, *comm, static_cast<Result>(error));
    }
  }
  if (!state().knob(Knob::any_windows) && !is_exportable(data)) {
    state().last_error = "memory without a handle for peers (simulated)";
    return spoil(lock, *comm, unhandled_cuda_error);
  }
  if (reinterpret_cast<uintptr_t>(data) % 4096 || flags != window_symmetric)
    return refuse(invalid_argument, "no page's start");
  auto &sizes = comm->clique->windows[comm->windows_made++];
  for (const size_t other : sizes)
    if (other != size) state().breach(comm.get(), "ranks register windows of different sizes");
  sizes.push_back(size);
  comm->waits_for_windows = true;
  if (!refuses_window(*comm)) {
    comm->windows.push_back(std::make_unique<Window>(Window{{bytes(data), size}}));
    *window = comm->windows.back().get();
    ++state().count(Count::windows);
  }
  return begin(lock, *comm);
}

// Unmaps the kernels' view of the memory.
EXPORT Result ncclCommWindowDeregister(Comm *handle, Window *window) {
  Lock lock(state().mutex);
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  const auto taken = take_out(*comm, comm->windows, window);
  if (!taken) return invalid_argument;
  if (is_at_work(*comm, taken->region)) state().breach(comm.get(), "a window that a kernel uses is deregistered");
  if (!state().knob(Knob::instant_windows)) await_gpu(lock, *comm);
  --state().count(Count::windows);
  return success;
}

EXPORT Result ncclCommRegister(Comm *handle, void *data, size_t size, void **out) {
  const Lock lock(state().mutex);
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  if (comm->error) return comm->error;
  if (const int64_t error = state().knob(Knob::buffer_error))
    return refuse(static_cast<Result>(error), "memory that cannot be registered (simulated)");
  comm->buffers.push_back(std::make_unique<Region>(Region{bytes(data), size}));
  *out = comm->buffers.back().get();
  ++state().count(Count::buffers);
  return success;
}

EXPORT Result ncclCommDeregister(Comm *handle, void *buffer) {
  const Lock lock(state().mutex);
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  if (!take_out(*comm, comm->buffers, buffer)) return invalid_argument;
  --state().count(Count::buffers);
  return success;
}
