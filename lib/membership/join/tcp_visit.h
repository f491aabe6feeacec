// SPDX-License-Identifier: Apache-2.0
// The side of every rank but 0 at a TCP rendezvous. Of each host the first rank that comes finds rank 0, proves the
// secret, joins, and takes the others along, which come to it in the same way; all wait for the roster.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "membership/join/guest.h"
#include "membership/join/rendezvous.h"
#include "membership/join/uplink.h"
#include "membership/launch/meeting_point.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

// Where the ranks of one host come together before one of them goes to rank 0: an abstract unix socket by a name that
// ranks of this host, job and attempt know. The first that has the name goes, and takes the others along.

class HostMeeting {
 public:
  // host_id: what the ranks of a host have in common.
  HostMeeting(const WorldOptions &options, const std::string &host_id);

  // Does this rank have the name? Asked again, it may have become free: its owner has ended.
  bool take();
  bool taken() const noexcept { return static_cast<bool>(socket_); }
  // Of another rank that has it; empty, with `problem` set, if that does not take connections.
  Fd visit(std::string &problem) const;
  // The user of the process that listens there, if it is another one.
  std::optional<uint32_t> stranger() const noexcept { return stranger_; }

  // Ranks of other hosts may come, too, to the interface of this address. Returns where; empty: they cannot.
  std::string listen_for_hosts(Endpoint at);
  // Opens it. The caller takes from these.
  std::span<const Fd> open();
  void close() noexcept;

 private:
  Address address_;
  Fd socket_, hosts_;
  std::vector<Fd> listeners_;
  mutable std::optional<uint32_t> stranger_;
};

class TcpVisit {
 public:
  TcpVisit(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  // Each empty: try again.
  std::optional<Assembly> visit_host();
  std::optional<Assembly> visit_zero();
  std::optional<Assembly> visit_place(const Endpoint &place, Above above);
  std::optional<Assembly> visit(Fd socket, const std::string &place, const Above &above);
  std::vector<Endpoint> places();
  Fd connect(const Endpoint &place);
  std::optional<FrameStream> prove_on(Fd socket, const std::string &place);
  void say_hello(Uplink &uplink, const Endpoint &here);
  void say_card(Uplink &uplink);
  bool await_start(Uplink &uplink);
  bool host_is_late() const;
  void note_problem(std::string problem);
  [[noreturn]] void give_up() const;
  // In a large job most ranks wait at one door at first, and many may share a machine.
  Limit limit(Clock::duration most) const {
    return {std::min(deadline_, Clock::now() + most), waiter_, slice_ms_of(options_.size)};
  }

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  const MakeCard &make_card_;
  Clock::time_point since_, deadline_, tried_;  // tried_: when the last try to reach rank 0 began
  std::string label_, host_id_;
  NameLookup names_;
  std::string last_problem_;
  bool found_problem_ = false;  // it is what a try has found
  bool alone_ = false;          // what listens where the ranks of this host meet is none of them
  HostMeeting host_meeting_;
  std::optional<message::Redirect> redirect_;  // where rank 0, or one below it, has sent this rank
  std::optional<message::Card> card_;          // once this rank has reached the rendezvous
};

}  // namespace fsdp::membership
