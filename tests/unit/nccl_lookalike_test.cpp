// SPDX-License-Identifier: Apache-2.0
// Tests the look-alike itself. It notices wrong uses of NCCL, and each knob that makes it stricter has an effect. The
// tests call its functions in ways that no code should.
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <atomic>

#include "../library_threads.h"
#include "nccl_ranks.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;
using nccl::Comm;
using nccl::Config;
using nccl::Result;
using Comms = std::vector<Comm *>;

class LookAlike : public NcclTest {
 protected:
  static constexpr size_t numbers = 8;

  void SetUp() override {
    NcclTest::SetUp();
    control().set(Knob::in_progress_polls, 0);
    library_ = nccl::load_library();
  }
  // The test expects this breach.
  void expect_breach(const char *text) {
    EXPECT_NE(std::string(control().breaches()).find(text), std::string::npos) << control().breaches();
    control().reset();
  }
  const nccl::Library &nccl() const { return *library_; }
  void on(size_t rank, bool share = false) const {
    ASSERT_EQ(cudaSetDevice(share ? 0 : static_cast<int>(rank)), cudaSuccess);
  }
  static Config configured(bool blocking) {
    Config config;
    config.version = Config::latest;
    config.blocking = blocking;
    config.split_share = 1;
    return config;
  }
  // The two ranks are one thread here.
  static Config ordered() {
    Config config = configured(false);
    config.launch_order_implicit = 1;
    return config;
  }
  void await(Comm *comm) const {
    Result state = nccl::in_progress;
    const auto start = std::chrono::steady_clock::now();
    while (state == nccl::in_progress && seconds_since(start) < 10)
      ASSERT_EQ(nccl().ncclCommGetAsyncError(comm, &state), nccl::success);
    EXPECT_EQ(state, nccl::success);
  }
  Comms make(size_t ranks, Config config = configured(false), bool share = false) {
    nccl::UniqueId id{};
    EXPECT_EQ(nccl().ncclGetUniqueId(&id), nccl::success);
    if (share) ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    Comms comms(ranks);
    for (size_t r = 0; r < ranks; ++r) {
      on(r, share);
      (void)nccl().ncclCommInitRankConfig(&comms[r], static_cast<int>(ranks), id, static_cast<int>(r), &config);
    }
    for (Comm *comm : comms) await(comm);
    return comms;
  }
  Comms split(const Comms &parents) {
    Comms children(parents.size());
    Config config = configured(true);
    for (size_t r = 0; r < parents.size(); ++r) (void)nccl().ncclCommSplit(parents[r], 0, 0, &children[r], &config);
    for (Comm *parent : parents) await(parent);
    return children;
  }
  Result gather(Comm *comm, size_t rank) {
    Work &mine = work(rank);
    EXPECT_EQ(nccl().ncclGroupStart(), nccl::success);
    (void)nccl().ncclAllGather(mine.from, mine.to, numbers, nccl::float32, comm, mine.stream);
    return nccl().ncclGroupEnd();
  }
  template <class Function>
  static Function driver(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    EXPECT_EQ(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), cudaSuccess);
    return reinterpret_cast<Function>(function);
  }
  static void *plain_memory() {
    void *memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, Work::bytes), cudaSuccess);
    std::memset(memory, 0, Work::bytes);
    return memory;
  }
  // Allocates memory of the current device until simulated::reset().
  static void *exportable_memory(CUmemAllocationHandleType type) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    EXPECT_EQ(cudaGetDevice(&properties.location.id), cudaSuccess);
    properties.requestedHandleTypes = type;
    CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle{};
    CUdeviceptr memory{};
    EXPECT_EQ(driver<PFN_cuMemCreate_v10020>("cuMemCreate")(&handle, Work::bytes, &properties, 0), CUDA_SUCCESS);
    EXPECT_EQ(driver<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve")(&memory, Work::bytes, 0, 0, 0),
              CUDA_SUCCESS);
    EXPECT_EQ(driver<PFN_cuMemMap_v10020>("cuMemMap")(memory, Work::bytes, 0, handle, 0), CUDA_SUCCESS);
    EXPECT_EQ(driver<PFN_cuMemSetAccess_v10020>("cuMemSetAccess")(memory, Work::bytes, &access, 1), CUDA_SUCCESS);
    std::memset(reinterpret_cast<void *>(memory), 0, Work::bytes);
    return reinterpret_cast<void *>(memory);
  }
  // Holds memory and a stream of the current device.
  struct Work {
    Work() {
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      from = static_cast<float *>(plain_memory());
      to = static_cast<float *>(exportable_memory(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    }
    bool done() const { return cudaStreamQuery(stream) == cudaSuccess; }
    bool done_within(double seconds) const {
      const auto start = std::chrono::steady_clock::now();
      while (!done() && seconds_since(start) < seconds) std::this_thread::sleep_for(1ms);
      return done();
    }
    static constexpr size_t bytes = size_t{2} << 20;
    cudaStream_t stream = nullptr;
    float *from = nullptr, *to = nullptr;
  };
  Work &work(size_t rank) {
    while (works_.size() <= rank) works_.emplace_back();
    if (!works_[rank]) works_[rank] = std::make_unique<Work>();
    return *works_[rank];
  }
  void abort(const Comms &comms) {
    for (Comm *comm : comms) EXPECT_EQ(nccl().ncclCommAbort(comm), nccl::success);
  }
  int64_t alive() const { return control().count(Count::communicators); }

 private:
  std::shared_ptr<const nccl::Library> library_;
  std::vector<std::unique_ptr<Work>> works_;
};

// Both ranks get the error, because slices of a GPU have the same place in the host.
TEST_F(LookAlike, RanksWithOneGpuOrSlicesOfItAreRefused) {
  for (const int slices : {1, 2}) {
    simulated::set_slices(slices);
    nccl::UniqueId id{};
    EXPECT_EQ(nccl().ncclGetUniqueId(&id), nccl::success);
    Config config = configured(false);
    Comms comms(2);
    for (size_t r = 0; r < 2; ++r) {
      on(r, slices == 1);
      (void)nccl().ncclCommInitRankConfig(&comms[r], 2, id, static_cast<int>(r), &config);
    }
    for (Comm *comm : comms) {
      Result result = nccl::success;
      EXPECT_EQ(nccl().ncclCommGetAsyncError(comm, &result), nccl::success);
      EXPECT_EQ(result, nccl::invalid_usage);
      EXPECT_NE(std::string(nccl().ncclGetLastError(comm)).find("Duplicate GPU detected"), std::string::npos);
    }
    for (Comm *comm : comms) EXPECT_EQ(nccl().ncclCommAbort(comm), nccl::success);
  }
}

TEST_F(LookAlike, TheLastRankOfAProcessGivesTheMemoryOfAllBack) {
  for (const bool alone : {false, true}) {
    control().set(Knob::free_alone, alone);
    const Comms comms = make(2);
    abort({comms[0]});
    EXPECT_EQ(alive(), alone ? 1 : 2);
    abort({comms[1]});
    EXPECT_EQ(alive(), 0);
  }
}

TEST_F(LookAlike, ACallOfWhatWasAbortedIsSeen) {
  const Comms comms = make(2);
  abort({comms[0]});
  Result state = nccl::success;
  EXPECT_EQ(nccl().ncclCommGetAsyncError(comms[0], &state), nccl::invalid_argument);
  abort({comms[1]});
  expect_breach("a call with a communicator that has ended");
}

// A graph, or the order of two ranks' aborts, affects more than one rank.
TEST_F(LookAlike, TheLastAbortWaitsForTheGraphsOfAll) {
  const Comms comms = make(2);
  on(0);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(work(0).stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  (void)gather(comms[0], 0);
  await(comms[0]);
  ASSERT_EQ(cudaStreamEndCapture(work(0).stream, &graph), cudaSuccess);
  abort({comms[0]});
  const fsdp::test::OwnThread last([&] { abort({comms[1]}); });
  EXPECT_TRUE(last.waits());
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(LookAlike, MemoryIsDeregisteredOnceAndInTime) {
  for (const bool late : {false, true}) {
    const Comms comms = make(2);
    std::vector<nccl::Window *> windows(2);
    for (size_t r = 0; r < 2; ++r) {
      on(r);
      (void)nccl().ncclCommWindowRegister(comms[r], work(r).to, Work::bytes, &windows[r], nccl::window_symmetric);
    }
    for (Comm *comm : comms) await(comm);
    if (late) abort(comms);
    for (int i = 0; i < 2; ++i)
      EXPECT_EQ(nccl().ncclCommWindowDeregister(comms[0], windows[0]),
                late || i == 1 ? nccl::invalid_argument : nccl::success);
    if (!late) abort(comms);
    expect_breach(late ? "a call with a communicator that has ended" : "memory is deregistered that is not registered");
  }
}

TEST_F(LookAlike, AWindowThatAKernelUsesMayNotGo) {
  const Comms comms = make(2);
  std::vector<nccl::Window *> windows(2);
  for (size_t r = 0; r < 2; ++r) {
    on(r);
    (void)nccl().ncclCommWindowRegister(comms[r], work(r).to, Work::bytes, &windows[r], nccl::window_symmetric);
  }
  for (Comm *comm : comms) await(comm);
  on(0);
  (void)gather(comms[0], 0);
  await(comms[0]);
  while (control().count(Count::running) == 0) std::this_thread::sleep_for(1ms);  // the call waits for its peer
  {
    const fsdp::test::OwnThread early(
        [&] { EXPECT_EQ(nccl().ncclCommWindowDeregister(comms[0], windows[0]), nccl::success); });
    EXPECT_TRUE(early.waits()) << "it does not wait for the GPU";
    abort(comms);
  }
  expect_breach("a window that a kernel uses is deregistered");
}

// The parent's abort ends the split, not the child.
TEST_F(LookAlike, AChildWhoseSplitFailedIsItsCallers) {
  control().set(Knob::hang_split_rank, 2);
  const Comms parents = make(2);
  Comms children(2);
  Config config = configured(true);
  for (size_t r = 0; r < 2; ++r) (void)nccl().ncclCommSplit(parents[r], 0, 0, &children[r], &config);
  EXPECT_EQ(children, Comms(2));
  abort(parents);
  EXPECT_EQ(alive(), 2);
  for (Comm *child : children) ASSERT_NE(child, nullptr);
  abort(children);
  EXPECT_EQ(alive(), 0);
}

TEST_F(LookAlike, FinalizingWaitsForGraphsWhateverIsAborted) {
  const Comms parents = make(2), children = split(parents);
  on(0);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(work(0).stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(gather(children[0], 0), nccl::success);
  ASSERT_EQ(cudaStreamEndCapture(work(0).stream, &graph), cudaSuccess);
  {
    const fsdp::test::OwnThread finalizes([&] { EXPECT_EQ(nccl().ncclCommFinalize(children[0]), nccl::success); });
    EXPECT_TRUE(finalizes.waits());
    abort(parents);
    EXPECT_TRUE(finalizes.waits());
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  abort(children);
}

// Before 2.28 NCCL does not report that the flag was set. Kernels quit, and leave memory as it was.
TEST_F(LookAlike, AnErrorStaysOnNoCommunicatorThatBlocks) {
  for (const int64_t version : {22707, 22807, 23203}) {
    control().set(Knob::version, version);
    control().set(Knob::window_error, 1);
    const Comms parents = make(2), children = split(parents);
    nccl::Window *window = nullptr;
    for (size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(nccl().ncclCommWindowRegister(children[r], work(r).to, Work::bytes, &window, nccl::window_symmetric),
                nccl::unhandled_cuda_error);
      Result state = nccl::in_progress;
      EXPECT_EQ(nccl().ncclCommGetAsyncError(children[r], &state), nccl::success);
      EXPECT_EQ(state, nccl::success);
    }
    for (size_t r = 0; r < 2; ++r) {
      on(r);
      work(r).from[0] = 5;
      work(r).to[numbers] = 0;
      EXPECT_EQ(gather(children[r], r), nccl::success);
    }
    for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(work(r).done_within(5));
    EXPECT_EQ(work(0).to[numbers], version < 22800 ? 0 : 5) << version;
    abort(parents);
    abort(children);
  }
}

TEST_F(LookAlike, ItsVariablesAreStrongerThanAConfiguration) {
  for (const auto &[name, value] : {std::pair{"NCCL_MIN_CTAS", "7"}, std::pair{"NCCL_MAX_CTAS", "5"},
                                    std::pair{"NCCL_CGA_CLUSTER_SIZE", "99"}, std::pair{"NCCL_NVLS_NCHANNELS", "3"}})
    ::setenv(name, value, 1);
  Config config = configured(false);
  config.min_ctas = 9;
  config.max_ctas = 10;
  config.cga_cluster_size = 1;
  abort(make(2, config));
  EXPECT_EQ(control().count(Count::min_ctas), 5);
  EXPECT_EQ(control().count(Count::max_ctas), 5);
  EXPECT_EQ(control().count(Count::cga_cluster_size), 8);
  EXPECT_EQ(control().count(Count::nvls_ctas), 3);
  for (const char *name : {"NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CGA_CLUSTER_SIZE", "NCCL_NVLS_NCHANNELS"})
    ::unsetenv(name);
  control().reset();
  ::setenv("NCCL_COMM_BLOCKING", "1", 1);
  abort(make(1));
  expect_breach("a communicator that blocks is made");
}

// NCCL reads a variable once.
TEST_F(LookAlike, AVariableThatIsSetLateChangesNothing) {
  abort(make(1));
  ::setenv("NCCL_MAX_CTAS", "5", 1);
  abort(make(1));
  EXPECT_EQ(control().count(Count::max_ctas), nccl::undefined);
  ::unsetenv("NCCL_MAX_CTAS");
}

TEST_F(LookAlike, AKernelThatFindsNoRoomDoesNotStart) {
  control().set(Knob::multiprocessors, 47);  // two kernels have 24 blocks each
  const Comms comms = make(2, ordered(), true);
  on(0, true);
  for (size_t r = 0; r < 2; ++r) (void)gather(comms[r], r);
  for (Comm *comm : comms) await(comm);
  EXPECT_FALSE(work(0).done_within(0.1) || work(1).done_within(0.1));
  control().set(Knob::multiprocessors, 48);
  EXPECT_TRUE(work(0).done_within(5) && work(1).done_within(5));
  control().set(Knob::multiprocessors, 1);
  for (size_t r = 0; r < 2; ++r) (void)gather(comms[r], r);
  for (Comm *comm : comms) await(comm);
  EXPECT_FALSE(work(0).done_within(0.1));
  control().set(Knob::endless_room, 1);
  EXPECT_TRUE(work(0).done_within(5) && work(1).done_within(5));
  abort(comms);
}

TEST_F(LookAlike, FewerBlocksFindRoom) {
  control().set(Knob::multiprocessors, 47);
  Config config = ordered();
  config.max_ctas = 16;
  const Comms comms = make(2, config, true);
  on(0, true);
  for (size_t r = 0; r < 2; ++r) (void)gather(comms[r], r);
  for (Comm *comm : comms) await(comm);
  EXPECT_TRUE(work(0).done_within(5) && work(1).done_within(5));
  abort(comms);
}

// A communicator that does not block launches on NCCL's thread, so the calling thread goes on while the stream's queue
// is full.
TEST_F(LookAlike, LaunchesAreMadeByAThreadOfNccls) {
  const Comms comms = make(2);
  on(0);
  control().set(Knob::launch_on_caller, 1);
  EXPECT_EQ(gather(comms[0], 0), nccl::success);
  control().set(Knob::launch_on_caller, 0);
  for (int i = 1; i < 1024; ++i) EXPECT_EQ(cudaMemsetAsync(work(0).from, 0, 4, work(0).stream), cudaSuccess);
  EXPECT_EQ(gather(comms[0], 0), nccl::in_progress);
  Result state = nccl::success;
  EXPECT_EQ(nccl().ncclCommGetAsyncError(comms[0], &state), nccl::success);
  EXPECT_EQ(state, nccl::in_progress);
  abort(comms);
}

// NCCL makes no window of memory that peers cannot map.
TEST_F(LookAlike, AWindowIsOfMemoryThatCanBeExported) {
  const Comms parents = make(2), children = split(parents);
  on(0);
  for (void *memory : {plain_memory(), exportable_memory(CU_MEM_HANDLE_TYPE_NONE)}) {
    nccl::Window *window = nullptr;
    EXPECT_EQ(nccl().ncclCommWindowRegister(children[0], memory, Work::bytes, &window, nccl::window_symmetric),
              nccl::unhandled_cuda_error);
  }
  control().set(Knob::any_windows, 1);
  std::vector<nccl::Window *> windows(2);
  std::thread peer([&] {
    on(1);
    EXPECT_EQ(
        nccl().ncclCommWindowRegister(children[1], plain_memory(), Work::bytes, &windows[1], nccl::window_symmetric),
        nccl::success);
  });
  EXPECT_EQ(
      nccl().ncclCommWindowRegister(children[0], plain_memory(), Work::bytes, &windows[0], nccl::window_symmetric),
      nccl::success);
  peer.join();
  abort(parents);
  abort(children);
}

TEST_F(LookAlike, ARankThatIsAloneHasNoKernels) {
  for (const bool kernels : {false, true}) {
    control().set(Knob::lone_kernels, kernels);
    const uint64_t before = simulated::calls("cudaLaunchHostFunc");
    const Comms comms = make(1);
    on(0);
    (void)gather(comms[0], 0);
    await(comms[0]);
    EXPECT_TRUE(work(0).done_within(5));
    EXPECT_EQ(simulated::calls("cudaLaunchHostFunc") - before, kernels ? 1U : 0U);
    abort(comms);
  }
}

TEST_F(LookAlike, LargeGathersOverWindowsTakeCopyEngines) {
  ::setenv("NCCL_SYM_CE_THRESHOLD", "4", 1);
  simulated::set_compute_capability(10);
  for (const bool by_policy : {false, true}) {
    control().reset();
    control().set(Knob::copies_by_policy, by_policy);
    const Comms comms = make(2);
    std::vector<nccl::Window *> windows(2);
    for (size_t r = 0; r < 2; ++r) {
      on(r);
      (void)nccl().ncclCommWindowRegister(comms[r], work(r).to, Work::bytes, &windows[r], nccl::window_symmetric);
    }
    for (Comm *comm : comms) await(comm);
    for (size_t r = 0; r < 2; ++r) (void)gather(comms[r], r);
    for (Comm *comm : comms) await(comm);
    EXPECT_TRUE(work(0).done_within(5) && work(1).done_within(5));
    EXPECT_EQ(control().count(Count::copy_engine_gathers), by_policy ? 0 : 2);
    abort(comms);
  }
}

// (2^24 + 1) + 1 is 2^24 in fp32, and 2^24 + (1 + 1) is not.
TEST_F(LookAlike, SumsGoAroundARing) {
  for (const bool in_rank_order : {false, true}) {
    control().set(Knob::rank_order_sums, in_rank_order);
    const Comms comms = make(3);
    for (size_t r = 0; r < 3; ++r) {
      on(r);
      for (size_t i = 0; i < 3; ++i) work(r).from[i] = r == 1 ? 16777216.0F : 1.0F;
      (void)nccl().ncclReduceScatter(work(r).from, work(r).to, 1, nccl::float32, nccl::addition, comms[r],
                                     work(r).stream);
    }
    for (Comm *comm : comms) await(comm);
    for (size_t r = 0; r < 3; ++r) EXPECT_TRUE(work(r).done_within(5));
    EXPECT_EQ(work(0).to[0], 16777216.0F);
    EXPECT_EQ(work(1).to[0], in_rank_order ? 16777216.0F : 16777218.0F);
    abort(comms);
  }
}

}  // namespace
}  // namespace fsdp::transport::test
