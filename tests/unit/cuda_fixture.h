// SPDX-License-Identifier: Apache-2.0
// Fixture for tests of the CUDA device. The same files are built twice: over the simulated runtime, as unit tests, and
// over CUDA itself, as GPU tests, which are skipped without a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/cuda/kernels.h"
#include "device/device.h"
#ifdef FSDP_TEST_SIMULATED_CUDA
#include "simulated_cuda/simulated.h"
#endif

namespace fsdp::device {

inline void start_cuda() {
#ifdef FSDP_TEST_SIMULATED_CUDA
  simulated::reset();
#else
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU: " << cudaGetErrorName(code);
#endif
}

// Checks a CUDA call that a test makes itself.
#define CUDA_OK(call) ASSERT_EQ(cudaSuccess, call)

struct CudaContext {
  explicit CudaContext(const Options &options = {}, uint32_t timeout_ms = 20000, int32_t index = 0)
      : waiter(failure, nullptr, nullptr, timeout_ms), device(create_cuda_device(index, options, waiter, failure)) {}
  Failure failure;
  Waiter waiter;
  std::unique_ptr<Device> device;
};

class CudaTest : public testing::Test {
 protected:
  void SetUp() override { start_cuda(); }
};

// The test owns this stream and passes it as the caller's.
class OwnStream {
 public:
  explicit OwnStream(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_EQ(cudaSuccess, cudaStreamCreateWithFlags(&stream_, flags));
  }
  ~OwnStream() {
    // A test may make the first call fail.
    if (cudaStreamDestroy(stream_) != cudaSuccess) cudaStreamDestroy(stream_);
  }
  OwnStream(const OwnStream &) = delete;
  OwnStream &operator=(const OwnStream &) = delete;
  cudaStream_t get() const { return stream_; }
  void be_late(uint32_t us = 3000) const { ASSERT_EQ(0, cuda::kernels::delay(stream_, us)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Keeps a stream of the test busy until the test lets go. Later work on it is not done before that, however long the
// test's own thread is delayed.
class GpuHeld {
 public:
  explicit GpuHeld(const OwnStream &stream) : go_(new std::atomic<bool>(false)) {
    const cudaError_t code = cudaLaunchHostFunc(stream.get(), await, go_);
    EXPECT_EQ(cudaSuccess, code);
    if (code != cudaSuccess) delete std::exchange(go_, nullptr);
  }
  ~GpuHeld() { let_go(); }
  GpuHeld(const GpuHeld &) = delete;
  GpuHeld &operator=(const GpuHeld &) = delete;
  void let_go() {
    if (go_) std::exchange(go_, nullptr)->store(true, std::memory_order_release);
  }

 private:
  // Destroys the flag here, because the thread that lets go does not wait for this function.
  static void await(void *data) {
    const std::unique_ptr<std::atomic<bool>> go(static_cast<std::atomic<bool> *>(data));
    while (!go->load(std::memory_order_acquire)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::atomic<bool> *go_;
};

// Returns the status and message of a call's error, or FSDP_OK if nothing fails.
struct Failed {
  fsdp_status status = FSDP_OK;
  fsdp_origin origin = 0;
  int64_t code = 0;
  std::string message = {};
};

template <class F>
Failed failure_of(const F &f) {
  try {
    f();
  } catch (const Error &error) {
    return {error.status, error.origin, error.origin_code, error.message};
  }
  return {};
}

inline std::vector<float> numbers(uint64_t count, float first = 1) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i % 1000) * 0.25F;
  return values;
}

}  // namespace fsdp::device
