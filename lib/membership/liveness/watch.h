// SPDX-License-Identifier: Apache-2.0
// Every wait for peers of one rank. A wait ends when what is awaited has come, or with an error: the job's verdict,
// this context's failure, the caller's interrupted hook, a dead peer, a stopped one, one that left, the timeout.
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
#include "membership/liveness/deaths.h"
#include "membership/liveness/links.h"
#include "membership/liveness/pulse.h"
#include "membership/liveness/waits.h"

namespace fsdp::membership {

// What is waited for. Only come() is on the fast path.
class Awaited {
 public:
  virtual bool come() = 0;
  // The wait need not go on, though nothing has come, and it is not an error of the context.
  virtual bool given_up() { return false; }
  // Until it may have come, at most `ms`.
  virtual void sleep(uint32_t ms) = 0;
  // The ranks that it may miss; empty: it has no list of them.
  virtual std::span<const uint32_t> concerned() const { return {}; }
  // Is this rank of the job one that has not come?
  virtual bool misses(uint32_t world_rank) const = 0;
  // ... and the one to blame for a timeout? Not one that waits itself for a rank further behind.
  virtual bool lags(uint32_t world_rank) const { return misses(world_rank); }
  // Does each rank come by a call of its own, and by nothing that its streams do?
  virtual bool needs_callers() const { return false; }
  // Is this rank one that has not come, and that will not before its caller makes a call?
  virtual bool misses_caller(uint32_t world_rank) const { return needs_callers() && misses(world_rank); }
  // How late does it hear of the calls of others?
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

  // Says that this thread is the caller's: waits on it poll the waiter with its hook, waits on others do not.
  void enter_caller() noexcept;
  // False: given up.
  bool wait(Awaited &awaited);
  // Fails the job: every rank reports the first such verdict, and so does this call.
  [[noreturn]] void condemn(FailureKind kind, uint32_t rank, const std::string &text,
                            fsdp_origin origin = FSDP_ORIGIN_FSDP, int32_t origin_code = 0);
  // Throws if the job or this context failed.
  void check();
  // Has the job or this context failed? Then every rank hears why, as check() tells them.
  bool has_failed() noexcept;
  // What check() throws, or if one of these ranks died or stopped, or has left while it is waited for: that fails the
  // job.
  void look_at(std::span<const uint32_t> ranks, const std::string &what, bool waited);
  // What a library thread finds: the context fails, and with it every wait.
  void fail(const Error &error) noexcept { failure_.set(error); }
  uint32_t timeout_ms() const noexcept { return waiter_.timeout_ms(); }

 private:
  bool spin(Awaited &awaited);
  [[noreturn]] void condemn_leaver(uint32_t rank, const std::string &what);
  // left_since: when this wait first saw one of another node that has left.
  void check_leavers(Awaited &awaited, std::chrono::steady_clock::time_point &left_since);
  void check_deaths(Awaited &awaited);
  void check_silence(Awaited &awaited);
  void find_dead(Deaths &dead) { dead.find(control_, links_, pulse_); }
  // The caller waits for what one of its streams waits for.
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
  std::optional<ShownWait> stream_wait_;  // the caller's, while it waits for a stream of its own
};

}  // namespace fsdp::membership
