// SPDX-License-Identifier: Apache-2.0
// CUDA puts the work of all streams of a process and device into a few queues, in the order in which it was enqueued.
// The piece at the head of a queue waits for the work that must come before it. All pieces behind it wait too, whatever
// their stream is. A piece that has started blocks nothing. Programs may not rely on this order, so it gives no edge to
// ThreadSanitizer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>

#include "simulated_cuda/work.h"

namespace simulated {

inline uint64_t next_random(uint64_t &state) {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

class HardwareQueue {
 public:
  void append(Work &work) {
    const std::lock_guard lock(mutex_);
    work.ahead = last_;
    last_ = &work;
  }

  std::atomic<uint64_t> streams{0};  // counts the streams that exist

 private:
  std::mutex mutex_;
  const Work *last_ = nullptr;
};

// Holds the queues of a device: 1 to 32 as CUDA_DEVICE_MAX_CONNECTIONS says, or 8 without that variable. CUDA does not
// say which queue a stream gets. This simulation chooses a random queue, so that even a few streams may share one, or
// on request the queue with the fewest streams.
class HardwareQueues {
 public:
  static constexpr uint64_t usual = 8, most = 32;

  explicit HardwareQueues(uint64_t count) : queues_(count) {}
  // Assigns a queue to a new stream, which leaves it when the stream is destroyed. NULL means that the stream has a
  // queue of its own.
  HardwareQueue *join(bool fair) {
    const std::lock_guard lock(mutex_);
    if (queues_.empty()) return nullptr;
    HardwareQueue &queue = fair ? least() : queues_[next_random(random_) % queues_.size()];
    ++queue.streams;
    return &queue;
  }
  // Reads CUDA's variable when the process first uses a device, as CUDA does.
  static uint64_t of_environment();

 private:
  HardwareQueue &least() {
    return *std::min_element(queues_.begin(), queues_.end(),
                             [](const auto &a, const auto &b) { return a.streams < b.streams; });
  }

  std::mutex mutex_;
  std::deque<HardwareQueue> queues_;
  uint64_t random_ = 0;
};

}  // namespace simulated
