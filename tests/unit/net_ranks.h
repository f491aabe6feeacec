// SPDX-License-Identifier: Apache-2.0
// Ranks reach each other by messages alone, as if each had its own host: each has a job memory that no other rank sees.
// Only the tests use shared memory, to pass addresses on and to meet.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "message_bodies.h"
#include "transport/message/channel/transport.h"
#include "transport/net.h"

namespace fsdp::transport::test {

constexpr uint64_t messages_key = 11, exchanges_key = 12;

// FSDP_NET=ucx selects UCX; otherwise it is TCP.
inline bool over_ucx() {
  const char *wire = std::getenv("FSDP_NET");
  return wire && std::string(wire) == "ucx";
}
inline std::unique_ptr<Net> create_test_net(uint32_t rank) {
  return over_ucx() ? create_ucx_net(rank, false) : create_tcp_net(rank, "127.0.0.1", read_net_protection());
}
inline NetJob test_job(const std::vector<std::vector<std::byte>> &addresses) {
  return {NetAddresses(addresses), "a secret of tests", "a job of tests", 8000, {}};
}

struct NetRank {
  explicit NetRank(Rank &rank)
      : rank(rank),
        seat(create_lone_seat(rank.rank(), rank.size(), rank.waiter, rank.failure)),
        net(create_test_net(rank.rank())) {
    net->join(test_job(rank.team->all_gather(net->address(), "addresses")), seat, *rank.device);
    for (uint32_t r = 0; r < rank.size(); ++r) all.push_back(r);
  }
  MessageBench bench(uint64_t key = messages_key) {
    return MessageBench(rank, net->create_collectives(all, key, "messages"));
  }
  Rank &rank;
  std::shared_ptr<Seat> seat;
  std::unique_ptr<Net> net;
  std::vector<uint32_t> all;
};

// Receives messages and notes what it hears.
class Ear final : public messages::Receiver {
 public:
  void control(const messages::Header &header, const void *, uint64_t) override { heard = header.number; }
  messages::Place place(const messages::Header &, uint64_t) override { return {}; }
  void arrived(const messages::Header &) override {}
  void lost(const messages::Header &) override {}
  void sent(messages::Kind, uint32_t) override {}
  void peer_failed(uint32_t peer) override { failed = peer; }
  void move_on() override {}
  uint64_t heard = 0;
  std::optional<uint32_t> failed;
};

inline void expect_well(const std::vector<std::string> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

// Runs every collective, in two rounds.
inline void all_messages(Rank &rank) {
  NetRank mine(rank);
  MessageBench bench = mine.bench();
  check_messages(bench, 0, odd_counts);
  end_round(bench);
  check_messages(bench, 1000, {5, 65'538});
  rank.meet();
}

inline void use_loopback() {
  ::setenv("UCX_TLS", "tcp,self", 1);
  ::setenv("UCX_NET_DEVICES", "lo", 0);
  ::setenv("FSDP_UCX_TCP", "trusted", 1);
}

}  // namespace fsdp::transport::test
