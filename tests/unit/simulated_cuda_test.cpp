// SPDX-License-Identifier: Apache-2.0
// Tests streams, copies and events of the CUDA runtime over host threads, as far as other tests rely on them.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "simulated_cuda_fixture.h"

namespace {

using simulated::enqueue;
using simulated::Hold;

// ThreadSanitizer reports accesses that the test makes too early, as it does in the library.
#ifdef __SANITIZE_THREAD__
constexpr bool races_allowed = false;
#else
constexpr bool races_allowed = true;
#endif

// Returns whether the stream reaches a wait while it has something to do.
bool stays_busy(cudaStream_t stream) {
  while (!simulated::waits(stream) && cudaStreamQuery(stream) == cudaErrorNotReady)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
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
    EXPECT_CUDA(cudaErrorNotReady, cudaStreamQuery(s));
    if (races_allowed) *from = 2;  // too early: the copy sees it
    EXPECT_TRUE(!races_allowed || *to == 0);
  }
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(s));
  EXPECT_EQ(*to, races_allowed ? 2 : 1);
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
  const Hold hold;
  EXPECT_CUDA(cudaSuccess, cudaEventQuery(e));  // never recorded
  EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(second, e, 0));
  EXPECT_CUDA(cudaSuccess, cudaStreamQuery(second));
  EXPECT_CUDA(cudaSuccess, enqueue(first, [] {}));
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
  {
    const Hold hold;
    EXPECT_CUDA(cudaSuccess, cudaEventRecord(start, s));
    EXPECT_CUDA(cudaSuccess, enqueue(s, [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }));
    EXPECT_CUDA(cudaSuccess, cudaEventRecord(end, s));
    EXPECT_CUDA(cudaErrorNotReady, cudaEventElapsedTime(&ms, start, end));
  }
  EXPECT_CUDA(cudaSuccess, cudaEventSynchronize(end));
  EXPECT_CUDA(cudaSuccess, cudaEventElapsedTime(&ms, start, end));
  EXPECT_GE(ms, 20);
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(untimed, s));
  EXPECT_CUDA(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, start, untimed));
}

TEST_F(SimulatedCuda, TheLegacyStreamAndBlockingStreamsWaitForEachOther) {
  const cudaStream_t blocking = stream(cudaStreamDefault), free = stream();
  std::vector<int> order;
  bool per_thread_done = false;
  std::atomic<bool> go{false};
  EXPECT_CUDA(cudaSuccess, enqueue(blocking, [&] {
                while (!go) std::this_thread::yield();
                order.push_back(1);
              }));
  EXPECT_CUDA(cudaSuccess, enqueue(nullptr, [&] { order.push_back(2); }));
  EXPECT_CUDA(cudaSuccess, enqueue(blocking, [&] { order.push_back(3); }));
  EXPECT_CUDA(cudaSuccess, enqueue(cudaStreamPerThread, [&] { per_thread_done = true; }));
  EXPECT_CUDA(cudaSuccess, enqueue(free, [] {}));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(free));  // does not wait for the others
  EXPECT_TRUE(stays_busy(nullptr));
  EXPECT_TRUE(stays_busy(cudaStreamPerThread));
  go = true;
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(cudaStreamPerThread));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(nullptr));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  EXPECT_TRUE(per_thread_done);
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

}  // namespace
