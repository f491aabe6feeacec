// SPDX-License-Identifier: Apache-2.0
// One NCCL communicator of this rank, as its caller uses it. The caller's thread makes launches over a blocking child
// communicator. Calls that wait for peers run on a separate thread (Aside). If the plan has no child, calls may return
// while a thread of NCCL still works on them, and the next call waits until that work is done. handle.h describes the
// end of a communicator.
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

// The part of a GPU that NCCL's kernels take: each of their thread blocks takes a multiprocessor (SM) away from the
// math. The limits come from the environment; `undefined` means NCCL's own choice.
struct BlockLimits {
  int least = undefined, most = undefined;  // number of blocks of a collective's kernel
  int cluster = undefined;                  // number of blocks that are started together, on Hopper and later GPUs
  int of_switches = undefined;              // number of blocks of collectives by NVLink's switches

  bool operator==(const BlockLimits &) const = default;
};

// Reads FSDP_NCCL_MIN_CTAS and similar variables. Throws INVALID_ARGUMENT for a value that is no number or out of
// range.
BlockLimits read_block_limits();
// Throws UNSUPPORTED if a limit is set that this NCCL does not know.
void check_block_limits(const BlockLimits &limits, const Library &library);
// The limits that are set, for the log; empty: none.
std::string text_of(const BlockLimits &limits);
void apply(const BlockLimits &limits, Config &config);

// A call of NCCL that may wait for peers, on its own thread. So the thread that waits for the call can check the job
// during the wait. An abort of the communicator ends the call. Until then the call goes on, even if no thread waits for
// it any more.

class Aside {
 public:
  // The body is called with the communicator that launches, and with its lock. Everything that it uses must live as
  // long as the handle.
  using Body = std::function<Result(Handle &, Comm *)>;
  // `gpu` is the current GPU for the body.
  static std::shared_ptr<Aside> start(std::shared_ptr<Handle> handle, int32_t gpu, Body body);

  bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  // Valid once the call is done. False: the communicator had already ended, so the body was not called.
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
  int ranks = 1, rank = 0;  // size of the team, and this rank in it
  uint32_t world_rank = 0;
  bool copy_engines = false;    // gathers use copy engines if the version can do that
  bool order_implicit = false;  // NCCL itself keeps the order of launches
  bool splits = true;           // launches use a child communicator that blocks
  BlockLimits blocks = {};
};

// The result of a registration of memory.
enum class Registration : uint8_t {
  done,
  refused,  // NCCL works without the registration
  spoilt    // the communicator is lost, too: NCCL keeps the error, so no further call is possible
};

class Connection {
 public:
  Connection(std::shared_ptr<const Library> library, ConnectionPlan plan, const device::Device &device,
             const Waiter &waiter);
  // Aborts the communicator unless it has ended, because NCCL's threads may still write to memory that the handle
  // keeps.
  ~Connection();
  Connection(const Connection &) = delete;
  Connection &operator=(const Connection &) = delete;

  const ConnectionPlan &plan() const noexcept { return plan_; }
  const Library &library() const noexcept { return *library_; }
  const std::shared_ptr<const Library> &shared_library() const noexcept { return library_; }
  const std::shared_ptr<Handle> &handle() const noexcept { return handle_; }

  // Collective: every rank of the team calls it with the id that the first rank made.
  void join(const UniqueId &id, uint32_t timeout_ms);
  // Launches all calls of `enqueue` as one. When it returns, they are on their streams.
  void launch(const std::string &what, const std::function<void(Comm *)> &enqueue);
  // Called by `enqueue` for the result of each call.
  void check(Result result, const char *function, const std::string &what, Comm *comm) const;
  // Registers the same memory on all ranks. `why` gets NCCL's reason. From then on the handle is not watched, because a
  // peer whose communicator is spoilt may abort it before this rank knows. The caller restores the watch once it knows
  // the results of all ranks.
  Registration register_memory(void *data, uint64_t bytes, bool windows, uint32_t timeout_ms, std::string &why);
  // Returns false if NCCL may go on using the memory. In that case the communicator can only be aborted.
  bool forget_memory(void *data) noexcept;
  // Notes that a graph has captured work of the communicator, which NCCL then ends only after the graph is destroyed.
  void note_capture() noexcept { captured_ = true; }
  bool captured() const noexcept { return captured_; }
  // Ends the communicator in good order within the timeout. Returns false if it must be aborted.
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
  // Makes a call that may wait for peers, and waits for its end for at most `timeout_ms`. During the wait `look` is
  // called, which throws to end the wait.
  void perform(const char *function, const std::string &what, uint32_t timeout_ms, const std::function<void()> &look,
               const Aside::Body &body);
  // Waits until the last call is done. If there is a child, the last call was a call of the parent.
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
  std::shared_ptr<Aside> aside_;  // the last call on a separate thread; no other call may enter NCCL before it is done
  bool captured_ = false;
  // Exists as long as the handle, because NCCL may write a window after the call.
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
