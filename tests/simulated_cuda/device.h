// SPDX-License-Identifier: Apache-2.0
// A device has a legacy stream, may have failed, and counts how much of its memory is taken.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "simulated_cuda/stream.h"

namespace simulated {

struct Device {
  Device(int index, uint64_t memory, uint64_t queues) : index(index), queues(queues), memory(memory) {}

  // Only the first failure is kept. Reading it creates no edge, because a failed device orders nothing.
  void fail(cudaError_t error) {
    int none = cudaSuccess;
    failure.compare_exchange_strong(none, error, std::memory_order_relaxed);
  }
  cudaError_t error() const { return static_cast<cudaError_t>(failure.load(std::memory_order_relaxed)); }
  bool healthy() const { return error() == cudaSuccess && !stopping.load(std::memory_order_relaxed); }

  const int index;
  HardwareQueues queues;
  std::atomic<uint64_t> memory;
  std::atomic<uint64_t> allocated{0};
  std::atomic<int> failure{cudaSuccess};
  std::atomic<bool> stopping{false};  // after a reset the queued work is dropped
  std::atomic<bool> used{false};      // the runtime has used the device, and then keeps the primary context
  std::atomic<int> retained{0};       // driver calls hold the primary context
  std::mutex mutex;                   // held by the thread that creates the legacy stream
  std::atomic<Stream *> legacy{nullptr};
  std::atomic<Work *> legacy_work{nullptr};  // blocking streams come after this work
};

}  // namespace simulated
