// SPDX-License-Identifier: Apache-2.0
// Where rank 0 of a TCP rendezvous listens: at the interface of the rendezvous alone, and where its name leads no
// further than this host, at that by which others come, too.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "membership/launch/meeting_point.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

class TcpDoor {
 public:
  using Clock = std::chrono::steady_clock;
  // Waits a moment for a job that is just ending to leave the place. Throws if nothing can be listened at.
  TcpDoor(const WorldOptions &options, const MeetingPoint &point, const Waiter &waiter, Clock::time_point deadline,
          NameLookup &names);

  // The numeric address by which ranks of other hosts come.
  std::string address() const { return outer().address(); }
  // "10.0.0.1:29500", and what there is to know about it if somebody does not come.
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
  std::vector<Endpoint> ends_;  // of each
  std::string remark_;
  std::unique_ptr<Notice> notice_;
};

}  // namespace fsdp::membership
