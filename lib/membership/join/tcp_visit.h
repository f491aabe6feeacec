// SPDX-License-Identifier: Apache-2.0
// The side of every rank except rank 0 at a TCP rendezvous. On each host, the first rank to arrive finds rank 0, proves
// the secret and joins. The other ranks of the host connect to that rank and join through it. Then all wait for the
// roster.
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

// The place where the ranks of one host meet before one of them goes to rank 0: an abstract unix socket, whose name
// only ranks of this host, job and attempt know. The first rank that binds the name goes to rank 0, and the others join
// through it.

class HostMeeting {
 public:
  // `host_id`: identity of this host, the same for all of its ranks.
  HostMeeting(const WorldOptions &options, const std::string &host_id);

  // Tries to bind the name; true if this rank has the name now. A later try may succeed, because the owner may have
  // ended.
  bool take();
  bool taken() const noexcept { return static_cast<bool>(socket_); }
  // Connects to the rank that has the name. Returns an empty Fd, and sets `problem`, if that rank does not accept
  // connections yet or the process belongs to another user.
  Fd visit(std::string &problem) const;
  // The user of the process that listens at the name, if that is not the user of this process.
  std::optional<uint32_t> other_user() const noexcept { return other_user_; }

  // Also accepts ranks of other hosts, at the interface of this address. Returns the address with its port; empty: it
  // could not listen there.
  std::string listen_for_hosts(Endpoint at);
  // Starts to listen. Returns the listeners, from which the caller accepts.
  std::span<const Fd> open();
  void close() noexcept;

 private:
  Address address_;
  Fd socket_, hosts_;
  std::vector<Fd> listeners_;
  mutable std::optional<uint32_t> other_user_;
};

class TcpVisit {
 public:
  TcpVisit(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  // Each of these functions returns nothing if this rank must try again.
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
  // A limit of at most `most`, which also ends at the deadline. In a large job most ranks first wait for the same rank,
  // and many may share a machine. So the time between two looks depends on the number of ranks.
  Limit limit(Clock::duration most) const {
    return {std::min(deadline_, Clock::now() + most), waiter_, slice_ms_of(options_.size)};
  }

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  const MakeCard &make_card_;
  Clock::time_point since_, deadline_, tried_;  // tried_: beginning of the last try to reach rank 0
  std::string label_, host_id_;
  NameLookup names_;
  std::string last_problem_;
  bool found_problem_ = false;  // last_problem_ was found by a try
  bool alone_ = false;          // goes to rank 0 alone, because the host's meeting place cannot be used
  HostMeeting host_meeting_;
  std::optional<message::Redirect> redirect_;  // the rank to which rank 0, or a rank below it, has sent this rank
  std::optional<message::Card> card_;          // made when this rank has reached the rendezvous
};

}  // namespace fsdp::membership
