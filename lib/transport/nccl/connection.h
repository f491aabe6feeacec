// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator of this rank, as its caller uses it. Launches are made by the caller's own thread, over a
// communicator that blocks; what waits for peers by its nature runs on a thread aside (aside.h). Where the plan has no
// such child, calls may return while a thread of NCCL's is still at it, and the next one waits until that is done. How
// it ends, and what else knows it: handle.h.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/failure.h"
#include "device/device.h"
#include "transport/nccl/handle.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {

// How much of a GPU NCCL's kernels take: each of their thread blocks has a multiprocessor (SM) that the math has not.

// As the environment says; `undefined`: NCCL's own choice.
struct BlockLimits {
  int least = undefined, most = undefined;  // of a collective's kernel
  int cluster = undefined;                  // of its blocks that are started together; from GPUs of Hopper's kind on
  int of_switches = undefined;              // of collectives by NVLink's switches

  bool operator==(const BlockLimits &) const = default;
};

// FSDP_NCCL_MIN_CTAS and its like. INVALID_ARGUMENT for what is no number, or out of range.
BlockLimits read_block_limits();
// UNSUPPORTED where this NCCL does not know of one that is set.
void check_block_limits(const BlockLimits &limits, const Library &library);
// What was asked for, for the log; empty: nothing.
std::string text_of(const BlockLimits &limits);
void apply(const BlockLimits &limits, Config &config);

// A call of NCCL's that may wait for peers, on a thread of its own, so that the thread that waits for it can look after
// the job meanwhile. Its communicator's abort ends it; until then it goes on, also when no thread waits for it any
// more.

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

using Clock = std::chrono::steady_clock;

struct ConnectionPlan {
  std::string name;
  int ranks = 1, rank = 0;  // of the team
  uint32_t world_rank = 0;
  bool copy_engines = false;    // for gathers, where the version can
  bool order_implicit = false;  // NCCL keeps the order of launches itself
  bool splits = true;           // launches are of a child that blocks
  BlockLimits blocks = {};
};

// What became of memory that was to be registered.
enum class Registration : uint8_t {
  done,
  refused,  // NCCL does without
  spoilt    // ... and the communicator with it: NCCL keeps the error, and no call is possible any more
};

class Connection {
 public:
  Connection(std::shared_ptr<const Library> library, ConnectionPlan plan, const device::Device &device,
             const Waiter &waiter);
  // Aborts it, unless it has ended: NCCL's threads may still write what the handle keeps.
  ~Connection();
  Connection(const Connection &) = delete;
  Connection &operator=(const Connection &) = delete;

  const ConnectionPlan &plan() const noexcept { return plan_; }
  const Library &library() const noexcept { return *library_; }
  const std::shared_ptr<const Library> &shared_library() const noexcept { return library_; }
  const std::shared_ptr<Handle> &handle() const noexcept { return handle_; }

  // Every rank of the team, with the id that the first one made.
  void join(const UniqueId &id, uint32_t timeout_ms);
  // All calls of `enqueue` are launched as one. When it returns they are on their streams.
  void launch(const std::string &what, const std::function<void(Comm *)> &enqueue);
  // For `enqueue`.
  void check(Result result, const char *function, const std::string &what, Comm *comm) const;
  // The same memory on all ranks. why: what NCCL said. The handle is not watched from then on: a peer for which it is
  // spoilt may abort it before this rank knows. The code that knows of all ranks restores the watch.
  Registration register_memory(void *data, uint64_t bytes, bool windows, uint32_t timeout_ms, std::string &why);
  // False: NCCL may go on using it, and the communicator can only be aborted.
  bool forget_memory(void *data) noexcept;
  // A graph has captured something of it: NCCL does not let it end before the graph is destroyed.
  void note_capture() noexcept { captured_ = true; }
  bool captured() const noexcept { return captured_; }
  // In good order, if that takes no longer; false: it must be aborted.
  bool finish(uint32_t timeout_ms) noexcept;

 private:
  struct Registered {
    void *data;
    void *handle = nullptr;
    Window *window = nullptr;
  };

  [[noreturn]] void fail_ended(const std::string &what) const;
  template <class Function>
  void call(const char *function, const std::string &what, Function &&body);
  template <class Function>
  void call_parent(const char *function, const std::string &what, Function &&body);
  // What may wait for peers: called and done when it returns, at most so long. look: called meanwhile, throws what ends
  // the wait.
  void perform(const char *function, const std::string &what, uint32_t timeout_ms, const std::function<void()> &look,
               const Aside::Body &body);
  // Until the last call is done, which was the parent's where there is a child.
  void settle(const char *function, const std::string &what, uint32_t timeout_ms, const std::function<void()> &look);
  template <class Step>
  void poll_until(Step &&step, const char *function, const std::string &what, uint32_t timeout_ms,
                  const std::function<void()> &look) const;
  Result state_of(Comm *comm, const char *function, const std::string &what) const;
  Config config(bool blocking) const;
  void make(const UniqueId &id, const std::string &what, uint32_t timeout_ms);
  void split(const std::string &what, uint32_t timeout_ms);
  void call_register(Registered &added, uint64_t bytes, bool windows, uint32_t timeout_ms);
  bool is_spoilt() noexcept;
  bool deregister(Registered &registered) noexcept;

  std::shared_ptr<const Library> library_;
  ConnectionPlan plan_;
  const device::Device &device_;
  const Waiter &waiter_;
  std::shared_ptr<Handle> handle_;
  std::shared_ptr<Aside> aside_;  // the last call of its kind: no other call may be in NCCL before it is done
  bool captured_ = false;
  // NCCL may write a window after the call: it lives as long as the handle does.
  std::shared_ptr<std::vector<std::unique_ptr<Registered>>> memory_;
};

template <class Function>
void Connection::call(const char *function, const std::string &what, Function &&body) {
  const auto locked = [&] {
    const auto lock = handle_->enter();
    Comm *comm = handle_->comm();
    if (!comm) fail_ended(what);
    check(body(comm), function, what, comm);
  };
  device_.with_current(std::ref(locked));
}

template <class Function>
void Connection::call_parent(const char *function, const std::string &what, Function &&body) {
  const auto locked = [&] {
    const auto lock = handle_->enter_parent();
    Comm *comm = handle_->parent();
    if (!comm) fail_ended(what);
    check(body(comm), function, what, comm);
  };
  device_.with_current(std::ref(locked));
}

}  // namespace fsdp::transport::nccl
