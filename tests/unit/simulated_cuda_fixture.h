// SPDX-License-Identifier: Apache-2.0
// Helpers that the tests of the CUDA runtime over host threads share.
#pragma once

#include <gtest/gtest.h>

#include <cstring>

#include "simulated_cuda/simulated.h"

#define EXPECT_CUDA(error, call) EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(call))

class SimulatedCuda : public testing::Test {
 protected:
  void SetUp() override {
    simulated::reset();
    simulated::set_fair_queues(true);  // so that only waits that a test requests delay a stream
  }
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
