// SPDX-License-Identifier: Apache-2.0
// The side of every rank of a host but its lowest, the leader: finds the leader, proves the secret, joins, and waits
// for the start.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "membership/join/process_links.h"
#include "membership/join/rendezvous.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

class Visit {
 public:
  // ranks: those of this host, in order. Of a job on one host: all.
  Visit(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter);
  Rendezvous run();

 private:
  using Clock = std::chrono::steady_clock;
  bool connect();
  bool authenticate();  // false: try again
  // The next packet; one of 0 bytes at the end of the connection. Throws at the deadline.
  Packet hear(Clock::time_point deadline, const char *waiting_for);
  void open_doors();
  void join();
  Rendezvous await_start();
  [[noreturn]] void obey(const wire::Refusal &refusal) const;
  void pause();

  const WorldOptions &options_;
  const size_t rank_count_;  // of this host
  const int32_t leader_;
  const Waiter &waiter_;
  Clock::time_point deadline_;
  std::string last_problem_;
  Fd socket_;
  Doors doors_;
};

}  // namespace fsdp::membership
