// SPDX-License-Identifier: Apache-2.0
// The end of an NCCL communicator, which any thread may cause at any time. ncclCommAbort tells the communicator's
// kernels on the GPU to quit, and then frees memory, which waits for the whole GPU. So it waits for graphs, and for
// kernels of other communicators. Those kernels wait for peers until they are told to quit themselves. So every abort
// has its own thread. From 2.22 on NCCL can also abort several communicators as one group, but it tells the second one
// only after the first has joined its threads.
//
// For a communicator that does not block, NCCL starts a thread for every launch. So launches use a child that blocks.
// It is split off a parent that does not block, and shares the parent's abort flag (splitShare). An abort of the parent
// ends the child's work on the GPU, and the wait of a caller in a call of the child. Then no thread is in the child,
// and the child is aborted as well. Without the parent, an abort would free the child's memory while its caller uses
// it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.h"
#include "device/device.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {

// NCCL's kernels wait on the GPU for kernels of other ranks. If the kernels of two communicators start in different
// orders on two ranks, they may wait for each other forever. So all ranks launch in one order, the order of their
// calls. An event between one launch and the next makes the kernels also start in that order, on any streams.

class LaunchOrder {
 public:
  explicit LaunchOrder(device::Device &device) : last_(device.create_event()) {}
  // The order of this device, which all communicators on it share.
  static std::shared_ptr<LaunchOrder> of(device::Device &device);

  // Events have no effect across the begin or end of a graph capture (see device::Device::begin_capture). In a capture,
  // the code that joins the library's streams to the captured stream keeps the order, and so does the launch of the
  // graphs.
  void enter(device::Stream &stream) { stream.wait(*last_); }
  void leave(device::Stream &stream) { stream.record(*last_); }

 private:
  std::unique_ptr<device::Event> last_;
};

// Turns the result of a call of NCCL into an Error. An NcclCall has the function, "ncclGroupEnd", its purpose,
// "reduce_scatter of 'layer.3' (#17)", and the rank of the job.
struct NcclCall {
  const char *function;
  const std::string &what;
  uint32_t world_rank;
};

// `comm` is NULL if there is no communicator yet.
Error error_of(const Library &library, Comm *comm, Result result, const NcclCall &call);

class Handle {
 public:
  // `splits`: there is a child; if false, the parent launches.
  Handle(std::shared_ptr<const Library> library, std::string name, bool splits)
      : library_(std::move(library)), name_(std::move(name)), splits_(splits) {}
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;

  // Keeps objects to which NCCL has pointers: the name, and others.
  const char *name() const noexcept { return name_.c_str(); }
  void keep(std::shared_ptr<void> what) noexcept { kept_ = std::move(what); }

  // -- called by the caller's thread, or by a thread that works for it --
  // While a thread holds this lock, no other thread is in NCCL with the communicator that launches. An abort waits for
  // the lock: calls of a parent do not block, and calls of a child end with its parent.
  std::unique_lock<std::mutex> enter() { return std::unique_lock(launching().mutex); }
  // Called with the lock. Returns NULL if the communicator does not exist yet, is being aborted or has ended.
  Comm *comm() const noexcept { return ending() ? nullptr : launching().comm; }
  bool ending() const noexcept { return ending_.load(std::memory_order_acquire); }
  // The same for the parent. Without a child, the parent itself launches.
  std::unique_lock<std::mutex> enter_parent() { return std::unique_lock(parent_.mutex); }
  Comm *parent() const noexcept { return ending() ? nullptr : parent_.comm; }
  // Called with the parent's lock to make a communicator. NCCL writes its pointer to slot(), during the call or later,
  // from a thread of NCCL. start() notes that NCCL has accepted the call, so that there is something to abort.
  Comm **slot() noexcept { return &parent_.slot; }
  void start() noexcept { started_ = true; }
  Comm *written() noexcept { return parent_.written(); }
  Comm **child_slot() noexcept { return &child_.slot; }
  // Called when the parent exists, so that a child can be split off it.
  void keep_parent() noexcept;
  // Called when everything exists: from now on calls are possible, and other threads watch the communicator.
  void publish() noexcept;
  // Sets whether other threads watch. They do not while the caller makes a call that may fail.
  void watch(bool watched) noexcept { watched_.store(watched, std::memory_order_release); }
  // An error may come from a peer that aborts first, so it counts only when it has lasted for `patience`; zero: it
  // counts immediately.
  void doubt(std::chrono::milliseconds patience) noexcept {
    doubt_ms_.store(patience.count(), std::memory_order_release);
  }
  // Called before ncclCommDestroy, first for the child, with the lock of the child or parent. Both return NULL if an
  // abort has taken the communicator. After leave_parent() the communicator has ended in good order, and no abort
  // follows.
  Comm *leave_child() noexcept;
  Comm *leave_parent() noexcept;

  // -- called by any thread --
  // The error that NCCL has found since; nothing while the caller is in NCCL, because the caller's call then returns
  // the error.
  std::optional<Result> look() noexcept;
  // Starts an abort on its own thread, unless one has begun or the communicator has ended in good order.
  static void abort(const std::shared_ptr<Handle> &handle) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  // Waits for an abort. Returns false if the abort does not return; its thread is then abandoned.
  bool await_end(std::chrono::milliseconds patience) const noexcept;

 private:
  struct CommEntry {
    std::mutex mutex;
    Comm *slot = nullptr;  // written by NCCL, and read only by written()
    Comm *comm = nullptr;  // the communicator for calls; guarded by the mutex

    Comm *written() noexcept { return __atomic_load_n(&slot, __ATOMIC_ACQUIRE); }
  };

  CommEntry &launching() noexcept { return splits_ ? child_ : parent_; }
  const CommEntry &launching() const noexcept { return splits_ ? child_ : parent_; }
  static void *work(void *handle);
  bool end() noexcept;
  Comm *take_parent(bool &known) noexcept;
  Comm *take_child() noexcept;
  bool believes() noexcept;

  std::shared_ptr<const Library> library_;
  const std::string name_;
  const bool splits_;
  std::shared_ptr<void> kept_;
  CommEntry parent_, child_;
  bool started_ = false;  // under the parent's lock
  std::atomic<int64_t> doubt_ms_{0};
  std::optional<std::chrono::steady_clock::time_point> found_since_;  // guarded by the lock
  std::atomic<bool> watched_{false}, ending_{false}, ended_{false};
};

}  // namespace fsdp::transport::nccl
