// SPDX-License-Identifier: Apache-2.0
// The background thread of each rank that is a process: it beats for the rank, looks at the heartbeats of peers, and
// runs a task for its node. It calls no callback, handles no signal, and sleeps at most until the next heartbeat.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>

#include "base/fd.h"
#include "membership/seat.h"

namespace fsdp::membership {

// Another task for a monitor's thread: for example, the leader of a node communicates with other nodes.
class MonitorTask {
 public:
  virtual ~MonitorTask() = default;
  // Runs one round: sleeps until there is something to do or `wake` is readable, at most `ms`.
  virtual void run(int wake, uint32_t ms) noexcept = 0;
  // Runs the last round, before the thread ends. Takes a bounded time.
  virtual void finish() noexcept = 0;
};

class Monitor {
 public:
  explicit Monitor(std::shared_ptr<Seat> seat, std::unique_ptr<MonitorTask> task = nullptr);
  ~Monitor();
  Monitor(const Monitor &) = delete;
  Monitor &operator=(const Monitor &) = delete;

 private:
  void start();
  void work() noexcept;

  std::shared_ptr<Seat> seat_;
  std::unique_ptr<MonitorTask> task_;
  Fd wake_;
  std::atomic<bool> stop_{false};
  pthread_t thread_{};
};

}  // namespace fsdp::membership
