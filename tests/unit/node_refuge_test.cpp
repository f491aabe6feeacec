// SPDX-License-Identifier: Apache-2.0
// A leader leaves in good order while others go on. Messages that went through it in the tree then go through a refuge.
#include "node_job.h"

namespace fsdp::transport::test {
namespace {

// A leader leaves in order without the others, and then passes nothing on. A refuge takes its place.
struct Layout {
  const char *name;
  std::vector<uint32_t> ranks_of_nodes;
  uint32_t degree, leaver;
};
class LeftAlone : public testing::TestWithParam<Layout> {
 protected:
  // body runs on the remaining ranks, some time later.
  void start(uint32_t heartbeat_timeout_ms, const NodeBody &body) {
    job = std::make_unique<NodeJob>(GetParam().ranks_of_nodes, heartbeat_timeout_ms);
    job->degree = GetParam().degree;
    job->forming_ms = silence_ms;
    job->all_exchange = false;
    job->start([body, leaver = GetParam().leaver](NodeRank &rank) {
      rank.meet(1);
      if (rank.rank == leaver)
        for (auto &gate : rank.common->words) gate[leaver].raise(UINT32_MAX);  // no rank misses it
      if (rank.rank == leaver) return;
      for (uint64_t step = 2; step < 200; ++step, pause_ms(2)) rank.meet(step);
      body(rank);
      rank.meet(1000);
    });
    ASSERT_TRUE(job->await_steps(1));
    job->common().steps[GetParam().leaver] = 198;
    ASSERT_TRUE(job->await_steps(198));
    since_ns = now_ns();
  }
  std::unique_ptr<NodeJob> job;
  int64_t since_ns = 0;
};
INSTANTIATE_TEST_SUITE_P(NodeTree, LeftAlone,
                         testing::Values(Layout{"ByTheRoot", {1, 2, 2, 1, 1}, tree_degree, 0},
                                         Layout{"ByAParentInALine", {2, 1, 2, 1}, 1, 2}),
                         [](const auto &info) { return info.param.name; });

TEST_P(LeftAlone, TheyHearOfTheDeathOfALeader) {
  start(silence_ms, [](NodeRank &rank) {
    if (rank.rank == 3) ::kill(::getpid(), SIGKILL);
  });
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 3, "rank 3 died", {3, GetParam().leaver}, since_ns, at_once);
}

TEST_P(LeftAlone, TheyHearOfALeaderThatIsStopped) {
  start(1500, [](NodeRank &rank) {
    pause_ms(2000);  // only heartbeats show that they live
    if (rank.rank == 3) ::kill(::getpid(), SIGSTOP);
  });
  ASSERT_TRUE(job->collect(20, 3)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 3, "it is stopped or its host is overloaded", {3, GetParam().leaver}, since_ns,
              3.5 + at_once);
}

// The refuge also receives the verdict, and is not taken for dead.
TEST_P(LeftAlone, TheyHearWhatOneDecidesAlone) {
  start(silence_ms, [](NodeRank &rank) {
    if (rank.rank != 3) return;
    rank.seat->control.decide(accuse_rank(FailureKind::failed, 3, "rank 3 says so"));
    pause_ms(200);
    rank.seat->watch.check();
  });
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 3, "rank 3 says so", {GetParam().leaver}, since_ns, at_once);
}

TEST_P(LeftAlone, TheyHearWhichRanksLeave) {
  start(silence_ms, [](NodeRank &rank) {
    if (rank.rank != 4) return;
    rank.world->leave();
    pause_ms(500);
    throw Error(FSDP_OK, "");
  });
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  job->expect(FSDP_PEER_FAILED, 4, "rank 4 has closed its context", {4, GetParam().leaver}, since_ns, at_once);
}

TEST_P(LeftAlone, TheyHearWhichRanksWait) {
  start(silence_ms, [](NodeRank &rank) {
    const bool crosses = rank.rank == 1 || rank.rank == 3;
    if (!crosses) rank.common->words[1][rank.rank].raise(UINT32_MAX);
    if (rank.rank != 3) return rank.waiter->set_call("fsdp_a");
    rank.waiter->set_call("fsdp_b");
    rank.common->words[1][3].raise(2);
    rank.await(1, 2, "gate b");
  });
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  job->expect(FSDP_MISMATCH, 3,
              "rank 1 is in fsdp_a (the test's gate), rank 3 is in fsdp_b (gate b): they wait for each other",
              {GetParam().leaver}, since_ns, 2 + at_once);
}

TEST_P(LeftAlone, TheyHearWhatIsShown) {
  start(silence_ms, [](NodeRank &rank) {
    const uint64_t word = 0xabcd + rank.rank;
    if (rank.rank == 3) rank.world->post(std::as_bytes(std::span(&word, 1)), {}, 1);
    if (rank.rank == 4) rank.world->post(std::as_bytes(std::span(&word, 1)), {}, std::nullopt);
    uint64_t heard = 0;
    const auto await = [&](uint32_t from) {
      for (const auto end = now_ns() + int64_t{5'000'000'000}; heard != 0xabcd + from; pause_ms(1)) {
        (void)rank.world->read_post(from, std::as_writable_bytes(std::span(&heard, 1)), {});
        if (now_ns() > end) throw Error(FSDP_INTERNAL, fmt::format("no post of rank {} has come", from));
      }
    };
    if (rank.rank == 1) await(3);
    if (rank.rank < 3) await(4);
    rank.meet(900);
    throw Error(FSDP_OK, "");
  });
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  job->expect(FSDP_OK, -1, "", {GetParam().leaver}, since_ns, at_once);
}

// Rank 0 leaves with all its connections while `stopped` is stopped, so no node has a refuge there. A second later all
// other ranks continue.
std::unique_ptr<NodeJob> leave_while_one_is_stopped(std::vector<uint32_t> ranks_of_nodes, uint32_t stopped,
                                                    const std::function<void(NodeRank &)> &meanwhile,
                                                    const NodeBody &then) {
  auto job = std::make_unique<NodeJob>(std::move(ranks_of_nodes), silence_ms);
  job->start([=](NodeRank &rank) {
    for (uint64_t step = 1; step < 100; ++step, pause_ms(2)) rank.meet(step);  // until leaders know of each rank
    while (!rank.common->stop) pause_ms(1);
    if (rank.rank == 0) return;
    if (rank.rank != stopped) pause_ms(600);  // rank 0 passes messages on for 300 ms
    meanwhile(rank);
    pause_ms(1000);
    then(rank);
  });
  EXPECT_TRUE(job->await_steps(99));
  job->send(stopped, SIGSTOP);
  job->common().stop = true;
  pause_ms(1200);
  job->send(stopped, SIGCONT);
  return job;
}

// In the tests below one rank waits for the leaver, and no other rank could report its finding.
void await_end(const NodeRank &rank, uint32_t of) {
  for (int i = 0; i < 10'000 && !rank.common->done[of]; ++i) pause_ms(1);
  throw Error(FSDP_OK, "");
}

void leave_while_there_is_no_way(std::vector<uint32_t> ranks_of_nodes, uint32_t waiter, uint32_t leaver) {
  const auto leave = [=](NodeRank &rank) {
    rank.common->words[0][0].raise(UINT32_MAX);
    if (rank.rank != leaver) return;
    rank.world->leave();
    await_end(rank, waiter);
  };
  const auto wait = [=](NodeRank &rank) { rank.rank == waiter ? rank.meet(100) : await_end(rank, waiter); };
  const auto job = leave_while_one_is_stopped(ranks_of_nodes, waiter, leave, wait);
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  EXPECT_EQ(job->common().rank[waiter], static_cast<int32_t>(leaver)) << job->text(waiter);
  EXPECT_TRUE(job->text(waiter).ends_with("has closed its context")) << job->text(waiter);
}

TEST(NodeTree, ARefugeHearsWhichRanksLeftWhileThereWasNoWay) { leave_while_there_is_no_way({1, 1, 2}, 1, 3); }
TEST(NodeTree, ARefugeeHearsWhichRanksLeftWhileThereWasNoWay) { leave_while_there_is_no_way({1, 2, 1}, 3, 2); }

uint32_t count_connections() {
  uint32_t count = 0;
  for (int fd = 0; fd < 256; ++fd) {
    sockaddr_in peer{};
    socklen_t length = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr *>(&peer), &length) == 0 && peer.sin_family == AF_INET) ++count;
  }
  return count;
}

// Node 3 has taken refuge at node 2 when node 1 answers, too. Node 3 then closes this connection, which does not count
// as a death.
TEST(NodeTree, OneRefugeIsEnough) {
  auto job = leave_while_one_is_stopped(
      {1, 1, 1, 1}, 1, [](NodeRank &) {},
      [](NodeRank &rank) {
        rank.common->words[0][0].raise(UINT32_MAX);
        rank.meet(100);
        if (rank.rank == 3 && count_connections() != 1)
          throw Error(FSDP_INTERNAL, fmt::format("{} connections", count_connections()));
        rank.close();
      });
  ASSERT_TRUE(job->collect(20)) << "a rank hangs";
  for (uint32_t r = 0; r < job->size(); ++r) EXPECT_EQ(job->common().status[r], FSDP_OK) << job->text(r);
}

}  // namespace
}  // namespace fsdp::transport::test
