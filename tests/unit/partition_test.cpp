// SPDX-License-Identifier: Apache-2.0
// Nodes run on hosts of their own (network namespaces) that are cut off from each other. The tests need root and the ip
// tool.
#include "node_job.h"
#include "test_network.h"

namespace fsdp::transport::test {
namespace {

class Partition : public testing::Test {
 protected:
  void build(const std::vector<uint32_t> &ranks_of_nodes, uint32_t limit_ms, const NodeBody &body = train,
             bool all_exchange = true) {
    const auto nodes = static_cast<uint32_t>(ranks_of_nodes.size());
    network = std::make_unique<TestNetwork>(nodes);
    ASSERT_TRUE(network->works());
    job = std::make_unique<NodeJob>(ranks_of_nodes, limit_ms);
    job->all_exchange = all_exchange;
    for (uint32_t n = 0; n < nodes; ++n) job->place(n, network->space(n), network->address(n));
    job->start(body);
    ASSERT_TRUE(job->await_steps(20));
  }
  void expect_well() {
    job->common().stop = true;
    ASSERT_TRUE(job->collect(10)) << "a rank hangs";
    for (uint32_t r = 0; r < job->size(); ++r) EXPECT_EQ(job->common().status[r], FSDP_OK) << job->text(r);
  }
  std::unique_ptr<TestNetwork> network;
  std::unique_ptr<NodeJob> job;
};

// The leaders report the cut although the test's gates still work, because they do not use the network.
TEST_F(Partition, OfTwoNodesBlamesTheLinkOnBothSides) {
  build({2, 1}, 2000);
  if (HasFatalFailure()) return;
  const int64_t cut_ns = now_ns();
  ASSERT_TRUE(network->cut(1));
  ASSERT_TRUE(job->collect(15)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, -1,
              "no contact between host h0 (node 0) and host h1 (node 1) for 2.0 s: the network between them is cut", {},
              cut_ns, 2.0 + 4);
}

TEST_F(Partition, OfOneOfThreeNodesBlamesItsLinks) {
  int64_t cut_ns = 0;
  // A busy machine may delay a node, so that it reports its link after the others have agreed on theirs. Then the test
  // tries again.
  for (int tries = 0; tries < 5; ++tries) {
    job.reset();
    network.reset();
    build({1, 2, 1}, 2000);
    if (HasFatalFailure()) return;
    cut_ns = now_ns();
    ASSERT_TRUE(network->cut(2));
    ASSERT_TRUE(job->collect(15)) << "a rank hangs";
    if (job->text(0).find(", between ") != std::string::npos) break;
  }
  job->expect(FSDP_PEER_FAILED, -1,
              "no contact between host h0 (node 0) and host h2 (node 2), between host h1 (node 1) and host h2 (node 2) "
              "for 2.0 s: the network between them is cut",
              {}, cut_ns, 2.0 + 4);
}

// Neither node has a connection to the other in the tree of leaders, but their ranks send each other messages.
TEST_F(Partition, BetweenTwoThatAreNoNeighboursInTheTreeBlamesTheirLink) {
  build({1, 2, 1}, 2000);
  if (HasFatalFailure()) return;
  const int64_t cut_ns = now_ns();
  ASSERT_TRUE(network->part(1, 2));
  ASSERT_TRUE(job->collect(15)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, -1,
              "no contact between host h1 (node 1) and host h2 (node 2) for 2.0 s: the network between them is cut", {},
              cut_ns, 2.0 + 4);
}

TEST_F(Partition, BetweenTwoThatHealsBeforeTheLimitIsNoFailure) {
  build({1, 1, 1}, 4000);
  if (HasFatalFailure()) return;
  ASSERT_TRUE(network->part(1, 2));
  pause_ms(3000);
  ASSERT_TRUE(network->join(1, 2));
  pause_ms(3000);
  expect_well();
}

TEST_F(Partition, BetweenTwoThatSendEachOtherNothingIsNoFailure) {
  build({1, 1, 1}, 1000, train, false);
  if (HasFatalFailure()) return;
  ASSERT_TRUE(network->part(1, 2));
  pause_ms(3500);
  expect_well();
}

// Heartbeats alone would suggest a cut, but a neighbour in the tree knows better.
TEST_F(Partition, AStoppedLeaderIsNotACutLinkToThoseThatAreNoNeighbours) {
  build({1, 1, 1, 1}, 1500);
  if (HasFatalFailure()) return;
  const int64_t stopped_ns = now_ns();
  job->send(3, SIGSTOP);
  pause_ms(3500);
  job->send(3, SIGCONT);
  ASSERT_TRUE(job->collect(10)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 3, "has not responded for 1.5 s: it is stopped or its host is overloaded", {3},
              stopped_ns, 1.5 + 4);
}

// The cut begins at moments at which TCP would send again only after the limit.
TEST_F(Partition, ThatHealsBeforeTheLimitIsNoFailure) {
  build({2, 1, 1}, 10'000);
  if (HasFatalFailure()) return;
  for (const int64_t ms : {1500, 5000, 7000}) {
    ASSERT_TRUE(network->cut(1));
    pause_ms(ms);
    ASSERT_TRUE(network->heal(1));
    pause_ms(1500);
  }
  expect_well();
}

TEST_F(Partition, AStoppedLeaderIsNotACutLink) {
  build({1, 1}, 1500);
  if (HasFatalFailure()) return;
  const int64_t stopped_ns = now_ns();
  job->send(1, SIGSTOP);
  pause_ms(3500);
  job->send(1, SIGCONT);
  ASSERT_TRUE(job->collect(10)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 1, "has not responded for 1.5 s: it is stopped or its host is overloaded", {1},
              stopped_ns, 1.5 + 4);
  EXPECT_EQ(job->common().rank[1], 1) << job->text(1);
}

// A rank dies behind a cut that heals, while the ranks that saw the death are still there to report it.
TEST_F(Partition, ADeathDuringACutIsNamedOnBothSides) {
  build({2, 2}, 4000, [](NodeRank &rank) {
    const Error error = test::error_of([&] { train(rank); });
    if (rank.rank == 2) pause_ms(3000);
    throw error;
  });
  if (HasFatalFailure()) return;
  ASSERT_TRUE(network->cut(1));
  pause_ms(300);
  const int64_t killed_ns = now_ns();
  job->send(3, SIGKILL);
  pause_ms(1000);
  ASSERT_TRUE(network->heal(1));
  ASSERT_TRUE(job->collect(10)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 3, "rank 3 died", {3}, killed_ns, 6.0);
}

}  // namespace
}  // namespace fsdp::transport::test

int main(int argc, char **argv) {
  testing::InitGoogleTest(&argc, argv);
  if (fsdp::transport::test::TestNetwork::possible()) return RUN_ALL_TESTS();
  std::printf("skipped: network namespaces need root and the ip tool\n");
  return 77;
}
