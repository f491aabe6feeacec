// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator of this rank, from its birth to its end. It is non-blocking: a call may return while a thread
// of NCCL's is still at it, and the next one waits until that is done. Two threads know it: the caller's, and the
// guard's, which may end it at any time; whoever calls NCCL holds the lock, so that nothing is called while it ends.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/failure.h"
#include "comm/nccl/call.h"
#include "comm/nccl/library.h"
#include "device/device.h"

namespace fsdp::comm::nccl {

using Clock = std::chrono::steady_clock;

struct ConnectionPlan {
  std::string name;
  int ranks = 1, rank = 0;  // of the team
  uint32_t world_rank = 0;
  bool copy_engines = false;    // for gathers, where the version can
  bool order_implicit = false;  // NCCL keeps the order of launches itself
};

class Connection {
 public:
  Connection(std::shared_ptr<const Library> library, ConnectionPlan plan, const device::Device &device,
             const Waiter &waiter);
  ~Connection();  // what was not ended is left to the process
  Connection(const Connection &) = delete;
  Connection &operator=(const Connection &) = delete;

  const ConnectionPlan &plan() const noexcept { return plan_; }
  const Library &library() const noexcept { return *library_; }

  // -- the caller's thread --
  // Every rank of the team, with the id that the first one made.
  void join(const UniqueId &id, uint32_t timeout_ms);
  // All calls of `enqueue` are launched as one. When it returns they are on their streams.
  void launch(const std::string &what, const std::function<void(Comm *)> &enqueue);
  // For `enqueue`.
  void check(Result result, const char *function, const std::string &what, Comm *comm) const;
  // The same memory on all ranks. False: NCCL cannot use it as it would like to.
  bool register_memory(void *data, uint64_t bytes, bool windows);
  void forget_memory(void *data) noexcept;
  // NULL-operand sum with a factor on every operand before it is sent, made when it is first asked for.
  Operation scaled_sum(float factor);
  // In good order, if that takes no longer; false: it must be aborted.
  bool finish(uint32_t timeout_ms) noexcept;

  // -- any thread --
  // What NCCL found since, if it did.
  std::optional<Error> look() noexcept;
  // Frees the GPU's streams from what waits for peers. May block.
  void abort() noexcept;
  bool ended() const noexcept;

 private:
  struct Registered {
    void *data;
    void *handle = nullptr;
    Window *window = nullptr;
  };
  struct ScaledSum {
    float factor;
    Operation operation;
  };

  Comm *alive(const std::string &what) const;
  template <class Function>
  void call(const char *function, const std::string &what, Function &&body);
  // Until the last call is done, at most so long. look: called meanwhile, throws what ends the wait.
  void settle(const char *function, const std::string &what, uint32_t timeout_ms, const std::function<void()> &look);
  Config config() const;
  void deregister(Registered &registered) noexcept;

  std::shared_ptr<const Library> library_;
  ConnectionPlan plan_;
  const device::Device &device_;
  const Waiter &waiter_;
  mutable std::mutex mutex_;
  Comm *comm_ = nullptr;
  bool ended_ = false;
  std::vector<std::unique_ptr<Registered>> memory_;  // NCCL may write the window after the call
  std::vector<ScaledSum> sums_;
};

}  // namespace fsdp::comm::nccl
