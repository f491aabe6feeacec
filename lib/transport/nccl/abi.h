// SPDX-License-Identifier: Apache-2.0
// The part of NCCL's C interface that is used, declared here: its header is not where this library is built, and what
// is declared has not changed since NCCL 2.19. Checked against a real nccl.h by tests/unit/nccl_abi_test.cpp where one
// is found.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "fsdp.h"

namespace fsdp::transport::nccl {

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

// ncclConfig_t. It only grows: NCCL copies as many bytes as both it and `size` have, and takes its own defaults for
// what it knows and `version` is older than. So this is right for older and newer ones too.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 0;  // of the header that a caller was built with: here, of the NCCL that reads it, up to `latest`
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

// Of later versions: NULL where they are missing.
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

}  // namespace fsdp::transport::nccl
