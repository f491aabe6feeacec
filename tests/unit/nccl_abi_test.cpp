// SPDX-License-Identifier: Apache-2.0
// Checks that transport/nccl/library.h declares the same as a real nccl.h. It is built if a header is found.
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstring>
#include <type_traits>

#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {
namespace {

static_assert(version_code(NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH) == NCCL_VERSION_CODE);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && sizeof(UniqueId) == NCCL_UNIQUE_ID_BYTES);
static_assert(alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(sizeof(Result) == sizeof(ncclResult_t) && sizeof(DataType) == sizeof(ncclDataType_t));
static_assert(sizeof(Operation) == sizeof(ncclRedOp_t));
static_assert(int{success} == ncclSuccess && int{unhandled_cuda_error} == ncclUnhandledCudaError);
static_assert(int{system_error} == ncclSystemError && int{internal_error} == ncclInternalError);
static_assert(int{invalid_argument} == ncclInvalidArgument && int{invalid_usage} == ncclInvalidUsage);
static_assert(int{remote_error} == ncclRemoteError && int{in_progress} == ncclInProgress);
static_assert(int{uint8} == ncclUint8 && int{float16} == ncclFloat16);
static_assert(int{float32} == ncclFloat32 && int{bfloat16} == ncclBfloat16);
static_assert(addition == ncclSum);
static_assert(undefined == NCCL_CONFIG_UNDEF_INT);

static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(Config, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(Config, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(Config, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(Config, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(Config, split_share) == offsetof(ncclConfig_t, splitShare));
#if NCCL_VERSION_CODE >= 22700
static_assert(window_symmetric == NCCL_WIN_COLL_SYMMETRIC);
static_assert(offsetof(Config, traffic_class) == offsetof(ncclConfig_t, trafficClass));
static_assert(offsetof(Config, comm_name) == offsetof(ncclConfig_t, commName));
static_assert(offsetof(Config, collnet_enable) == offsetof(ncclConfig_t, collnetEnable));
static_assert(offsetof(Config, cta_policy) == offsetof(ncclConfig_t, CTAPolicy));
static_assert(offsetof(Config, shrink_share) == offsetof(ncclConfig_t, shrinkShare));
static_assert(offsetof(Config, nvls_ctas) == offsetof(ncclConfig_t, nvlsCTAs));
#endif
#if NCCL_VERSION_CODE >= 22800
static_assert(cta_policy_zero == NCCL_CTA_POLICY_ZERO);
static_assert(offsetof(Config, channels_per_net_peer) == offsetof(ncclConfig_t, nChannelsPerNetPeer));
static_assert(offsetof(Config, nvlink_centric_sched) == offsetof(ncclConfig_t, nvlinkCentricSched));
static_assert(sizeof(ncclConfig_t) <= sizeof(Config) || NCCL_VERSION_CODE > Config::latest);
#endif
#if NCCL_VERSION_CODE >= 23100
static_assert(offsetof(Config, graph_usage_mode) == offsetof(ncclConfig_t, graphUsageMode));
static_assert(offsetof(Config, graph_stream_ordering) == offsetof(ncclConfig_t, graphStreamOrdering));
static_assert(offsetof(Config, launch_order_implicit) == offsetof(ncclConfig_t, launchOrderImplicit));
static_assert(offsetof(Config, nvls_host_mode) == offsetof(ncclConfig_t, nvlsHostMode));
static_assert(sizeof(ncclConfig_t) >= sizeof(Config));
static_assert(int{timed_out} == ncclTimeout || NCCL_VERSION_CODE < 23200);
#endif

// Returns the types of arguments, with NCCL's own types in place of the library's.
template <class T>
struct Theirs {
  using type = T;
};
template <>
struct Theirs<Comm *> {
  using type = ncclComm_t;
};
template <>
struct Theirs<Comm **> {
  using type = ncclComm_t *;
};
template <>
struct Theirs<UniqueId> {
  using type = ncclUniqueId;
};
template <>
struct Theirs<UniqueId *> {
  using type = ncclUniqueId *;
};
template <>
struct Theirs<Config *> {
  using type = ncclConfig_t *;
};
template <>
struct Theirs<Result> {
  using type = ncclResult_t;
};
template <>
struct Theirs<Result *> {
  using type = ncclResult_t *;
};
template <>
struct Theirs<DataType> {
  using type = ncclDataType_t;
};
template <>
struct Theirs<Window *> {
  using type = ncclWindow_t;
};
template <>
struct Theirs<Window **> {
  using type = ncclWindow_t *;
};

// ncclRedOp_t is an enum in nccl.h and an int here.
template <class Ours, class Real>
constexpr bool same_argument = std::is_same_v<typename Theirs<Ours>::type, Real> ||
                               (std::is_same_v<Ours, Operation> && std::is_same_v<Real, ncclRedOp_t>);

template <class Ours, class Real>
struct Same : std::false_type {};
template <class To, class... Arguments, class RealTo, class... Reals>
requires(sizeof...(Arguments) == sizeof...(Reals)) struct Same<To (*)(Arguments...), RealTo (*)(Reals...)>
    : std::bool_constant<same_argument<To, RealTo> && (... && same_argument<Arguments, Reals>)> {
};

#define FSDP_NCCL_COMPARE(name, ...) \
  static_assert(Same<FunctionPointer<__VA_ARGS__>::type, decltype(&::name)>::value, #name);
FSDP_NCCL_FUNCTIONS(FSDP_NCCL_COMPARE)
#if NCCL_VERSION_CODE >= 22700
FSDP_NCCL_LATER_FUNCTIONS(FSDP_NCCL_COMPARE)
#endif
#undef FSDP_NCCL_COMPARE

TEST(NcclAbi, DefaultsAreThoseOfTheHeader) {
  ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  Config ours;
  ours.size = theirs.size;
  ours.version = theirs.version;
  // Compares up to the tail padding.
  EXPECT_EQ(std::memcmp(&ours, &theirs, offsetof(ncclConfig_t, splitShare) + sizeof(int)), 0);
  EXPECT_EQ(theirs.magic, ours.magic);
  EXPECT_EQ(theirs.version, static_cast<unsigned>(NCCL_VERSION_CODE));
}

}  // namespace
}  // namespace fsdp::transport::nccl
