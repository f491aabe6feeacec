// SPDX-License-Identifier: Apache-2.0
// A device: its legacy stream, its failure, how much of its memory is taken.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "simulated_cuda/stream.h"

namespace simulated {

struct Device {
  Device(int index, uint64_t memory, uint64_t queues) : index(index), queues(queues), memory(memory) {}

  // The first failure stays. No edges: a failed device orders nothing.
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
  std::atomic<bool> stopping{false};  // reset: what is queued is dropped
  std::atomic<bool> used{false};      // by the runtime, which then keeps the primary context
  std::atomic<int> retained{0};       // the primary context, by driver calls
  std::mutex mutex;                   // the thread that makes the legacy stream
  std::atomic<Stream *> legacy{nullptr};
  std::atomic<Work *> legacy_work{nullptr};  // what blocking streams come after
};

}  // namespace simulated
