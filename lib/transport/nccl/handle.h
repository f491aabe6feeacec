// SPDX-License-Identifier: Apache-2.0
// The end of an NCCL communicator, which any thread may bring about at any time. ncclCommAbort tells what runs on the
// GPU to quit, and then gives memory back, which waits for the whole GPU. That is for graphs, and for kernels of other
// communicators that wait for peers until they are told to quit themselves. So every abort has a thread of its own.
// From 2.22 on NCCL also takes several as one group, where the second still is told only after the first has joined
// threads of its own.
//
// One that does not block has NCCL start a thread for every launch. So launches are of a child that blocks, split off a
// parent that does not, with which it shares its flag of being aborted (splitShare). An abort of the parent ends what
// the child has on the GPU, and what a caller waits for in a call of the child. Then no thread is in the child, and it
// is aborted as well. Without the parent an abort would take away the child's memory from under its caller.
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

// NCCL's kernels wait on the GPU for those of other ranks. Two communicators whose kernels start in one order here and
// in another one there may wait for each other for ever. So all ranks launch in one order, that of their calls, and on
// each GPU they also start in it: by an event between one launch and the next, on whatever streams they are.

class LaunchOrder {
 public:
  explicit LaunchOrder(device::Device &device) : last_(device.create_event()) {}
  // Of this device, shared by all that launch on it.
  static std::shared_ptr<LaunchOrder> of(device::Device &device);

  // Events do not reach across the edges of a graph capture (see device::Device::begin_capture). There the code that
  // joins the library's streams to the captured one keeps the order, and so does the launch of the graphs.
  void enter(device::Stream &stream) { stream.wait(*last_); }
  void leave(device::Stream &stream) { stream.record(*last_); }

 private:
  std::unique_ptr<device::Event> last_;
};

// What a call of NCCL returned, as an Error.

// Which call it was: "ncclGroupEnd", "reduce_scatter of 'layer.3' (#17)", by which rank of the job.
struct NcclCall {
  const char *function;
  const std::string &what;
  uint32_t world_rank;
};

// comm: NULL where there is none yet.
Error error_of(const Library &library, Comm *comm, Result result, const NcclCall &call);

class Handle {
 public:
  // splits: whether there is a child; else the parent is what launches.
  Handle(std::shared_ptr<const Library> library, std::string name, bool splits)
      : library_(std::move(library)), name_(std::move(name)), splits_(splits) {}
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;

  // What NCCL keeps pointers to: the name, and whatever else there is.
  const char *name() const noexcept { return name_.c_str(); }
  void keep(std::shared_ptr<void> what) noexcept { kept_ = std::move(what); }

  // -- the caller's thread, or one that works for it --
  // While a thread holds it, no other thread is in NCCL with the communicator that launches. An abort waits for it:
  // calls of a parent are not blocking, and those of a child end with its parent.
  std::unique_lock<std::mutex> enter() { return std::unique_lock(launching().mutex); }
  // With the lock; NULL: it is not there yet, or is being aborted, or has ended.
  Comm *comm() const noexcept { return ending() ? nullptr : launching().comm; }
  bool ending() const noexcept { return ending_.load(std::memory_order_acquire); }
  // The same for the parent, which is the same one where there is no child.
  std::unique_lock<std::mutex> enter_parent() { return std::unique_lock(parent_.mutex); }
  Comm *parent() const noexcept { return ending() ? nullptr : parent_.comm; }
  // With the parent's lock, to make one: where NCCL writes which one it is, during the call or later, from a thread of
  // its own. started: the call has been accepted, so that there is something to abort.
  Comm **slot() noexcept { return &parent_.slot; }
  void start() noexcept { started_ = true; }
  Comm *written() noexcept { return parent_.written(); }
  Comm **child_slot() noexcept { return &child_.slot; }
  // The parent is made: a child can be split off it.
  void keep_parent() noexcept;
  // All is made: calls are possible, and others look at it.
  void publish() noexcept;
  // Whether others look: not while the caller tries what may fail.
  void watch(bool watched) noexcept { watched_.store(watched, std::memory_order_release); }
  // What is found may come of a peer that aborts it first: it counts when it has lasted so long. Zero: at once.
  void doubt(std::chrono::milliseconds patience) noexcept {
    doubt_ms_.store(patience.count(), std::memory_order_release);
  }
  // With the lock of each: ncclCommDestroy comes next, of the child first. NULL: an abort has come before. A
  // communicator that has left the parent too has ended in good order, and no abort comes any more.
  Comm *leave_child() noexcept;
  Comm *leave_parent() noexcept;

  // -- any thread --
  // What NCCL found since; nothing while the caller is in NCCL and hears of it itself.
  std::optional<Result> look() noexcept;
  // On a thread of its own, unless it has begun or the communicator has ended in good order.
  static void abort(const std::shared_ptr<Handle> &handle) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  // Waits for an abort; false: it does not return, and its thread is left to itself.
  bool await_end(std::chrono::milliseconds patience) const noexcept;

 private:
  struct CommEntry {
    std::mutex mutex;
    Comm *slot = nullptr;  // NCCL's to write: read by written() alone
    Comm *comm = nullptr;  // that calls may be made with; under the lock

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
  std::optional<std::chrono::steady_clock::time_point> found_since_;  // under the lock
  std::atomic<bool> watched_{false}, ending_{false}, ended_{false};
};

}  // namespace fsdp::transport::nccl
