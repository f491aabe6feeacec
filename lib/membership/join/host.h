// SPDX-License-Identifier: Apache-2.0
// The side of the lowest rank of a host: listens, lets in processes that prove the secret, and starts the job when all
// have joined.
#pragma once

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "membership/join/guest.h"
#include "membership/join/rank_links.h"
#include "membership/join/rendezvous.h"
#include "membership/wire/acceptor.h"
#include "membership/wire/packet.h"

namespace fsdp::membership {

class Host {
 public:
  // ranks: those of this host, in order. Of a job on one host: all.
  Host(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter);
  Rendezvous run();

 private:
  using Clock = std::chrono::steady_clock;
  // Has proven the secret and has not joined.
  struct Guest {
    Fd socket;
    Clock::time_point deadline;
  };
  struct ExpectedRank {
    Fd connection;
    PeerDescriptors descriptors;
    bool expected = false, taken = false;
  };

  void listen();
  void look_around();
  void hear(Guest &guest);
  void obey(const Report &report);
  void join(Guest &guest, Packet &packet);
  void check_joined();
  [[noreturn]] void lose(uint32_t rank) const;
  void start_all();
  void send_all(uint32_t to, const void *message, size_t bytes, std::span<const int> files);
  [[noreturn]] void cancel(const Error &error);
  void say_farewell() noexcept;
  void check_limits();
  std::vector<uint32_t> missing() const;

  const WorldOptions &options_;
  const std::span<const uint32_t> ranks_;
  const Waiter &waiter_;
  Clock::time_point deadline_;
  Fd listener_;
  RefusalLog refusals_, known_refusals_;  // of strangers, and of processes that know the secret
  std::optional<Acceptor> acceptor_;      // while it listens
  std::vector<Guest> guests_;
  std::optional<Verdict> end_;       // what ranks that come now are told
  size_t told_ = 0;                  // how many of those that had not joined
  std::vector<ExpectedRank> seats_;  // by rank of the job
  uint32_t joined_ = 1;
  RankDescriptors descriptors_;
  Fd control_;
};

}  // namespace fsdp::membership
