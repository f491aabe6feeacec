// SPDX-License-Identifier: Apache-2.0
// Tests capture and graphs of the CUDA runtime over host threads: the errors for operations that capture forbids, and
// the effect of a replay.
#include <cuda.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "simulated_cuda/simulated.h"

namespace {

using simulated::enqueue;
using simulated::Hold;

#define EXPECT_CUDA(error, call) EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(call))

class SimulatedCapture : public testing::Test {
 protected:
  void SetUp() override {
    simulated::reset();
    main_ = stream();
    side_ = stream();
    EXPECT_CUDA(cudaSuccess, cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    EXPECT_CUDA(cudaSuccess, cudaMalloc(reinterpret_cast<void **>(&value_), sizeof(int)));
    EXPECT_CUDA(cudaSuccess, cudaHostAlloc(reinterpret_cast<void **>(&pinned_), sizeof(int), 0));
    *value_ = *pinned_ = 0;
  }
  void TearDown() override { simulated::reset(); }

  static cudaStream_t stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t created = nullptr;
    EXPECT_CUDA(cudaSuccess, cudaStreamCreateWithFlags(&created, flags));
    return created;
  }
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    EXPECT_CUDA(cudaSuccess, cudaStreamBeginCapture(main_, mode));
  }
  cudaError_t end() { return cudaStreamEndCapture(main_, &graph_); }
  static cudaStreamCaptureStatus status(cudaStream_t stream) {
    cudaStreamCaptureStatus status{};
    EXPECT_CUDA(cudaSuccess, cudaStreamIsCapturing(stream, &status));
    return status;
  }
  void order(cudaStream_t first, cudaStream_t second) {
    EXPECT_CUDA(cudaSuccess, cudaEventRecord(event_, first));
    EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(second, event_, 0));
  }
  void expect_invalidated() {
    EXPECT_EQ(status(main_), cudaStreamCaptureStatusInvalidated);
    EXPECT_CUDA(cudaErrorStreamCaptureInvalidated, enqueue(main_, [] {}));
    EXPECT_CUDA(cudaErrorStreamCaptureInvalidated, end());
    EXPECT_EQ(graph_, nullptr);
    EXPECT_EQ(status(main_), cudaStreamCaptureStatusNone);
  }
  size_t nodes() const {
    size_t count = 0;
    EXPECT_CUDA(cudaSuccess, cudaGraphGetNodes(graph_, nullptr, &count));
    return count;
  }

  cudaStream_t main_ = nullptr, side_ = nullptr;
  cudaEvent_t event_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  int *value_ = nullptr, *pinned_ = nullptr;
};

TEST_F(SimulatedCapture, RecordsAndReplays) {
  int *value = value_;
  begin();
  EXPECT_EQ(status(main_), cudaStreamCaptureStatusActive);
  EXPECT_CUDA(cudaSuccess, enqueue(main_, [value] { ++*value; }));
  EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(pinned_, value_, sizeof(int), cudaMemcpyDeviceToHost, main_));
  EXPECT_CUDA(cudaSuccess, end());
  EXPECT_EQ(status(main_), cudaStreamCaptureStatusNone);
  EXPECT_EQ(nodes(), 2u);
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(main_));
  EXPECT_EQ(*value_, 0);  // nothing ran
  cudaGraphExec_t exec = nullptr;
  EXPECT_CUDA(cudaSuccess, cudaGraphInstantiate(&exec, graph_, 0));
  EXPECT_CUDA(cudaSuccess, cudaGraphDestroy(graph_));
  for (int i = 0; i < 3; ++i) EXPECT_CUDA(cudaSuccess, cudaGraphLaunch(exec, side_));
  EXPECT_CUDA(cudaSuccess, cudaGraphExecDestroy(exec));  // the launched graph still runs
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(side_));
  EXPECT_EQ(*pinned_, 3);
}

TEST_F(SimulatedCapture, AReplayHoldsTheRecordedOrderAcrossStreams) {
  int *value = value_;
  begin();
  for (int i = 0; i < 4; ++i) {
    EXPECT_CUDA(cudaSuccess, enqueue(main_, [value] { *value = *value * 2 + 1; }));
    order(main_, side_);
    EXPECT_CUDA(cudaSuccess, enqueue(side_, [value] { *value = *value * 3; }));
    order(side_, main_);
  }
  EXPECT_CUDA(cudaSuccess, end());
  cudaGraphExec_t exec = nullptr;
  EXPECT_CUDA(cudaSuccess, cudaGraphInstantiate(&exec, graph_, 0));
  int expected = 0;
  for (int i = 0; i < 4; ++i) expected = (expected * 2 + 1) * 3;
  simulated::set_delay(300, 11);
  for (int replay = 0; replay < 20; ++replay) {
    EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(value_, 0, sizeof(int), main_));
    EXPECT_CUDA(cudaSuccess, cudaGraphLaunch(exec, main_));
    EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(pinned_, value_, sizeof(int), cudaMemcpyDeviceToHost, main_));
    EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(main_));
    ASSERT_EQ(*pinned_, expected);
  }
}

// Branches without an edge between them run at the same time, so one may wait for the other.
TEST_F(SimulatedCapture, AReplayRunsBranchesTogether) {
  auto *flag = reinterpret_cast<std::atomic<int> *>(value_);
  begin();
  order(main_, side_);
  EXPECT_CUDA(cudaSuccess, enqueue(main_, [flag] {
                while (flag->load() == 0) std::this_thread::yield();
              }));
  EXPECT_CUDA(cudaSuccess, enqueue(side_, [flag] { flag->store(1); }));
  order(side_, main_);
  EXPECT_CUDA(cudaSuccess, end());
  cudaGraphExec_t exec = nullptr;
  EXPECT_CUDA(cudaSuccess, cudaGraphInstantiate(&exec, graph_, 0));
  EXPECT_CUDA(cudaSuccess, cudaGraphLaunch(exec, main_));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(main_));
}

TEST_F(SimulatedCapture, ForksMustBeJoined) {
  begin();
  EXPECT_CUDA(cudaSuccess, enqueue(main_, [] {}));
  order(main_, side_);
  EXPECT_EQ(status(side_), cudaStreamCaptureStatusActive);
  EXPECT_CUDA(cudaSuccess, enqueue(side_, [] {}));
  EXPECT_CUDA(cudaErrorStreamCaptureUnjoined, end());
  EXPECT_EQ(status(side_), cudaStreamCaptureStatusNone);
}

TEST_F(SimulatedCapture, AForkWithoutWorkNeedsNoJoin) {
  begin();
  EXPECT_CUDA(cudaSuccess, enqueue(main_, [] {}));
  order(main_, side_);
  EXPECT_CUDA(cudaSuccess, end());
}

TEST_F(SimulatedCapture, WaitingForWorkOutsideIsRefused) {
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(event_, side_));
  begin();
  EXPECT_CUDA(cudaErrorStreamCaptureIsolation, cudaStreamWaitEvent(main_, event_, 0));
  expect_invalidated();
}

TEST_F(SimulatedCapture, CapturesDoNotMerge) {
  begin();
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(event_, main_));
  EXPECT_CUDA(cudaSuccess, cudaStreamBeginCapture(side_, cudaStreamCaptureModeGlobal));
  EXPECT_CUDA(cudaErrorStreamCaptureMerge, cudaStreamWaitEvent(side_, event_, 0));
  EXPECT_EQ(status(side_), cudaStreamCaptureStatusInvalidated);
  expect_invalidated();
}

TEST_F(SimulatedCapture, ACapturingStreamIsNotWaitedFor) {
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(main_));
  expect_invalidated();
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaStreamQuery(main_));
  expect_invalidated();
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaDeviceSynchronize());
  expect_invalidated();
}

TEST_F(SimulatedCapture, ACapturedEventIsNotQueried) {
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(event_, main_));
  EXPECT_CUDA(cudaErrorCapturedEvent, cudaEventQuery(event_));
  expect_invalidated();
  EXPECT_CUDA(cudaErrorCapturedEvent, cudaEventSynchronize(event_));  // stays so until it is recorded again
  EXPECT_CUDA(cudaSuccess, cudaEventRecord(event_, main_));
  EXPECT_CUDA(cudaSuccess, cudaEventSynchronize(event_));
}

TEST_F(SimulatedCapture, ModesDecideWhoseUnsafeCallsAreRefused) {
  void *pointer = nullptr;
  const auto elsewhere = [&] {
    cudaError_t result = cudaSuccess;
    std::thread([&] { result = cudaMalloc(&pointer, 8); }).join();
    return result;
  };
  begin(cudaStreamCaptureModeRelaxed);
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaSuccess, end());
  begin(cudaStreamCaptureModeThreadLocal);
  EXPECT_CUDA(cudaSuccess, elsewhere());
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaMalloc(&pointer, 8));
  expect_invalidated();
  begin(cudaStreamCaptureModeGlobal);
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, elsewhere());
  expect_invalidated();
}

TEST_F(SimulatedCapture, AThreadMayTakeTheRiskOfUnsafeCalls) {
  void *pointer = nullptr;
  begin();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_CUDA(cudaSuccess, cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaSuccess, cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaMalloc(&pointer, 8));
  expect_invalidated();
}

TEST_F(SimulatedCapture, TheLegacyStreamIsUnusableWhileABlockingStreamCaptures) {
  main_ = stream(cudaStreamDefault);
  begin();
  cudaStreamCaptureStatus legacy{};
  EXPECT_CUDA(cudaErrorStreamCaptureImplicit, cudaStreamIsCapturing(nullptr, &legacy));
  EXPECT_EQ(status(main_), cudaStreamCaptureStatusActive);  // a query does no harm
  EXPECT_CUDA(cudaErrorStreamCaptureImplicit, cudaMemsetAsync(value_, 0, 4, nullptr));
  expect_invalidated();
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal));
}

TEST_F(SimulatedCapture, CapturesEndWhereTheyBegan) {
  EXPECT_CUDA(cudaErrorIllegalState, end());
  begin();
  EXPECT_CUDA(cudaErrorIllegalState, cudaStreamBeginCapture(main_, cudaStreamCaptureModeGlobal));
  cudaError_t elsewhere = cudaSuccess;
  std::thread([&] { elsewhere = end(); }).join();
  EXPECT_CUDA(cudaErrorStreamCaptureWrongThread, elsewhere);
  order(main_, side_);
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaErrorStreamCaptureUnmatched, cudaStreamEndCapture(side_, &graph));
  expect_invalidated();
}

TEST_F(SimulatedCapture, PageableCopiesAreNotCaptured) {
  int plain = 0;
  begin();
  EXPECT_CUDA(cudaErrorStreamCaptureUnsupported, cudaMemcpyAsync(value_, &plain, 4, cudaMemcpyHostToDevice, main_));
  expect_invalidated();
}

TEST_F(SimulatedCapture, CaptureInfoTellsTheSequencesApart) {
  begin();
  cudaStreamCaptureStatus state{};
  unsigned long long first = 0, second = 0;
  EXPECT_CUDA(cudaSuccess, cudaStreamGetCaptureInfo(main_, &state, &first));
  order(main_, side_);
  EXPECT_CUDA(cudaSuccess, cudaStreamGetCaptureInfo(side_, &state, &second));
  EXPECT_EQ(first, second);
  EXPECT_CUDA(cudaSuccess, end());
  begin();
  EXPECT_CUDA(cudaSuccess, cudaStreamGetCaptureInfo(main_, &state, &second));
  EXPECT_NE(first, second);
  EXPECT_CUDA(cudaSuccess, end());
}

}  // namespace
