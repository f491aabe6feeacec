// SPDX-License-Identifier: Apache-2.0
// The end of an NCCL communicator, which any thread may bring about at any time. ncclCommAbort tells what runs on the
// GPU to quit, and then gives memory back, which waits for the whole GPU: for kernels of other communicators, too, that
// wait for peers until they are told to quit themselves; and for graphs. So every abort has a thread of its own.
// From 2.22 on NCCL also takes several as one group, where the second still is told only after the first has joined
// threads of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/nccl/library.h"

namespace fsdp::comm::nccl {

class Handle {
 public:
  Handle(std::shared_ptr<const Library> library, std::string name)
      : library_(std::move(library)), name_(std::move(name)) {}
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;

  // What NCCL keeps pointers to: the name, and whatever else there is.
  const char *name() const noexcept { return name_.c_str(); }
  void keep(std::shared_ptr<void> what) noexcept { kept_ = std::move(what); }

  // -- the caller's thread --
  // Nobody is in NCCL with this communicator while somebody holds it. An abort waits for it, and NCCL's calls are not
  // blocking.
  std::unique_lock<std::mutex> enter() { return std::unique_lock(mutex_); }
  // With the lock; NULL: it is not there yet, or is being aborted, or has ended.
  Comm *comm() const noexcept { return ending() ? nullptr : comm_; }
  bool ending() const noexcept { return ending_.load(std::memory_order_acquire); }
  // With the lock, to make one: where NCCL writes which one it is, during the call or later, from a thread of its own.
  // started: the call has been accepted, so that there is something to abort.
  Comm **slot() noexcept { return &slot_; }
  void start() noexcept { started_ = true; }
  Comm *written() noexcept;
  // It is made: calls are possible, and others look at it.
  void publish() noexcept;
  // Whether others look: not while the caller tries what may fail.
  void watch(bool watched) noexcept { watched_.store(watched, std::memory_order_release); }
  // What is found may come of a peer that aborts it first: it counts when it has lasted so long. Zero: at once.
  void doubt(std::chrono::milliseconds patience) noexcept {
    doubt_ms_.store(patience.count(), std::memory_order_release);
  }
  // With the lock: ncclCommDestroy comes next.
  Comm *leave() noexcept;

  // -- any thread --
  // What NCCL found since; nothing while the caller is in NCCL and hears of it itself.
  std::optional<Result> look() noexcept;
  // On a thread of its own, unless it has begun or the communicator has ended in good order.
  static void abort(const std::shared_ptr<Handle> &handle) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  // Waits for an abort; false: it does not return, and its thread is left to itself.
  bool await_end(std::chrono::milliseconds patience) const noexcept;

 private:
  static void *work(void *handle);
  bool end() noexcept;
  Comm *take(bool &known) noexcept;
  bool believes() noexcept;

  std::shared_ptr<const Library> library_;
  const std::string name_;
  std::shared_ptr<void> kept_;
  std::mutex mutex_;
  Comm *slot_ = nullptr;  // NCCL's to write: read by written() alone
  Comm *comm_ = nullptr;
  bool started_ = false;
  std::atomic<int64_t> doubt_ms_{0};
  std::optional<std::chrono::steady_clock::time_point> found_since_;  // under the lock
  std::atomic<bool> watched_{false}, ending_{false}, ended_{false};
};

}  // namespace fsdp::comm::nccl
