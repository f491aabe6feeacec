// SPDX-License-Identifier: Apache-2.0
// The collectives of one NCCL communicator in the order of the caller's calls: what was enqueued, what of it is done,
// and what does not end.
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

// What a rank has enqueued on a communicator, to be compared with what others have. NCCL compares nothing. The hash
// also tells the places among all launches of the team: two communicators in two orders wait for each other on the
// GPUs.
struct History {
  uint64_t count = 0;
  uint64_t hash = 0xcbf29ce484222325;
  char last[96] = {};
};

class Launches final : public Guarded {
 public:
  // order: NULL where NCCL keeps it. launched: by all communicators of one rank's team, which begin() alone counts.
  Launches(std::unique_ptr<Connection> connection, device::Device &device, std::shared_ptr<LaunchOrder> order,
           uint64_t &launched, const Waiter &waiter, Failure &failure);

  // -- the caller's thread --
  // A collective: begin, then run and kernels on the stream as often as it needs, then end. An error in between fails
  // the context: it is not known how much of it is under way.
  void begin(const char *operation, const Tag &tag, uint64_t bytes, device::Stream &stream);
  void run(device::Stream &stream, const std::function<void(Comm *)> &enqueue);
  Ticket end(device::Stream &stream);
  // For `enqueue`.
  void check(Result result, const char *function, Comm *comm) const {
    connection_->check(result, function, what_, comm);
  }

  void await(Ticket ticket, device::Stream &stream);
  bool released(Ticket ticket) const noexcept;
  void quiesce() noexcept { quiet_ = true; }
  void abandon() noexcept { abandoned_ = true; }
  bool abandoned() const noexcept { return abandoned_; }
  void next_round() noexcept { quiet_ = abandoned_ = false; }
  // Another one in the place of one that has ended. What was enqueued on that one is done, or will never be.
  void replace(std::unique_ptr<Connection> connection);
  const History &history() const noexcept { return history_; }
  Connection &connection() noexcept { return *connection_; }
  const Connection &connection() const noexcept { return *connection_; }
  const Library &library() const noexcept { return *library_; }
  // Everything that was enqueued is done, within this time.
  bool drain(uint32_t timeout_ms) const noexcept;

  // -- the guard's thread --
  std::optional<Error> look() noexcept override;
  std::string awaited() const override;
  std::shared_ptr<Handle> handle() const override;

 private:
  class Launching;
  // More than a stream takes: CUDA lets about a thousand pieces of work wait there, and a collective is four. So the
  // one that the GPU is at is among them.
  static constexpr uint64_t kept = 512;
  static constexpr auto patience = std::chrono::seconds(2);  // before peers that have left are blamed
  struct LaunchSlot {
    std::unique_ptr<device::Event> begin, end;
    std::string what;
  };

  LaunchSlot &slot(uint64_t number) { return slots_[number % kept]; }
  const LaunchSlot &slot(uint64_t number) const { return slots_[number % kept]; }
  bool done(uint64_t number) const { return slot(number).end->done(); }
  void add_to_history(uint64_t what) noexcept;
  Clock::duration stalled();
  // How long the caller has been in NCCL with a launch, while the GPU was done with all before. It waits there for
  // peers that are not connected yet, and not for room in its stream. After stalled().
  Clock::duration held();
  void mark_launching(bool launching);

  // The caller's; replaced under the lock, under which the guard takes the handle.
  std::unique_ptr<Connection> connection_;
  const std::shared_ptr<const Library> library_;
  const uint32_t world_rank_;
  std::shared_ptr<LaunchOrder> order_;
  uint64_t &launched_;
  const Waiter &waiter_;
  Failure &failure_;
  bool quiet_ = false, abandoned_ = false;
  History history_;
  std::string what_;  // the collective between begin and end

  // No thread is in CUDA or NCCL with it: both may block until peers come, or until the guard frees the GPU.
  mutable std::mutex mutex_;
  // The caller writes the slot of the collective that comes, which the guard leaves alone; the others are only read.
  LaunchSlot slots_[kept];
  uint64_t next_ = 0;    // the number of the collective that comes; written under the lock
  uint64_t oldest_ = 0;  // all before are done, or forgotten; under the lock, as what follows
  uint64_t stalled_at_ = UINT64_MAX;
  std::optional<Clock::time_point> launching_since_;
  Clock::time_point stalled_since_;
};

}  // namespace fsdp::transport::nccl
