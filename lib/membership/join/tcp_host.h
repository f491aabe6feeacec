// SPDX-License-Identifier: Apache-2.0
// Rank 0's side of a TCP rendezvous: it accepts ranks that prove the secret, and when all have joined, sends the roster
// to all. The listener closes before that. If the job cannot form, rank 0 tells the reason to the ranks that have
// joined or are about to join.
//
// The ranks of a host share one connection. Once join_degree hosts have joined, further hosts join through them.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "membership/join/admission.h"
#include "membership/join/forming_watch.h"
#include "membership/join/rendezvous.h"
#include "membership/launch/meeting_point.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

// The sockets on which rank 0 of a TCP rendezvous listens: only at the interface that the rendezvous names. If the name
// is a loopback address on this host, rank 0 also listens at the interface through which other hosts reach it.

class RendezvousListener {
 public:
  using Clock = std::chrono::steady_clock;
  // Waits a short time if another job, which is ending, still listens there. Throws if it cannot listen at any address.
  RendezvousListener(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter,
                     Clock::time_point deadline, NameLookup &names);

  // The numeric address to which ranks of other hosts connect.
  std::string address() const { return outer().address(); }
  // "10.0.0.1:29500", with remarks that help to explain why a rank does not arrive.
  std::string text() const;
  std::span<const Fd> listeners() const noexcept { return listeners_; }

 private:
  std::vector<Endpoint> find_places(Clock::time_point deadline, NameLookup &names);
  bool open(const std::vector<Endpoint> &places);
  void open_outer();
  const Endpoint &outer() const { return ends_.back(); }

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  std::vector<Fd> listeners_;
  std::vector<Endpoint> ends_;  // address of each listener
  std::string remark_;
  std::unique_ptr<Notice> notice_;
};

class TcpHost {
 public:
  TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  using Party = RootFormingWatch::Party;

  void gather();
  void look_around();
  void admit(FrameStream &stream, message::Join &join);
  void admit(Branch &branch, message::Join &join);
  // Says why the rank of this Join cannot join; empty: it can.
  std::optional<message::Refused> check(const message::Join &join);
  void check_limits();
  void say_farewell(const Error &error) noexcept;
  void dismiss_guests();
  std::vector<uint32_t> missing() const;
  Roster make_roster();
  void send_roster(const Assembly &assembly);

  const WorldOptions &options_;
  const MeetingPoint &point_;
  const Waiter &waiter_;
  const MakeCard &make_card_;
  Clock::time_point deadline_;
  std::string label_;
  NameLookup names_;
  Fd events_ = Acceptor::make_events();  // closed, or taken over by the admission
  std::unique_ptr<RendezvousListener> listener_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<RootFormingWatch> watch_;
  std::optional<Error> end_;  // the error for ranks that arrive from now on
  RankSet told_;              // ranks that got the error before they had joined
  size_t told_count_ = 0;
  bool outdated_ = false;  // a rank of a later attempt has arrived
};

}  // namespace fsdp::membership
