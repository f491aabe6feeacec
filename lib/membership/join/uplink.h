// SPDX-License-Identifier: Apache-2.0
// The connections of a rank other than 0 while the job forms: upward to rank 0 or to a rank between, and downward to
// the ranks that have joined through it. Messages from above go to all ranks below, and messages from below go up.
//
// From the time when the rank joins, this is also its FormingWatch.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "membership/join/admission.h"
#include "membership/join/forming_watch.h"
#include "membership/join/roster.h"

namespace fsdp::membership {

// The rank at the other end of the upward connection.
struct Above {
  uint32_t rank = 0;
  std::string host = {};  // empty: still unknown
};

class Uplink final : public FormingWatch {
 public:
  using Clock = std::chrono::steady_clock;
  // `address`: of the interface through which this host reaches rank 0. Empty: the rank above is on this host, and
  // sends the address.
  Uplink(const WorldOptions &options, FrameStream up, Above above, std::string address, Clock::time_point deadline,
         const Waiter &waiter);
  ~Uplink() override;

  // -- until the job starts --
  void say(const message::Message &message) { up_.queue(message::share(message)); }
  bool admitted() const noexcept { return admitted_; }
  const std::string &address() const noexcept { return address_; }
  bool by_host() const noexcept { return by_host_; }
  // Lets other ranks join through this one until the job starts. The listeners and the label must exist until then.
  void open(std::span<const Fd> listeners, const std::string &label);
  // Sleeps until there is something to read, or for a short time, and then reads all connections. Throws the error that
  // ends the job.
  void serve();
  bool started() const noexcept { return session_.has_value(); }
  // True when everything for the ranks below is sent, including the start of the job.
  bool passed_on() { return below_.flush(); }
  // again() is set, with the reason, when this rank must join again; redirect() when it must join at another
  // rank.
  const std::optional<std::string> &again() const noexcept { return again_; }
  const std::optional<message::Redirect> &redirect() const noexcept { return redirect_; }
  // Gives up this connection upward. The ranks below join again, too.
  void leave() noexcept;
  Roster take_roster() { return std::move(roster_); }
  const Nonce &session() const { return *session_; }

  void look() override;
  Error settle(const Error &error) override;
  void finish() noexcept override;

 private:
  void hear();
  void hear_above();
  void obey(const Frame &frame);
  void obey(const message::Refused &refused, const Frame &frame);
  void check_above();
  void hear_below(Branch &branch);
  static bool is_of(const Branch &branch, const message::Parsed &parsed);
  void pass_up(Branch &branch, const Frame &frame);
  void refuse(Branch &branch);
  void check_below(Branch &branch);
  void admit(FrameStream &stream, message::Join &join);
  void end(const Error &error);
  void end(const Error &error, const Accusation &verdict);
  void await_verdict(Clock::duration time);
  void report_last(const Error &error);
  void tell_above(const message::Message &word) noexcept;
  std::string own_text() const;
  std::string above_text() const;

  const WorldOptions &options_;
  const uint32_t rank_;
  FrameStream up_;
  Above above_;
  std::string address_;
  const bool by_host_;  // the rank above is on this host
  const Waiter &waiter_;
  Clock::time_point deadline_, looked_{};
  Branches below_;
  std::unique_ptr<Admission> admission_;
  bool admitted_ = false;
  std::optional<std::string> again_;
  std::optional<message::Redirect> redirect_;
  Roster roster_;
  std::optional<Nonce> session_;
  std::optional<Error> end_;
  bool formed_ = false, finished_ = false;  // the rank above has sent Formed; this rank has finished or left
};

}  // namespace fsdp::membership
