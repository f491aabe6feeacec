// SPDX-License-Identifier: Apache-2.0
// One piece of work in a stream. Other work can wait for it. The only edges between threads are those that CUDA
// guarantees: from the call that enqueues to the work, and from work to its waiters. So ThreadSanitizer finds work that
// lacks an edge, whatever the timing was.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "device/host/futex.h"

namespace simulated {

using fsdp::device::futex_wait;
using fsdp::device::futex_wake_all;
using Word = std::atomic<uint32_t>;
using Clock = std::chrono::steady_clock;

struct Work {
  std::function<void()> run;  // empty: a marker
  std::vector<Work *> after;  // pieces of work of other streams
  Clock::time_point end;      // written before done
  std::atomic<Work *> next{nullptr};
  Word finished{0};
  const Work *ahead = nullptr;  // place in its hardware queue
  Word started{0};              // read without edges
  bool waits = false;           // waits for a value in memory, at the head of its queue

  bool done() const { return finished.load(std::memory_order_acquire) != 0; }
  void finish() {
    end = Clock::now();
    finished.store(1, std::memory_order_release);
    futex_wake_all(finished);
  }
  bool has_started() const { return started.load(std::memory_order_relaxed) != 0; }
  void start() {
    if (started.exchange(1, std::memory_order_relaxed) == 0) futex_wake_all(started);
  }
  void await_start() const {
    while (!has_started()) futex_wait(started, 0, std::chrono::seconds(1));
  }
  void wait() const {
    while (!done()) futex_wait(finished, 0, std::chrono::seconds(1));
  }
};

}  // namespace simulated
