// SPDX-License-Identifier: Apache-2.0
// NCCL, which is looked up when the first team needs it, so that this library also loads on systems without NCCL. NCCL
// stays loaded, because it cannot be unloaded safely.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "fsdp.h"

namespace fsdp::transport::nccl {

// The part of NCCL's C interface that is used. It is declared here, because NCCL's header is not available when this
// library is built. These declarations have not changed since NCCL 2.19. tests/unit/nccl_abi_test.cpp checks them
// against a real nccl.h if there is one.

struct Comm;    // *ncclComm_t
struct Window;  // *ncclWindow_t

// 2.9.0 and later: major, minor and patch as decimal digits.
constexpr int version_code(int major, int minor, int patch = 0) { return major * 10000 + minor * 100 + patch; }

enum Result : int {
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
  timed_out = 8  // 2.32
};

enum DataType : int { uint8 = 1, float16 = 6, float32 = 7, bfloat16 = 9 };
using Operation = int;
constexpr Operation addition = 0;

struct UniqueId {
  char bytes[128];
};

constexpr int undefined = INT_MIN;
constexpr int window_symmetric = 1;  // NCCL_WIN_COLL_SYMMETRIC
constexpr int cta_policy_zero = 2;   // NCCL_CTA_POLICY_ZERO: copy engines instead of kernels where it can

// ncclConfig_t, which only grows: NCCL copies the bytes that both its own struct and `size` cover, and uses its own
// defaults for fields that are newer than `version`. So this declaration is right for older and newer versions of NCCL,
// too.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 0;  // usually the version of the caller's header; here that of the loaded NCCL, up to `latest`
  int blocking = undefined;
  int cga_cluster_size = undefined;
  int min_ctas = undefined;
  int max_ctas = undefined;
  const char *net_name = nullptr;
  int split_share = undefined;
  int traffic_class = undefined;  // 2.25
  const char *comm_name = nullptr;
  int collnet_enable = undefined;  // 2.27
  int cta_policy = undefined;
  int shrink_share = undefined;
  int nvls_ctas = undefined;
  int channels_per_net_peer = undefined;  // 2.28
  int nvlink_centric_sched = undefined;
  int graph_usage_mode = undefined;  // 2.29
  int rma_contexts = undefined;
  int max_p2p_peers = undefined;
  int graph_stream_ordering = undefined;  // 2.30
  int launch_order_implicit = undefined;  // 2.31
  int rma_signals = undefined;
  int rma_eager_init = undefined;
  int host_cft_mode = undefined;
  int nvls_host_mode = undefined;

  static constexpr int latest = version_code(2, 31);
};

// name: result(arguments)
#define FSDP_NCCL_FUNCTIONS(X)                                                                                     \
  X(ncclGetUniqueId, Result(UniqueId *))                                                                           \
  X(ncclCommInitRankConfig, Result(Comm **, int ranks, UniqueId, int rank, Config *))                              \
  X(ncclCommSplit, Result(Comm *, int color, int key, Comm **, Config *))                                          \
  X(ncclCommFinalize, Result(Comm *))                                                                              \
  X(ncclCommDestroy, Result(Comm *))                                                                               \
  X(ncclCommAbort, Result(Comm *))                                                                                 \
  X(ncclCommGetAsyncError, Result(Comm *, Result *))                                                               \
  X(ncclGetErrorString, const char *(Result))                                                                      \
  X(ncclGetLastError, const char *(Comm *))                                                                        \
  X(ncclGroupStart, Result())                                                                                      \
  X(ncclGroupEnd, Result())                                                                                        \
  X(ncclAllGather, Result(const void *from, void *to, size_t count, DataType, Comm *, fsdp_stream))                \
  X(ncclReduceScatter, Result(const void *from, void *to, size_t count, DataType, Operation, Comm *, fsdp_stream)) \
  X(ncclAllReduce, Result(const void *from, void *to, size_t count, DataType, Operation, Comm *, fsdp_stream))     \
  X(ncclBroadcast, Result(const void *from, void *to, size_t count, DataType, int root, Comm *, fsdp_stream))      \
  X(ncclSend, Result(const void *from, size_t count, DataType, int peer, Comm *, fsdp_stream))                     \
  X(ncclRecv, Result(void *to, size_t count, DataType, int peer, Comm *, fsdp_stream))

// Functions of later versions: NULL if they are missing.
#define FSDP_NCCL_LATER_FUNCTIONS(X)                                                        \
  X(ncclCommWindowRegister, Result(Comm *, void *data, size_t bytes, Window **, int flags)) \
  X(ncclCommWindowDeregister, Result(Comm *, Window *))                                     \
  X(ncclCommRegister, Result(Comm *, void *data, size_t bytes, void **handle))              \
  X(ncclCommDeregister, Result(Comm *, void *handle))

template <class Signature>
struct FunctionPointer;
template <class To, class... Arguments>
struct FunctionPointer<To(Arguments...)> {
  using type = To (*)(Arguments...);
};

inline DataType data_type_of(fsdp_dtype dtype) {
  switch (dtype) {
    case FSDP_FLOAT32: return float32;
    case FSDP_BFLOAT16: return bfloat16;
    case FSDP_FLOAT16: return float16;
    default: fail(FSDP_INTERNAL, "NCCL is to sum values of dtype {}", dtype);
  }
}

struct Library {
  // The first version with ncclCommRegister, and with splitShare in the configuration. Older versions were not
  // examined.
  static constexpr int oldest = version_code(2, 19);
  static constexpr int windows = version_code(2, 27);
  static constexpr int windows_abort = version_code(2, 29, 7);  // kernels over windows notice an abort
  static constexpr int copy_engines = version_code(2, 28);
  static constexpr int copies_unasked = version_code(2, 29, 2);  // large gathers over windows, on some GPUs
  // A window that cannot be registered does not harm a communicator that blocks. Before this version NCCL set the abort
  // flag and reported nothing.
  static constexpr int windows_fail_alone = version_code(2, 28);
  static constexpr int blocks_of_switches = version_code(2, 27);  // nvlsCTAs
  static constexpr int ranks_share_gpu = version_code(2, 30, 3);
  // An abort of the parent does not affect a thread's launches on the child. Before this version both used the thread's
  // only group.
  static constexpr int children_block = version_code(2, 26, 2);
  static constexpr int launch_order_by_environment = version_code(2, 26);
  static constexpr int launch_order_in_config = version_code(2, 31);

#define FSDP_NCCL_MEMBER(name, ...) FunctionPointer<__VA_ARGS__>::type name = nullptr;
  FSDP_NCCL_FUNCTIONS(FSDP_NCCL_MEMBER)
  FSDP_NCCL_LATER_FUNCTIONS(FSDP_NCCL_MEMBER)
#undef FSDP_NCCL_MEMBER
  int version = 0;
  std::string path;                 // the library's file
  std::string found;                // how it was found: "named by FSDP_NCCL_LIBRARY"
  std::vector<std::string> others;  // other NCCL libraries in this process

  bool since(int code) const { return version >= code; }
};

std::string version_text(int code);
// Throws UNSUPPORTED, which lists the places that were searched.
std::shared_ptr<const Library> load_library();

// Finds the places where a libnccl may be. Nothing is executed to find it.

// Properties of GPUs that NCCL needs and device::Device does not provide.
// The GPU of a rank, or its slice of a GPU (MIG).
struct GpuIdentity {
  std::array<uint8_t, 16> number;  // number of the GPU or slice; equal only for ranks that share it
  int32_t domain, bus, slot;       // PCI address of the GPU in its host, which is equal for slices of one GPU

  bool operator==(const GpuIdentity &) const = default;
  bool same_gpu(const GpuIdentity &other) const noexcept {
    return domain == other.domain && bus == other.bus && slot == other.slot;
  }
  std::string place() const;  // "0000:1b:00"
};
GpuIdentity gpu_identity(int32_t index);

// The major number of the GPU's compute capability.
int32_t gpu_generation(int32_t index);

// Makes the GPU the current one of a thread that works only for NCCL.
void make_current(int32_t index) noexcept;
// Lets this thread query events while another thread captures a graph; the capture goes on.
void allow_calls_during_captures() noexcept;

// The files named libnccl.so* that this process has mapped, each once.
std::vector<std::string> mapped_libraries();
// The existing libraries from Python wheels, in the environments that the process can see.
std::vector<std::string> wheel_libraries();
// The folders that wheel_libraries() searched, for messages.
std::vector<std::string> python_folders();

}  // namespace fsdp::transport::nccl
