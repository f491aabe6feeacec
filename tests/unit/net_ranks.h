// SPDX-License-Identifier: Apache-2.0
// Ranks that reach each other by messages alone, as on hosts of their own: each has a job memory that no other sees.
// Shared memory is used by the tests only, to pass addresses on and to meet.
#pragma once

#include <cstdlib>

#include "comm/net.h"
#include "message_bodies.h"

namespace fsdp::comm::test {

constexpr uint64_t messages_key = 11, exchanges_key = 12;

struct NetRank {
  explicit NetRank(Rank &rank)
      : rank(rank),
        seat(create_lone_seat(rank.rank(), rank.size(), rank.waiter, rank.failure, *rank.device)),
        net(create_net(rank.rank())) {
    net->join(rank.team->all_gather(net->address(), "addresses"), seat);
    for (uint32_t r = 0; r < rank.size(); ++r) all.push_back(r);
  }
  MessageBench bench(uint64_t key = messages_key) {
    return MessageBench(rank, net->create_communicator(all, key, "messages"));
  }
  Rank &rank;
  std::shared_ptr<Seat> seat;
  std::unique_ptr<Net> net;
  std::vector<uint32_t> all;
};

inline void use_loopback() {
  ::setenv("UCX_TLS", "tcp,self", 1);
  ::setenv("UCX_NET_DEVICES", "lo", 0);
  ::setenv("FSDP_UCX_TCP", "trusted", 1);
}

}  // namespace fsdp::comm::test
