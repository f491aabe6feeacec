// SPDX-License-Identifier: Apache-2.0
// Rank 0's side of a TCP rendezvous: lets in who proves the secret, and when all have joined, tells everybody who is
// where. The listener lives no longer. If the job cannot form, whoever has joined or is about to is told why.
//
// A host's ranks come by one connection, and from some number of hosts on they come by those that are here already.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "membership/join/admission.h"
#include "membership/join/host_vigil.h"
#include "membership/join/rendezvous.h"
#include "membership/join/tcp_door.h"

namespace fsdp::membership {

class TcpHost {
 public:
  TcpHost(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, const MakeCard &make_card);
  Assembly run();

 private:
  using Clock = std::chrono::steady_clock;
  using Party = HostVigil::Party;

  void gather();
  void look_around();
  void admit(FrameStream &stream, message::Join &join);
  void admit(Branch &branch, message::Join &join);
  // Why this rank cannot join; nothing: it can.
  std::optional<message::Refusal> check(const message::Join &join);
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
  std::unique_ptr<TcpDoor> door_;
  std::unique_ptr<Admission> admission_;
  std::unique_ptr<HostVigil> vigil_;
  std::optional<Error> end_;  // what everybody is told who comes now
  RankSet told_;              // of those who had not joined
  size_t told_count_ = 0;
  bool outdated_ = false;  // a rank of a later attempt has come
};

}  // namespace fsdp::membership
