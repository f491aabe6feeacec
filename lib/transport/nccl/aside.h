// SPDX-License-Identifier: Apache-2.0
// A call of NCCL's that may wait for peers, on a thread of its own, so that whoever waits for it can look after the job
// meanwhile. Its communicator's abort ends it; until then it goes on, whoever has stopped waiting.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "transport/nccl/handle.h"

namespace fsdp::transport::nccl {

class Aside {
 public:
  // Called with the communicator that launches, and with its lock; what it uses must live as long as the handle.
  using Body = std::function<Result(Handle &, Comm *)>;

  // gpu: the current one for the body.
  static std::shared_ptr<Aside> start(std::shared_ptr<Handle> handle, int32_t gpu, Body body);

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Once it is done. False: the communicator had ended before.
  bool called() const noexcept { return called_; }
  Result result() const noexcept { return result_; }

 private:
  Aside(std::shared_ptr<Handle> handle, int32_t gpu, Body body)
      : handle_(std::move(handle)), gpu_(gpu), body_(std::move(body)) {}
  static void *work(void *argument);
  void run();

  const std::shared_ptr<Handle> handle_;
  const int32_t gpu_;
  const Body body_;
  bool called_ = false;
  Result result_ = success;
  std::atomic<bool> done_{false};
};

}  // namespace fsdp::transport::nccl
