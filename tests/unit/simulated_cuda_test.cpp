// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime over host threads does what the tests on it rely on: streams, events, memory, failures.
#include "simulated_cuda/simulated.h"

#include <cuda.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using simulated::enqueue;
using simulated::Hold;

#define EXPECT_CUDA(error, call) EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(call))
#define ASSERT_CUDA(call) ASSERT_STREQ("cudaSuccess", cudaGetErrorName(call))

class SimulatedCuda : public testing::Test {
 protected:
  void SetUp() override { simulated::reset(); }
  void TearDown() override { simulated::reset(); }

  static cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t created = nullptr;
    EXPECT_CUDA(cudaSuccess, cudaStreamCreateWithFlags(&created, flags));
    return created;
  }
  static cudaEvent_t event(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t created = nullptr;
    EXPECT_CUDA(cudaSuccess, cudaEventCreateWithFlags(&created, flags));
    return created;
  }
  static int *device_ints(size_t count) {
    void *pointer = nullptr;
    EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, count * sizeof(int)));
    return static_cast<int *>(pointer);
  }
  static int *pinned_ints(size_t count) {
    void *pointer = nullptr;
    EXPECT_CUDA(cudaSuccess, cudaHostAlloc(&pointer, count * sizeof(int), cudaHostAllocPortable));
    std::memset(pointer, 0, count * sizeof(int));
    return static_cast<int *>(pointer);
  }
};

// Has the stream still something to do a good while later?
bool stays_busy(cudaStream_t stream) {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  return cudaStreamQuery(stream) == cudaErrorNotReady;
}

TEST_F(SimulatedCuda, StreamsWorkLaterAndInOrder) {
  const cudaStream_t s = stream();
  std::vector<int> order;
  {
    const Hold hold;
    for (int i = 0; i < 3; ++i) EXPECT_CUDA(cudaSuccess, enqueue(s, [&order, i] { order.push_back(i); }));
    EXPECT_TRUE(stays_busy(s));
  }
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(s));
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_CUDA(cudaSuccess, cudaStreamQuery(s));
  EXPECT_EQ(simulated::kernels(), 3u);
}

TEST_F(SimulatedCuda, PinnedCopiesAreLateInBothDirections) {
  const cudaStream_t s = stream();
  int *device = device_ints(1), *from = pinned_ints(1), *to = pinned_ints(1);
  {
    const Hold hold;
    *from = 1;
    EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(device, from, sizeof(int), cudaMemcpyHostToDevice, s));
    EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(to, device, sizeof(int), cudaMemcpyDefault, s));
    *from = 2;  // too early: the copy sees it
    EXPECT_EQ(*to, 0);
  }
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(s));
  EXPECT_EQ(*to, 2);
  EXPECT_EQ(simulated::pageable_copies(), 0u);
}

TEST_F(SimulatedCuda, PageableSourcesAreReadBeforeTheCallReturnsAndArriveLater) {
  const cudaStream_t s = stream();
  int *device = device_ints(1), *to = pinned_ints(1);
  int from = 1;
  {
    const Hold hold;
    EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(device, &from, sizeof(int), cudaMemcpyHostToDevice, s));
    from = 2;
    EXPECT_CUDA(cudaErrorNotReady, cudaStreamQuery(s));
  }
  EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(to, device, sizeof(int), cudaMemcpyDeviceToHost, s));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(s));
  EXPECT_EQ(*to, 1);
  EXPECT_EQ(simulated::pageable_copies(), 1u);
}

TEST_F(SimulatedCuda, CopiesToPageableMemoryReturnWhenTheyAreDone) {
  const cudaStream_t s = stream();
  int *device = device_ints(1);
  simulated::set_delay(20000, 1);
  EXPECT_CUDA(cudaSuccess, enqueue(s, [device] { *device = 7; }));
  int to = 0;
  EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(&to, device, sizeof(int), cudaMemcpyDeviceToHost, s));
  EXPECT_EQ(to, 7);
}

TEST_F(SimulatedCuda, EventsWaitForWhatWasRecordedAtTheTimeOfTheCall) {
  const cudaStream_t first = stream(), second = stream(), third = stream();
  const cudaEvent_t e = event();
  std::atomic<int> done{0};
  const Hold hold;
  EXPECT_CUDA(cudaSuccess, cudaEventQuery(e));  // never recorded
  EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(second, e, 0));
  EXPECT_CUDA(cudaSuccess, cudaStreamQuery(second));
  EXPECT_CUDA(cudaSuccess, enqueue(first, [&] { ++done; }));
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(e, first));
  EXPECT_CUDA(cudaErrorNotReady, cudaEventQuery(e));
  EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(second, e, 0));
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(e, third));  // the wait above keeps the former state
  EXPECT_CUDA(cudaErrorNotReady, cudaStreamQuery(second));
}

TEST_F(SimulatedCuda, WaitsOrderStreams) {
  simulated::set_delay(300, 5);
  const cudaStream_t first = stream(), second = stream();
  const cudaEvent_t e = event();
  int *value = device_ints(1);
  int wrong = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_CUDA(cudaSuccess, enqueue(first, [value, i] { *value = i; }));
    EXPECT_CUDA(cudaSuccess, cudaEventRecord(e, first));
    EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(second, e, 0));
    EXPECT_CUDA(cudaSuccess, enqueue(second, [value, i, &wrong] { wrong += *value != i; }));
    EXPECT_CUDA(cudaSuccess, cudaEventRecord(e, second));
    EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(first, e, 0));
  }
  EXPECT_CUDA(cudaSuccess, cudaEventSynchronize(e));
  EXPECT_EQ(wrong, 0);
}

TEST_F(SimulatedCuda, TimedEventsTellTheTimeBetweenThem) {
  const cudaStream_t s = stream();
  const cudaEvent_t start = event(cudaEventDefault), end = event(cudaEventDefault), untimed = event();
  float ms = 0;
  EXPECT_CUDA(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, start, end));
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(start, s));
  EXPECT_CUDA(cudaSuccess, enqueue(s, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }));
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(end, s));
  EXPECT_CUDA(cudaErrorNotReady, cudaEventElapsedTime(&ms, start, end));
  EXPECT_CUDA(cudaSuccess, cudaEventSynchronize(end));
  EXPECT_CUDA(cudaSuccess, cudaEventElapsedTime(&ms, start, end));
  EXPECT_GE(ms, 20);
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(untimed, s));
  EXPECT_CUDA(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, start, untimed));
}

TEST_F(SimulatedCuda, TheLegacyStreamAndBlockingStreamsWaitForEachOther) {
  const cudaStream_t blocking = stream(cudaStreamDefault), free = stream();
  std::vector<int> order;
  std::atomic<bool> go{false};
  EXPECT_CUDA(cudaSuccess, enqueue(blocking, [&] {
                while (!go) std::this_thread::yield();
                order.push_back(1);
              }));
  EXPECT_CUDA(cudaSuccess, enqueue(nullptr, [&] { order.push_back(2); }));
  EXPECT_CUDA(cudaSuccess, enqueue(blocking, [&] { order.push_back(3); }));
  EXPECT_CUDA(cudaSuccess, enqueue(cudaStreamPerThread, [&] { order.push_back(4); }));
  EXPECT_CUDA(cudaSuccess, enqueue(free, [] {}));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(free));  // does not wait for the others
  EXPECT_TRUE(stays_busy(nullptr));
  EXPECT_TRUE(stays_busy(cudaStreamPerThread));
  go = true;
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(cudaStreamPerThread));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(nullptr));
  EXPECT_EQ(std::vector<int>(order.begin(), order.begin() + 2), (std::vector<int>{1, 2}));
  EXPECT_EQ(order.size(), 4u);
}

TEST_F(SimulatedCuda, DestroyedStreamsFinishTheirWork) {
  const cudaStream_t s = stream();
  const cudaEvent_t e = event();
  std::atomic<bool> done{false};
  {
    const Hold hold;
    EXPECT_CUDA(cudaSuccess, enqueue(s, [&] { done = true; }));
    EXPECT_CUDA(cudaSuccess, cudaEventRecord(e, s));
    EXPECT_CUDA(cudaSuccess, cudaStreamDestroy(s));
    EXPECT_FALSE(done);
  }
  EXPECT_CUDA(cudaErrorInvalidResourceHandle, cudaStreamSynchronize(s));
  EXPECT_CUDA(cudaSuccess, cudaEventSynchronize(e));
  EXPECT_TRUE(done);
}

TEST_F(SimulatedCuda, HostFunctionsMayNotCallCuda) {
  const cudaStream_t s = stream();
  cudaError_t inside = cudaSuccess;
  const auto function = [](void *result) { *static_cast<cudaError_t *>(result) = cudaFree(nullptr); };
  EXPECT_CUDA(cudaSuccess, cudaLaunchHostFunc(s, function, &inside));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(s));
  EXPECT_CUDA(cudaErrorNotPermitted, inside);
}

TEST_F(SimulatedCuda, MemoryIsWhatItsAddressSays) {
  int *device = device_ints(4), *pinned = pinned_ints(4);
  std::vector<int> plain(1024), registered(1024);
  EXPECT_CUDA(cudaSuccess, cudaHostRegister(registered.data(), 4096, cudaHostRegisterPortable));
  EXPECT_CUDA(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(registered.data() + 1, 8, 0));
  cudaPointerAttributes attributes{};
  const auto type_of = [&](const void *pointer) {
    EXPECT_CUDA(cudaSuccess, cudaPointerGetAttributes(&attributes, pointer));
    return attributes.type;
  };
  EXPECT_EQ(type_of(device + 3), cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(type_of(pinned), cudaMemoryTypeHost);
  EXPECT_EQ(type_of(registered.data()), cudaMemoryTypeHost);
  EXPECT_EQ(type_of(plain.data()), cudaMemoryTypeUnregistered);
  EXPECT_TRUE(simulated::is_device(device, 16));
  EXPECT_FALSE(simulated::is_device(device, 17));
  EXPECT_TRUE(simulated::is_pinned(registered.data(), 4096));
  EXPECT_CUDA(cudaSuccess, cudaHostUnregister(registered.data()));
  EXPECT_CUDA(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(registered.data()));
  EXPECT_FALSE(simulated::is_pinned(registered.data()));
}

TEST_F(SimulatedCuda, CopiesOutsideOfMemoryAreRefused) {
  const cudaStream_t s = stream();
  int *device = device_ints(4), *pinned = pinned_ints(8);
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemcpyAsync(device, pinned, 20, cudaMemcpyHostToDevice, s));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemcpyAsync(device, pinned + 6, 16, cudaMemcpyHostToDevice, s));
  EXPECT_CUDA(cudaErrorInvalidMemcpyDirection, cudaMemcpyAsync(pinned, device, 4, cudaMemcpyHostToHost, s));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemsetAsync(device + 1, 0, 16, s));
  EXPECT_CUDA(cudaSuccess, cudaFree(device));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemcpyAsync(device, pinned, 4, cudaMemcpyDefault, s));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaFree(device));
}

TEST_F(SimulatedCuda, StrictlyAFreeUnderACopyIsAnIllegalAccess) {
  simulated::set_strict(true);
  const cudaStream_t s = stream();
  int *device = device_ints(4), *pinned = pinned_ints(4);
  {
    const Hold hold;
    EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(device, pinned, 16, cudaMemcpyHostToDevice, s));
    EXPECT_CUDA(cudaSuccess, cudaFree(device));
  }
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaStreamSynchronize(s));
}

TEST_F(SimulatedCuda, MemoryEnds) {
  simulated::set_device_memory(4096);
  int *first = device_ints(1000);
  void *second = nullptr;
  EXPECT_CUDA(cudaErrorMemoryAllocation, cudaMalloc(&second, 1000));
  EXPECT_CUDA(cudaErrorMemoryAllocation, cudaGetLastError());
  EXPECT_CUDA(cudaSuccess, cudaGetLastError());  // not a failure of the device
  EXPECT_EQ(simulated::allocated_bytes(), 4000u);
  EXPECT_CUDA(cudaSuccess, cudaFree(first));
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&second, 1000));
  size_t free_bytes = 0, total = 0;
  EXPECT_CUDA(cudaSuccess, cudaMemGetInfo(&free_bytes, &total));
  EXPECT_EQ(free_bytes, 3096u);
  EXPECT_EQ(total, 4096u);
}

TEST_F(SimulatedCuda, PlannedCallsFailOnce) {
  simulated::fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
  void *pointer = nullptr;
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaErrorMemoryAllocation, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
  EXPECT_EQ(simulated::calls("cudaMalloc"), 3u);
  simulated::reset_calls();
  EXPECT_EQ(simulated::calls("cudaMalloc"), 0u);
}

TEST_F(SimulatedCuda, AFailedKernelFailsTheDeviceForGood) {
  simulated::set_device_count(2);
  const cudaStream_t s = stream();
  std::atomic<int> ran{0};
  simulated::fail_kernel(2, cudaErrorIllegalAddress);
  for (int i = 0; i < 3; ++i) EXPECT_CUDA(cudaSuccess, enqueue(s, [&] { ++ran; }));
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaStreamSynchronize(s));
  EXPECT_EQ(ran, 1);
  void *pointer = nullptr;
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaGetLastError());
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaGetLastError());
  EXPECT_CUDA(cudaErrorIllegalAddress, enqueue(s, [] {}));
  EXPECT_CUDA(cudaSuccess, cudaSetDevice(1));  // the other one works on
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
}

TEST_F(SimulatedCuda, DevicesAreApart) {
  simulated::set_device_count(2);
  const cudaStream_t of_0 = stream();
  const cudaEvent_t event_of_0 = event();
  int *ints_of_0 = device_ints(1);
  std::thread([&] {
    int device = -1;
    EXPECT_CUDA(cudaSuccess, cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
    EXPECT_CUDA(cudaSuccess, cudaSetDevice(1));
    EXPECT_EQ(simulated::device_of(device_ints(1)), 1);
    EXPECT_EQ(simulated::device_of(ints_of_0), 0);
    EXPECT_CUDA(cudaErrorInvalidResourceHandle, enqueue(of_0, [] {}));
    const cudaStream_t of_1 = stream();
    EXPECT_CUDA(cudaErrorInvalidResourceHandle, cudaEventRecord(event_of_0, of_1));
    EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(of_1, event_of_0, 0));
    EXPECT_CUDA(cudaErrorInvalidDevice, cudaSetDevice(2));
  }).join();
  int device = -1;
  EXPECT_CUDA(cudaSuccess, cudaGetDevice(&device));
  EXPECT_EQ(device, 0);
}

TEST_F(SimulatedCuda, WithoutADeviceCallsSaySo) {
  simulated::set_device_count(0);
  int count = -1;
  void *pointer = nullptr;
  EXPECT_CUDA(cudaErrorNoDevice, cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 0);
  EXPECT_CUDA(cudaErrorNoDevice, cudaMalloc(&pointer, 8));
}

TEST_F(SimulatedCuda, AForkedChildHasNoCuda) {
  device_ints(1);
  const pid_t child = fork();
  if (child == 0) {
    void *pointer = nullptr;
    _exit(cudaMalloc(&pointer, 8) == cudaErrorInitializationError ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
