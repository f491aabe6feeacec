// SPDX-License-Identifier: Apache-2.0
// How the leader of a host, its lowest rank, gathers the other ranks of the host: it listens, accepts processes that
// prove the secret, and starts the job when all ranks have joined.
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
  // `ranks`: the ranks of this host, in order. If the job is on one host, these are all ranks.
  Host(const WorldOptions &options, std::span<const uint32_t> ranks, const Waiter &waiter);
  Rendezvous run();

 private:
  using Clock = std::chrono::steady_clock;
  // A process that has proven the secret but has not joined yet.
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
  RefusalLog refusals_, known_refusals_;  // refusals of strangers, and of processes with the secret
  std::optional<Acceptor> acceptor_;      // exists while this rank listens
  std::vector<Guest> guests_;
  std::optional<Verdict> end_;       // the verdict for ranks that arrive from now on
  size_t told_ = 0;                  // number of ranks that know the verdict and had not joined
  std::vector<ExpectedRank> seats_;  // indexed by rank of the job
  uint32_t joined_ = 1;
  RankDescriptors descriptors_;
  Fd control_;
};

}  // namespace fsdp::membership
