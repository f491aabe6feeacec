// SPDX-License-Identifier: Apache-2.0
// Defines NCCL's functions, and the functions for tests.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "simulated_nccl/call.h"

using namespace simulated::nccl;
using Lock = std::unique_lock<std::mutex>;

namespace {

// Records what this thread has called since ncclGroupStart.
struct Group {
  int depth = 0;
  Comm *comm = nullptr;
  fsdp_stream stream = nullptr;
  std::vector<Collective> calls;
};
thread_local Group group;
constexpr size_t longest_group = 2048;

Result flush() {
  Lock lock(state().mutex);
  Group mine = std::move(group);
  group = {};
  if (!mine.comm) return success;
  const auto comm = find(mine.comm);
  if (!comm) return refuse(invalid_argument, "no such communicator");
  check_idle(*comm, "ncclGroupEnd");
  if (comm->error) return comm->error;
  comm->pending.emplace_back(std::move(mine.calls), mine.stream);
  return begin(lock, *comm);
}

// NCCL opens memory that cuMemCreate did not make to all devices.
uint32_t find_readers(const void *data) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  (void)cudaGetDriverEntryPointByVersion("cuMemGetAccess", &function, 12000, cudaEnableDefault, &found);
  const auto get_access = reinterpret_cast<PFN_cuMemGetAccess_v10020>(function);
  uint32_t readers = 0;
  for (int device = 0; device < 8; ++device) {  // simulated::max_devices
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    unsigned long long flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    (void)get_access(&flags, &location, reinterpret_cast<CUdeviceptr>(data));
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) readers |= 1u << device;
  }
  return readers;
}

bool is_older_than(int code) {
  const Lock lock(state().mutex);
  return simulated::nccl::version() < code;
}

Result call(Collective collective, Comm *comm, fsdp_stream stream) {
  if (!is_message(collective) && (!collective.from || !collective.to)) return invalid_argument;
  if (group.comm && (group.comm != comm || group.stream != stream)) {
    const Lock lock(state().mutex);
    state().breach(comm, "a group of several communicators or streams");
  }
  if (collective.from && is_older_than(version_code(2, 24))) collective.readers = find_readers(collective.from);
  if (group.calls.size() == longest_group) return invalid_usage;
  group.comm = comm;
  group.stream = stream;
  group.calls.push_back(collective);
  return group.depth ? success : flush();
}

// Separately, each call would wait for a peer that waits for another call.
Result send_or_receive(const Collective &message, Comm *comm, fsdp_stream stream) {
  if (!message.from && !message.to) return invalid_argument;
  if (group.depth == 0) {
    const Lock lock(state().mutex);
    state().breach(comm, "a message outside of a group");
  }
  return call(message, comm, stream);
}

// Copy engines serve all gathers if the configuration asks for them. From 2.29.2 on they serve large gathers without
// that, if the GPUs support it.
size_t find_copied_counts(const Config &config, int device) {
  if (config.cta_policy != undefined && (config.cta_policy & cta_policy_zero)) return 0;
  if (state().knob(Knob::copies_by_policy)) return SIZE_MAX;
  int capability = 0;
  (void)cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, device);
  if (simulated::nccl::version() < version_code(2, 29, 2) || capability < 10) return SIZE_MAX;
  return static_cast<size_t>(parameter("SYM_CE_THRESHOLD").value_or(int64_t{8} << 20));
}

bool hangs_in_init(int rank) {
  if (int64_t &spared = state().knob(Knob::spared_inits); spared > 0) {
    --spared;
    return false;
  }
  return state().knob(Knob::hang_init_rank) == rank + 1;
}

// NCCL also compares the first two fields before it fills in undefined values.
bool refuses(const Config &config) {
  const auto is_less = [](int value, int lowest) { return value != undefined && value < lowest; };
  return config.magic != 0xcafebeef || (config.blocking != 0 && config.blocking != 1) || is_less(config.min_ctas, 1) ||
         is_less(config.max_ctas, 1) || config.min_ctas > config.max_ctas || is_less(config.cga_cluster_size, 0) ||
         is_less(config.nvls_ctas, 1);
}

void note(const Config &config) {
  state().count(Count::min_ctas) = config.min_ctas;
  state().count(Count::max_ctas) = config.max_ctas;
  state().count(Count::cga_cluster_size) = config.cga_cluster_size;
  state().count(Count::nvls_ctas) = config.nvls_ctas;
}

// The caller may read it at any time.
void write_handle(Comm **out, Comm *comm, int64_t late_ms) {
  const auto write = [=] { __atomic_store_n(out, comm, __ATOMIC_RELEASE); };
  if (late_ms == 0) return write();
  std::thread([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(late_ms));
    write();
  }).detach();
}

void reset() {
  const Lock lock(state().mutex);
  state().knobs = first_knobs();
  state().counts = {};
  state().parameters.clear();
  state().breaches.clear();
}
void set(Knob knob, int64_t value) {
  const Lock lock(state().mutex);
  state().knob(knob) = value;
  state().changed.notify_all();
}
int64_t count(Count which) {
  const Lock lock(state().mutex);
  return state().count(which);
}
const char *breaches() {
  const Lock lock(state().mutex);
  state().shown.clear();
  for (const std::string &line : state().breaches) state().shown += line + '\n';
  return state().shown.c_str();
}

}  // namespace

EXPORT const Control simulated_nccl_control;
const Control simulated_nccl_control{reset, set, count, breaches};

EXPORT Result ncclGetVersion(int *version) {
  const Lock lock(state().mutex);
  *version = simulated::nccl::version();
  return success;
}

EXPORT Result ncclGetUniqueId(UniqueId *id) {
  const Lock lock(state().mutex);
  *id = {};
  const std::string text = "simulated-" + std::to_string(++state().ids);
  std::memcpy(id->bytes, text.data(), text.size());
  return success;
}

EXPORT Result ncclCommInitRankConfig(Comm **out, int ranks, UniqueId id, int rank, Config *config) {
  Lock lock(state().mutex);
  if (refuses(*config)) return refuse(invalid_argument, "a configuration of nonsense");
  const auto comm = make_comm(std::string(id.bytes, ::strnlen(id.bytes, sizeof id.bytes)), ranks, rank, *config);
  if (comm->config.blocking == 1) state().breach(nullptr, "a communicator that blocks is made, which no abort ends");
  note(comm->config);
  comm->copied_counts = find_copied_counts(comm->config, comm->device);
  comm->hangs = hangs_in_init(rank);
  if (comm->hangs) comm->clique->joined[static_cast<size_t>(rank)] = false;
  write_handle(out, comm.get(), state().knob(Knob::late_handle_ms));
  return begin(lock, *comm);
}

// The parent decides whether the split blocks; the child decides whether its own launches do.
EXPORT Result ncclCommSplit(Comm *handle, int color, int, Comm **out, Config *config) {
  Lock lock(state().mutex);
  const auto parent = find(handle);
  if (!parent) return invalid_argument;
  check_idle(*parent, "ncclCommSplit");
  if (refuses(*config)) return refuse(invalid_argument, "a configuration of nonsense");
  if (color != 0) state().breach(parent.get(), "ranks are split into several communicators");
  if (parent->error) return parent->error;
  const auto child =
      make_comm(parent->id + "/" + std::to_string(++parent->splits_made), parent->clique->size, parent->rank, *config);
  child->split_off = true;
  child->device = parent->device;
  child->copied_counts = find_copied_counts(child->config, child->device);
  if (parent->config.split_share == 1) child->aborted = parent->aborted;
  if (state().knob(Knob::hang_split_rank) == parent->rank + 1) {
    child->hangs = true;
    child->clique->joined[static_cast<size_t>(parent->rank)] = false;
  }
  *out = nullptr;
  parent->splitting = child;
  parent->split_to = out;
  return begin(lock, *parent);
}

EXPORT Result ncclCommFinalize(Comm *handle) {
  Lock lock(state().mutex);
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  check_idle(*comm, "ncclCommFinalize");
  if (comm->error) return comm->error;
  if (!comm->windows.empty()) state().breach(comm.get(), "finalized with windows");
  comm->finalized = true;
  return begin(lock, *comm);
}

EXPORT Result ncclCommDestroy(Comm *handle) {
  const auto comm = find_locked(handle);
  if (!comm) return invalid_argument;
  destroy(comm);
  return success;
}

EXPORT Result ncclCommAbort(Comm *handle) {
  const auto comm = find_locked(handle);
  if (!comm) return invalid_argument;
  simulated::nccl::abort(comm);
  return success;
}

EXPORT Result ncclCommGetAsyncError(Comm *handle, Result *result) {
  const Lock lock(state().mutex);
  const auto comm = find(handle);
  if (!comm) return invalid_argument;
  const int64_t error = state().knob(Knob::async_error);
  if (error && state().knob(Knob::async_error_rank) == comm->rank + 1) {
    state().last_error = "a link went down (simulated)";
    *result = static_cast<Result>(error);
    return success;
  }
  if (comm->polls == 0 && comm->error)
    *result = comm->error;
  else
    *result = settled(*comm) ? comm->error : in_progress;
  return success;
}

EXPORT const char *ncclGetErrorString(Result result) {
  switch (result) {
    case success: return "no error";
    case system_error: return "unhandled system error";
    case remote_error: return "remote process exited or there was a network error";
    case invalid_argument: return "invalid argument";
    case invalid_usage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    default: return "another error";
  }
}

EXPORT const char *ncclGetLastError(Comm *) {
  thread_local std::string text;
  const Lock lock(state().mutex);
  text = state().last_error;
  return text.c_str();
}

EXPORT Result ncclGroupStart() {
  ++group.depth;
  return success;
}

EXPORT Result ncclGroupEnd() {
  if (group.depth == 0) return invalid_usage;
  return --group.depth ? success : flush();
}

EXPORT Result ncclAllGather(const void *from, void *to, size_t count, DataType type, Comm *comm, fsdp_stream stream) {
  return call({Kind::all_gather, bytes(from), bytes(to), count, type, addition, 0}, comm, stream);
}

EXPORT Result ncclReduceScatter(const void *from, void *to, size_t count, DataType type, Operation operation,
                                Comm *comm, fsdp_stream stream) {
  return call({Kind::reduce_scatter, bytes(from), bytes(to), count, type, operation, 0}, comm, stream);
}

EXPORT Result ncclAllReduce(const void *from, void *to, size_t count, DataType type, Operation operation, Comm *comm,
                            fsdp_stream stream) {
  return call({Kind::all_reduce, bytes(from), bytes(to), count, type, operation, 0}, comm, stream);
}

EXPORT Result ncclBroadcast(const void *from, void *to, size_t count, DataType type, int root, Comm *comm,
                            fsdp_stream stream) {
  return call({Kind::broadcast, bytes(from), bytes(to), count, type, addition, root}, comm, stream);
}

EXPORT Result ncclSend(const void *from, size_t count, DataType type, int peer, Comm *comm, fsdp_stream stream) {
  return send_or_receive({Kind::send, bytes(from), nullptr, count, type, addition, peer}, comm, stream);
}

EXPORT Result ncclRecv(void *to, size_t count, DataType type, int peer, Comm *comm, fsdp_stream stream) {
  return send_or_receive({Kind::receive, nullptr, bytes(to), count, type, addition, peer}, comm, stream);
}
