// SPDX-License-Identifier: Apache-2.0
// A library stream with a thread of its own: a ring of tasks that one thread at a time fills and the worker empties.
// Nothing is allocated after creation, and the producer makes no system call while the worker is awake.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "device/host/stream.h"

namespace fsdp::device {

// How long an idle worker spins before it sleeps: long only while work has been coming quickly. A worker that was
// taken off its core while it spun sees a long idle time too, so spinning also ends where cores are oversubscribed.
class SpinBudget {
 public:
  SpinBudget();
  std::chrono::nanoseconds get() const { return budget_; }
  void observe(std::chrono::nanoseconds idle);

 private:
  std::chrono::nanoseconds longest_;
  std::chrono::nanoseconds budget_;
};

class WorkerStream final : public HostStream {
 public:
  static constexpr uint64_t capacity = 1024;

  // caller_waiter is for a full ring, worker_waiter for waits inside the stream.
  WorkerStream(const Options &options, const std::string &name, Progress &progress, const Waiter &caller_waiter,
               const Waiter &worker_waiter, Failure &failure);
  // Finishes what was enqueued (skips it if the context has failed) and joins the worker.
  ~WorkerStream() override;

  bool borrow() noexcept override;
  void give_back() noexcept override { borrowed_ = false; }
  void record(Event &event) override;
  void wait(const Event &event) override;
  void run(const Task &task) override;

 private:
  void start(const std::string &name);
  void wake() noexcept;
  void work() noexcept;
  bool next(uint64_t done) noexcept;  // false: told to stop, and nothing is left
  void sleep(uint64_t done) noexcept;
  void step(Task &task) noexcept;
  void await_other(Progress &other, uint64_t count);

  Progress &progress_;
  const Waiter &caller_waiter_;
  const Waiter &worker_waiter_;
  Failure &failure_;
  Delay delay_;
  SpinBudget spin_;
  bool broken_ = false;    // the worker's own: a task threw
  bool borrowed_ = false;  // the producer's own: it does what it gives, and the ring is empty
  std::unique_ptr<Task[]> ring_;
  alignas(64) std::atomic<uint64_t> enqueued_{0};
  std::atomic<bool> stop_{false};
  alignas(64) Word asleep_{0};
  pthread_t thread_{};
};

}  // namespace fsdp::device
