// SPDX-License-Identifier: Apache-2.0
// All waits of one rank for its peers. A wait ends when the awaited event has happened, or with an error: the job's
// verdict, this context's failure, the caller's interrupted hook, a peer that died, stopped or left, or the timeout.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"
#include "membership/liveness/control.h"
#include "membership/liveness/failure_detector.h"
#include "membership/liveness/links.h"
#include "membership/liveness/waits.h"

namespace fsdp::membership {

// An event for which a rank waits. Only come() is on the fast path.
class Awaited {
 public:
  virtual bool come() = 0;
  // True if the wait may end before the event, without an error of the context.
  virtual bool given_up() { return false; }
  // Sleeps until the event may have happened, at most `ms`.
  virtual void sleep(uint32_t ms) = 0;
  // The ranks that may be missing; empty: no list is known.
  virtual std::span<const uint32_t> concerned() const { return {}; }
  // Is this rank of the job missing, because it has not done its part yet?
  virtual bool misses(uint32_t world_rank) const = 0;
  // Is this rank to blame for a timeout? It is not if it waits itself for a rank that is further behind.
  virtual bool lags(uint32_t world_rank) const { return misses(world_rank); }
  // Does a rank do its part only by a call of its caller, and not by the work of its streams?
  virtual bool needs_callers() const { return false; }
  // Is this rank missing until its caller makes a call?
  virtual bool misses_caller(uint32_t world_rank) const { return needs_callers() && misses(world_rank); }
  // How late does this wait learn of the calls of others?
  virtual Late late() const { return Late::no; }
  // For messages, such as "reduce_scatter of 'layer.3' (#17)".
  virtual std::string text() const = 0;

 protected:
  ~Awaited() = default;
};

class Watch final : WaitObserver {
 public:
  Watch(Control &control, Links &links, const Pulse &pulse, uint32_t rank, const Waiter &waiter, Failure &failure);
  ~Watch();

  // Declares this thread to be the caller's: waits on this thread poll the waiter and its hook, waits on other threads
  // do not.
  void enter_caller() noexcept;
  // Returns false if the wait was given up.
  bool wait(Awaited &awaited);
  // Fails the job and throws its verdict. Every rank returns the first verdict of the job.
  [[noreturn]] void condemn(FailureKind kind, uint32_t rank, const std::string &text,
                            fsdp_origin origin = FSDP_ORIGIN_FSDP, int32_t origin_code = 0);
  // Throws if the job or this context failed.
  void check();
  // Has the job or this context failed? If the context has, tells the other ranks the reason, as check() does.
  bool has_failed() noexcept;
  // Calls check(). Fails the job if one of these ranks has died or stopped or, with `waited`, has left.
  void look_at(std::span<const uint32_t> ranks, const std::string &what, bool waited);
  // For errors that a library thread finds: fails the context, and with it every wait.
  void fail(const Error &error) noexcept { failure_.set(error); }
  uint32_t timeout_ms() const noexcept { return waiter_.timeout_ms(); }

 private:
  bool spin(Awaited &awaited);
  [[noreturn]] void condemn_leaver(uint32_t rank, const std::string &what);
  // `left_since`: when this wait first saw that a rank of another node had left.
  void check_leavers(Awaited &awaited, std::chrono::steady_clock::time_point &left_since);
  void check_deaths(Awaited &awaited);
  void check_silence(Awaited &awaited);
  void find_dead(Deaths &dead) { dead.find(control_, links_, pulse_); }
  // Called while the caller waits for the stream of this thread: shows the stream's wait as the caller's.
  void look(uint64_t thread) override;
  void look_away() noexcept override { stream_wait_.reset(); }
  void look_for_cycle(Awaited &awaited, std::optional<StreamWait> &stream, std::optional<ShownWait> &shown);
  [[noreturn]] void condemn_cycle(const ShownWait &shown, const std::vector<uint32_t> &ranks);
  [[noreturn]] void condemn(const Accusation &accusation);
  uint32_t find_late(uint32_t missing) const;
  [[noreturn]] void time_out(Awaited &awaited);
  [[noreturn]] void throw_verdict();

  Control &control_;
  Links &links_;
  const Pulse &pulse_;
  uint32_t rank_;
  const Waiter &waiter_;
  Failure &failure_;
  std::atomic<uint64_t> caller_{0};
  StreamWaits streams_;
  std::optional<ShownWait> stream_wait_;  // shown while the caller waits for one of its streams
};

}  // namespace fsdp::membership
