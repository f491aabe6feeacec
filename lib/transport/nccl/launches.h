// SPDX-License-Identifier: Apache-2.0
// The collectives of one NCCL communicator, in the order of the caller's calls: which are enqueued, which are done, and
// which do not end.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "transport/collectives.h"
#include "transport/nccl/connection.h"
#include "transport/nccl/guard.h"
#include "transport/nccl/handle.h"

namespace fsdp::transport::nccl {

// The work that a rank has enqueued on a communicator, for comparison with other ranks, because NCCL compares nothing.
// The hash also covers the positions among all launches of the team: if the launches of two communicators differ in
// order, they wait for each other on the GPUs.
struct History {
  uint64_t count = 0;
  uint64_t hash = 0xcbf29ce484222325;
  char last[96] = {};
};

class Launches final : public Guarded {
 public:
  // `order` is NULL if NCCL keeps the order. `launched` counts the launches of all communicators of one rank's team;
  // only begin() changes it.
  Launches(std::unique_ptr<Connection> connection, device::Device &device, std::shared_ptr<LaunchOrder> order,
           uint64_t &launched, const Waiter &waiter, Failure &failure);

  // -- called by the caller's thread --
  // A collective is begin(), then run() and kernels on the stream as often as needed, then end(). An error before end()
  // fails the context, because it is unknown how much of the collective is under way. `hash` covers all other data on
  // which ranks must agree.
  void begin(const char *operation, const Tag &tag, uint64_t bytes, device::Stream &stream, uint64_t hash = 0);
  void run(device::Stream &stream, const std::function<void(Comm *)> &enqueue);
  Ticket end(device::Stream &stream);
  // Called by `enqueue` for the result of each call.
  void check(Result result, const char *function, Comm *comm) const {
    connection_->check(result, function, what_, comm);
  }

  void await(Ticket ticket, device::Stream &stream);
  bool released(Ticket ticket) const noexcept;
  void quiesce() noexcept { enqueued_all_ = true; }
  void abandon() noexcept { abandoned_ = true; }
  bool abandoned() const noexcept { return abandoned_; }
  void next_round() noexcept { enqueued_all_ = abandoned_ = false; }
  // Replaces a communicator that has ended. Work on the old one is done, or never will be.
  void replace(std::unique_ptr<Connection> connection);
  const History &history() const noexcept { return history_; }
  Connection &connection() noexcept { return *connection_; }
  const Connection &connection() const noexcept { return *connection_; }
  const Library &library() const noexcept { return *library_; }
  // Waits until all enqueued work is done. Returns false if it is not done within `timeout_ms`.
  bool drain(uint32_t timeout_ms) const noexcept;

  // -- called by the guard's thread --
  std::optional<Error> look() noexcept override;
  std::string awaited() const override;
  std::shared_ptr<Handle> handle() const override;

 private:
  class Launching;
  // More than a stream accepts: CUDA lets about a thousand pieces of work wait in a stream, and a collective is four
  // pieces. So the collective on which the GPU works is always among these slots.
  static constexpr uint64_t kept = 512;
  static constexpr auto patience = std::chrono::seconds(2);  // time before peers that have left are blamed
  struct LaunchSlot {
    std::unique_ptr<device::Event> begin, end;
    std::string what;
  };

  LaunchSlot &slot(uint64_t number) { return slots_[number % kept]; }
  const LaunchSlot &slot(uint64_t number) const { return slots_[number % kept]; }
  bool done(uint64_t number) const { return slot(number).end->done(); }
  void add_to_history(uint64_t what, uint64_t hash) noexcept;
  Clock::duration stalled();
  // How long the caller has been in a launch of NCCL after the GPU had done all earlier work. During this time the
  // caller waits for peers that are not connected yet, and not for room in its stream. Called after stalled().
  Clock::duration held();
  void mark_launching(bool launching);

  // Used by the caller. It is replaced under the lock, and the guard takes the handle under the same lock.
  std::unique_ptr<Connection> connection_;
  const std::shared_ptr<const Library> library_;
  const uint32_t world_rank_;
  std::shared_ptr<LaunchOrder> order_;
  uint64_t &launched_;
  const Waiter &waiter_;
  Failure &failure_;
  bool enqueued_all_ = false, abandoned_ = false;
  History history_;
  std::string what_;  // the collective between begin and end

  // No thread holds it inside CUDA or NCCL, because both may block until peers come, or until the guard frees the GPU.
  mutable std::mutex mutex_;
  // The caller writes the slot of the next collective, which the guard does not use; the other slots are only read.
  LaunchSlot slots_[kept];
  uint64_t next_ = 0;    // number of the next collective; written under the lock
  uint64_t oldest_ = 0;  // all earlier collectives are done or forgotten; guarded by the lock, as are the members below
  uint64_t stalled_at_ = UINT64_MAX;
  std::optional<Clock::time_point> launching_since_;
  Clock::time_point stalled_since_;
};

}  // namespace fsdp::transport::nccl
