// SPDX-License-Identifier: Apache-2.0
// Tests faults of CUDA over the simulated runtime: each call that can fail does so once, GPUs are lost, and devices are
// missing.
#include <atomic>
#include <chrono>
#include <thread>

#include "cuda_everything.h"
#include "device/cuda/driver.h"

namespace fsdp::device {
namespace {

class CudaFaultTest : public CudaTest {};

void use_all(const Options &options = {}, int32_t index = 0) {
  CudaContext context(options, 20000, index);
  use_all(*context.device);
}

// Returns whether a failure of this call is no error: it gives something back, only looks, or has an alternative.
bool may_fail_silently(const std::string &name, uint64_t nth) {
  for (const char *silent : {"cudaFree", "cudaFreeHost", "cudaEventDestroy", "cudaStreamDestroy", "cudaHostUnregister",
                             "cudaThreadExchangeStreamCaptureMode", "cudaGetLastError", "cuMemUnmap",
                             "cuMemAddressFree", "cuDevicePrimaryCtxRelease", "cuCtxPopCurrent", "cudaGetErrorName",
                             "cudaGetErrorString", "cudaStreamIsCapturing", "cudaStreamQuery"})
    if (name == silent) return true;
  struct Trial {
    const char *name;
    uint64_t first, last;
  };
  // These calls of the memory plan try handles for the fabric, files and access by peers.
  for (const Trial &trial :
       {Trial{"cuMemCreate", 1, 3}, Trial{"cuMemRelease", 1, 2}, Trial{"cuDeviceGetAttribute", 4, 4},
        Trial{"cuMemAddressReserve", 1, 1}, Trial{"cuMemMap", 1, 1}, Trial{"cuMemSetAccess", 1, 1}})
    if (name == trial.name && nth >= trial.first && nth <= trial.last) return true;
  return false;
}

// Returns whether destructors make this call. If it fails there, no error is reported.
bool is_asked_by_destructors(const std::string &name) {
  for (const char *call :
       {"cuCtxGetCurrent", "cuCtxPushCurrent", "cudaStreamGetCaptureInfo", "cudaEventRecord", "cuStreamWriteValue32"})
    if (name == call) return true;
  return false;
}

// A thread that is still ending may hold some of it for a moment.
void expect_nothing_left() {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  const auto any = [] {
    return simulated::allocated_bytes() || simulated::pinned_bytes() || simulated::live_handles();
  };
  while (any() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_EQ(0u, simulated::allocated_bytes());
  EXPECT_EQ(0u, simulated::pinned_bytes());
  EXPECT_EQ(0u, simulated::live_handles());
}

void expect_error(const std::string &name, int error, const Failed &failed) {
  // If the first count of GPUs fails, the error always says that there is no GPU to use.
  const bool first_count = name == "cudaGetDeviceCount" && failed.message.find("which GPUs reach") == std::string::npos;
  const auto status = first_count ? FSDP_UNSUPPORTED : cuda::status_of(static_cast<cudaError_t>(error));
  EXPECT_EQ(status, failed.status) << failed.message;
  EXPECT_EQ(FSDP_ORIGIN_CUDA, failed.origin);
  EXPECT_EQ(error, failed.code);
  const std::string call = name == "cudaLaunchKernel" ? "kernel " : name;
  EXPECT_NE(std::string::npos, failed.message.find(call)) << failed.message;
  EXPECT_NE(std::string::npos, failed.message.find(cudaGetErrorName(static_cast<cudaError_t>(error))))
      << failed.message;
}

// ThreadSanitizer makes a round ten times as long, and most rounds have the same threads. So only every seventh round
// runs.
#ifdef __SANITIZE_THREAD__
constexpr uint64_t stride = 7;
#else
constexpr uint64_t stride = 1;
#endif

// Each call of this function fails in turn while the other calls work. Objects are made, used, captured and destroyed
// on a GPU that is not the thread's current one. Nothing hangs, and nothing is left behind.
void fail_each(const std::string &name, int error) {
  for (uint64_t nth = 1; nth < 1000; nth += stride) {
    SCOPED_TRACE(name + " " + std::to_string(nth));
    simulated::set_device_count(2);
    CUDA_OK(cudaSetDevice(1));
    simulated::fail_call(name.c_str(), nth, error);
    const auto since = std::chrono::steady_clock::now();
    const Failed failed = failure_of([] { use_all({}, 0); });
    EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(5));
    expect_nothing_left();
    int current = -1;
    CUDA_OK(cudaGetDevice(&current));
    EXPECT_EQ(1, current);
    if (simulated::calls(name.c_str()) < nth) {
      EXPECT_GT(nth, 1u) << "it is never called";
      EXPECT_EQ(FSDP_OK, failed.status) << failed.message;
      return;
    }
    if (failed.status == FSDP_OK)
      EXPECT_TRUE(may_fail_silently(name, nth) || is_asked_by_destructors(name) ||
                  name == "cudaLaunchKernel");  // the test's own call
    else
      expect_error(name, error, failed);
  }
}

TEST_F(CudaFaultTest, CallsThatPrepare) {
  for (const char *name :
       {"cudaGetDeviceCount", "cudaDeviceGetAttribute", "cudaGetDriverEntryPointByVersion", "cuDeviceGet",
        "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxPushCurrent", "cudaHostRegister",
        "cudaStreamCreateWithPriority", "cudaDeviceGetStreamPriorityRange", "cudaEventCreateWithFlags"})
    fail_each(name, cudaErrorInvalidValue);
}

// A call fails in the destructor of the stream, which then records nothing behind the stream's work. No other wait
// covers that work, because each stream has a queue of its own.
TEST_F(CudaFaultTest, AStreamOfUnknownStateIsWaitedFor) {
  simulated::set_queues(0);
  {
    const OwnStream own;
    CudaContext context;
    auto stream = context.device->create_stream("test");
    auto event = context.device->create_event();
    GpuHeld held(own);
    context.device->caller_stream(own.get()).record(*event);
    stream->wait(*event);
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      held.let_go();
    });
    simulated::fail_call("cuCtxGetCurrent", 1, cudaErrorInvalidValue);
    stream.reset();
    event.reset();
    context.device.reset();
    later.join();
  }
  expect_nothing_left();
}

TEST_F(CudaFaultTest, CallsThatAllocate) {
  for (const char *name :
       {"cudaMalloc", "cudaHostAlloc", "cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"})
    fail_each(name, cudaErrorMemoryAllocation);
}

TEST_F(CudaFaultTest, CallsThatEnqueue) {
  for (const char *name :
       {"cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaLaunchKernel",
        "cuStreamWaitValue32", "cuStreamWriteValue32", "cudaStreamGetCaptureInfo", "cudaPointerGetAttributes"})
    fail_each(name, cudaErrorInvalidValue);
}

TEST_F(CudaFaultTest, CallsThatGiveBack) {
  for (const char *name : {"cudaFree", "cudaFreeHost", "cudaEventDestroy", "cudaStreamDestroy", "cudaHostUnregister",
                           "cuMemUnmap", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"})
    fail_each(name, cudaErrorInvalidValue);
}

// The device tries again later, when these addresses must still belong to this memory.
TEST_F(CudaFaultTest, MemoryThatStaysRegisteredMustStay) {
  std::vector<float> values(1024);
  CudaContext context;
  context.device->register_host(values.data(), 4096);
  simulated::fail_call("cudaHostUnregister", 1, cudaErrorInvalidValue);
  EXPECT_FALSE(context.device->unregister_host(values.data(), 4096));
  EXPECT_TRUE(simulated::is_pinned(values.data()));
}

TEST_F(CudaFaultTest, NothingIsLeftBehind) {
  use_all();
  EXPECT_EQ(0u, simulated::allocated_bytes());
  use_all({.overlap = false});
  use_all({.delay_us = 100, .delay_seed = 1});
  EXPECT_EQ(0u, simulated::allocated_bytes());
  EXPECT_EQ(cudaSuccess, cudaGetLastError());
}

TEST_F(CudaFaultTest, WithoutVirtualMemoryItIsCudaMalloc) {
  simulated::fail_call("cuMemCreate", 0, CUDA_ERROR_NOT_SUPPORTED);
  CudaContext context;
  EXPECT_NE(std::string::npos, context.device->description().find("cudaMalloc, since cuMemCreate failed with"))
      << context.device->description();
  const auto memory = context.device->allocate(1 << 20, "test");
  EXPECT_TRUE(simulated::is_device(memory->data(), 1 << 20));
  EXPECT_GE(simulated::calls("cudaMalloc"), 1u);
}

void expect_described(const std::string &text) {
  const CudaContext context;
  EXPECT_NE(std::string::npos, context.device->description().find(text)) << context.device->description();
  const auto memory = context.device->allocate(1 << 20, "test");
  EXPECT_TRUE(simulated::is_device(memory->data(), 1 << 20));
}

// The GPU reports that it can do this, and only a trial shows that the machine does not allow it.
TEST_F(CudaFaultTest, MemoryHasHandlesForTheFabricWhereThatIsAllowed) {
  expect_described("by cuMemCreate, exportable; not over the fabric, since cuMemCreate failed with");
  simulated::set_fabric(true);
  expect_described("by cuMemCreate, exportable, also over the fabric");
  EXPECT_EQ(simulated::calls("cuMemCreate"), 5u);  // two trials, one trial, and two allocations
}

TEST_F(CudaFaultTest, WhereGpusCannotLetEachOtherInTheyAreAlone) {
  simulated::set_device_count(2);
  simulated::fail_call("cuMemSetAccess", 1, CUDA_ERROR_INVALID_DEVICE);
  expect_described("; for this GPU alone, since cuMemSetAccess failed with cudaErrorInvalidDevice");
}

// The record's word is written by then. A wait for the next record must not end before that record.
TEST_F(CudaFaultTest, ARecordThatCudaRefusesIsWaitedForAllTheSame) {
  CudaContext context;
  const auto first = context.device->create_stream("first"), second = context.device->create_stream("second");
  const auto event = context.device->create_event();
  first->record(*event);
  context.device->synchronize(*event);
  std::atomic<bool> go{false}, came_late{false};
  CUDA_OK(simulated::enqueue(static_cast<cudaStream_t>(first->handle()), [&] {
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }));
  simulated::fail_call("cudaEventRecord", 1, cudaErrorInvalidValue);
  EXPECT_EQ(failure_of([&] { first->record(*event); }).code, cudaErrorInvalidValue);
  EXPECT_FALSE(event->done());
  second->wait(*event);
  CUDA_OK(simulated::enqueue(static_cast<cudaStream_t>(second->handle()), [&] { came_late = go.load(); }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  go = true;
  CUDA_OK(cudaStreamSynchronize(static_cast<cudaStream_t>(second->handle())));
  EXPECT_TRUE(came_late);
}

TEST_F(CudaFaultTest, ALostGpuEndsWaitsAndFailsTheContext) {
  CudaContext context;
  const auto memory = context.device->allocate(4096, "test");
  const auto stream = context.device->create_stream("test");
  const auto event = context.device->create_event();
  simulated::fail_kernel(1, cudaErrorIllegalAddress);
  const Failed failed = failure_of([&] {
    stream->scale(reinterpret_cast<float *>(memory->data()), 2, 1024);
    stream->record(*event);
    context.device->synchronize(*event);
  });
  EXPECT_EQ(FSDP_SYSTEM, failed.status);
  EXPECT_EQ(cudaErrorIllegalAddress, failed.code);
  EXPECT_NE(std::string::npos, failed.message.find("cudaErrorIllegalAddress")) << failed.message;
  EXPECT_NE(std::string::npos, failed.message.find("no more")) << failed.message;
  ASSERT_TRUE(context.failure.failed());
  EXPECT_EQ(cudaErrorIllegalAddress, context.failure.get()->origin_code);
  EXPECT_EQ(FSDP_SYSTEM, failure_of([&] { stream->scale(reinterpret_cast<float *>(memory->data()), 2, 1024); }).status);
}

// A lane's thread also finds the failure if the caller makes no calls.
TEST_F(CudaFaultTest, ALaneFindsALostGpu) {
  CudaContext context;
  const auto memory = context.device->allocate(4096, "test");
  const auto stream = context.device->create_stream("test");
  const auto event = context.device->create_event();
  const auto lane = context.device->create_host_lane("lane");
  simulated::fail_kernel(1, cudaErrorLaunchFailure);
  const Failed failed = failure_of([&] {
    stream->scale(reinterpret_cast<float *>(memory->data()), 2, 1024);
    stream->record(*event);
    lane->wait(*event);
  });
  for (int i = 0; i < 5000 && !context.failure.failed(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(context.failure.failed());
  EXPECT_EQ(cudaErrorLaunchFailure, context.failure.get()->origin_code);
}

TEST_F(CudaFaultTest, AMachineWithoutAGpuIsUnsupported) {
  simulated::set_device_count(0);
  const Failed failed = failure_of([] { CudaContext context; });
  EXPECT_EQ(FSDP_UNSUPPORTED, failed.status);
  EXPECT_EQ(cudaErrorNoDevice, failed.code);
  EXPECT_NE(std::string::npos, failed.message.find("cudaErrorNoDevice")) << failed.message;
  EXPECT_NE(std::string::npos, cuda_at_run_time().find("no GPU")) << cuda_at_run_time();
}

TEST_F(CudaFaultTest, AGpuThatIsNotThere) {
  simulated::set_device_count(2);
  for (const int index : {2, -2}) {
    const Failed failed = failure_of([=] { CudaContext context({}, 1000, index); });
    EXPECT_EQ(FSDP_INVALID_ARGUMENT, failed.status);
    EXPECT_NE(std::string::npos, failed.message.find("[0, 2)")) << failed.message;
  }
  EXPECT_NE(std::string::npos, cuda_at_run_time().find("2 GPUs")) << cuda_at_run_time();
}

TEST_F(CudaFaultTest, TheCurrentGpuOfTheThreadIsTheDefaultAndStaysWhatItWas) {
  simulated::set_device_count(3);
  CUDA_OK(cudaSetDevice(2));
  CudaContext second({}, 1000, 1), own({}, 1000, -1);
  for (const auto &[context, index] : {std::pair{&second, 1}, std::pair{&own, 2}}) {
    const auto memory = context->device->allocate(4096, "test");
    EXPECT_EQ(index, simulated::device_of(memory->data()));
    const auto stream = context->device->create_stream("test");
    const auto event = context->device->create_event();
    stream->scale(reinterpret_cast<float *>(memory->data()), 2, 1024);
    stream->record(*event);
    context->device->synchronize(*event);
    int current = -1;
    CUDA_OK(cudaGetDevice(&current));
    EXPECT_EQ(2, current);
  }
  const auto foreign = own.device->allocate(4096, "test");
  std::vector<float> host(1024);
  EXPECT_EQ(FSDP_INVALID_ARGUMENT, failure_of([&] {
                                     second.device->transfer(host.data(), FSDP_FLOAT32, foreign->data(), FSDP_FLOAT32,
                                                             1024);
                                   }).status);
}

// Ranks are threads, on one GPU and on two.
TEST_F(CudaFaultTest, SeveralThreads) {
  simulated::set_device_count(2);
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&good, i] {
      CudaContext context({.delay_us = 50, .delay_seed = 1}, 20000, i % 2);
      const auto memory = context.device->allocate(4096, "test");
      const auto stream = context.device->create_stream("test");
      const auto event = context.device->create_event();
      for (int round = 0; round < 20; ++round) {
        stream->fill(memory->data(), static_cast<uint8_t>(round), 4096);
        stream->record(*event);
        context.device->caller_stream(nullptr).wait(*event);
      }
      std::vector<float> got(1024);
      context.device->transfer(got.data(), FSDP_FLOAT32, memory->data(), FSDP_FLOAT32, 1024);
      uint32_t bits = 0;
      std::memcpy(&bits, &got[1023], 4);
      good += bits == 0x13131313;
    });
  for (std::thread &thread : threads) thread.join();
  EXPECT_EQ(4, good);
}

TEST_F(CudaFaultTest, TheNthAllocationFails) {
  CudaContext context({.failed_allocation = 2});
  const auto memory = context.device->allocate(100, "one");
  const Failed failed = failure_of([&] { context.device->allocate_host(100, "two"); });
  EXPECT_EQ(FSDP_OUT_OF_MEMORY, failed.status);
}

}  // namespace
}  // namespace fsdp::device
