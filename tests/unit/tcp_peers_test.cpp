// SPDX-License-Identifier: Apache-2.0
// Tests a rank's table of the other ranks. Existing entries are found without a lock while new ones are made.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "transport/message/tcp/transport.h"

namespace fsdp::transport::tcp {
namespace {

NetAddresses addresses_of(uint32_t ranks) {
  NetAddresses addresses;
  for (uint32_t r = 0; r < ranks; ++r) {
    const std::string text = r % 3 ? "10.0.0.1:" + std::to_string(1000 + r) : "";
    addresses.add(std::as_bytes(std::span(text)));
  }
  return addresses;
}

TEST(TcpPeers, ExistFromTheirFirstUseOn) {
  Peers peers;
  EXPECT_TRUE(peers.empty());
  peers.set_addresses(addresses_of(5));
  EXPECT_EQ(peers.size(), 5U);
  EXPECT_EQ(peers.address(0), "");
  EXPECT_EQ(peers.address(4), "10.0.0.1:1004");
  EXPECT_EQ(peers.find(4), nullptr);
  Peer &four = peers[4];
  Peer &one = peers[1];
  EXPECT_NE(&four, &one);
  EXPECT_EQ(&peers[4], &four);
  EXPECT_EQ(peers.find(1), &one);
  EXPECT_EQ(peers.find(0), nullptr);
  size_t count = 0;
  EXPECT_TRUE(peers.all_of([&](const Peer &) { return ++count; }));
  EXPECT_EQ(count, 2U);
  EXPECT_FALSE(peers.all_of([&](const Peer &peer) { return &peer == &four; }));
}

// Looks up the known ranks, as the thread does.
TEST(TcpPeers, AreFoundWhileOthersAreMade) {
  constexpr uint32_t ranks = 16384;
  for (int turn = 0; turn < 5; ++turn) {
    Peers peers;
    peers.set_addresses(addresses_of(ranks));
    const Peer *first = &peers[7];
    std::atomic<bool> stop{false};
    uint64_t looks = 0, lost = 0;
    std::thread thread([&] {
      do {
        lost += &peers[7] != first || peers.find(7) != first;
        ++looks;
      } while (!stop.load(std::memory_order_relaxed));
    });
    for (uint32_t r = 0; r < ranks; ++r) peers[r];
    stop = true;
    thread.join();
    EXPECT_EQ(lost, 0U) << "of " << looks;
  }
}

}  // namespace
}  // namespace fsdp::transport::tcp
