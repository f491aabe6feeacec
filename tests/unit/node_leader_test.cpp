// SPDX-License-Identifier: Apache-2.0
// Tests failures in a job of several nodes. Every rank on every surviving node reports the same failure.
#include <algorithm>
#include <memory>
#include <random>

#include "../slow_core.h"
#include "node_job.h"

namespace fsdp::transport::test {
namespace {

TEST(NodeLeader, FormsTrainsAndEnds) {
  NodeJob job({2, 1, 2}, 1000);
  job.forming_ms = silence_ms;
  job.start(train);
  ASSERT_TRUE(job.await_steps(300));
  pause_ms(1500);  // idle and busy links count as no failure
  job.common().stop = true;
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  for (uint32_t r = 0; r < job.size(); ++r) EXPECT_EQ(job.common().status[r], FSDP_OK) << job.text(r);
  job.expect_nothing_left();
}

struct Case {
  const char *name;
  std::vector<uint32_t> victims;
  const char *text;
};
class Deaths : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(NodeLeader, Deaths,
                         testing::Values(Case{"OfARank", {3}, "rank 3 died"}, Case{"OfALeader", {2}, "rank 2 died"},
                                         Case{"OfTheCoordinator", {0}, "rank 0 died"},
                                         Case{"OfTwoOnTwoNodes", {3, 6}, "ranks 3, 6 died"},
                                         Case{"OfTwoOnOneNode", {2, 3}, "ranks 2, 3 died"}),
                         [](const auto &info) { return info.param.name; });

bool names_one(const std::vector<uint32_t> &victims, const std::string &text) {
  return victims.size() > 1 && std::ranges::any_of(victims, [&](uint32_t victim) {
           return text.ends_with(fmt::format("rank {} died", victim));
         });
}

struct Killed {
  std::unique_ptr<NodeJob> job;
  int64_t at_ns = 0;
};

// Runs a job of these nodes whose victims die at once. A busy machine may delay a node, so that it reports its dead
// after the others have agreed on theirs. If a witness shows this, another job is tried.
void kill_at_once(const std::vector<uint32_t> &nodes, const std::vector<uint32_t> &victims,
                  const std::vector<uint32_t> &witnesses, Killed &killed) {
  for (int tries = 0; tries < 5; ++tries) {
    killed.job = std::make_unique<NodeJob>(nodes, silence_ms);
    killed.job->start(train);
    ASSERT_TRUE(killed.job->await_steps(20));
    killed.at_ns = now_ns();
    for (const uint32_t victim : victims) killed.job->send(victim, SIGKILL);
    ASSERT_TRUE(killed.job->collect(10)) << "a rank hangs";
    if (std::ranges::none_of(witnesses, [&](uint32_t r) { return names_one(victims, killed.job->text(r)); })) return;
  }
}

TEST_P(Deaths, AreKnownToAllAtOnce) {
  const Case &what = GetParam();
  const bool two = what.victims.size() == 2;
  Killed killed;
  kill_at_once(two ? std::vector<uint32_t>{1, 4, 2} : std::vector<uint32_t>{2, 2, 2}, what.victims, {1, 4, 5}, killed);
  ASSERT_FALSE(HasFatalFailure());
  killed.job->expect(FSDP_PEER_FAILED, static_cast<int32_t>(what.victims[0]), what.text, what.victims, killed.at_ns,
                     at_once);
  killed.job->expect_nothing_left(what.victims);
}

// Nodes without a leader reach no other node, so each names its own rank. Nodes that reach others name both ranks.
TEST(NodeLeader, TwoLeadersThatDieAtOnceAreASet) {
  Killed killed;
  kill_at_once({2, 2, 2, 1}, {0, 2}, {4, 5, 6}, killed);
  ASSERT_FALSE(HasFatalFailure());
  NodeJob &job = *killed.job;
  EXPECT_EQ(job.common().rank[1], 0) << job.text(1);
  EXPECT_EQ(job.common().rank[3], 2) << job.text(3);
  for (const uint32_t r : {4u, 5u, 6u}) EXPECT_TRUE(job.text(r).ends_with("ranks 0, 2 died")) << job.text(r);
  job.expect_same_text({4, 5, 6});
}

TEST(NodeLeader, AllReportTheSameText) {
  NodeJob job({2, 2, 2}, silence_ms);
  job.start(train);
  ASSERT_TRUE(job.await_steps(20));
  const int64_t killed_ns = now_ns();
  job.send(3, SIGKILL);
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  job.expect(FSDP_PEER_FAILED, 3, "rank 3 died", {3}, killed_ns, at_once);
  job.expect_same_text({0, 1, 2, 4, 5});
}

// A rank that crashes neither sends heartbeats nor ends while its core is written, and its connections stay open.
class CoreDumps : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(NodeLeader, CoreDumps, testing::Values(0, 3, 4), [](const auto &info) {
  return info.param == 0 ? "OfTheCoordinator" : info.param == 3 ? "OfALeader" : "OfARank";
});

TEST_P(CoreDumps, AreKnownToAllAtOnce) {
  if (const std::string why = slow_core::missing(); !why.empty()) GTEST_SKIP() << why;
  const slow_core::Folder folder;
  const uint32_t victim = GetParam();
  NodeJob job({3, 3, 2}, 3 * silence_ms);
  job.start([&](NodeRank &rank) {
    for (uint64_t step = 1;; ++step) {
      pause_ms(2);
      if (step == 20 && rank.rank == victim) slow_core::die(folder.path());
      rank.meet(step);
    }
  });
  ASSERT_TRUE(job.await_steps(19));
  const int64_t died_ns = now_ns();
  ASSERT_TRUE(job.collect(20, {victim})) << "a rank hangs";
  const std::string name = fmt::format("rank {} (pid {}, host ", victim, job.common().pids[victim].load());
  job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(victim), ") is dumping core", {victim}, died_ns, at_once);
  for (uint32_t r = 0; r < job.size(); ++r)
    EXPECT_TRUE(r == victim || job.text(r).find(name) != std::string::npos) << job.text(r);
  job.expect_nothing_left({victim});
}

// A rank that does not wait learns of the failure when it next waits. A rank in another wait learns of it, too,
// whichever rank it waits for.
TEST(NodeLeader, ADeathIsFoundWhileItsNodeComputes) {
  NodeJob job({1, 2}, silence_ms);
  job.start([](NodeRank &rank) {
    rank.meet(1);
    if (rank.rank == 2) ::_exit(1);
    if (rank.rank == 1) pause_ms(4000);
    rank.meet(2);
  });
  const int64_t start_ns = now_ns();
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  job.expect(FSDP_PEER_FAILED, 2, "rank 2 died", {2}, start_ns, 4 + at_once);
  EXPECT_LT(static_cast<double>(job.common().seen_ns[0] - start_ns) * 1e-9, 3.9);
}

class Stops : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(NodeLeader, Stops, testing::Values(0, 2, 3));

TEST_P(Stops, LongerThanTheLimitAreNamed) {
  const uint32_t victim = GetParam();
  NodeJob job({2, 2}, 1200);
  job.start(train);
  ASSERT_TRUE(job.await_steps(20));
  const int64_t stopped_ns = now_ns();
  job.send(victim, SIGSTOP);
  pause_ms(5000);
  const int64_t continued_ns = now_ns();
  job.send(victim, SIGCONT);
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(victim),
             "has not responded for 1.2 s: it is stopped or its host is overloaded", {victim}, stopped_ns,
             1.2 + at_once);
  EXPECT_EQ(job.common().status[victim], FSDP_PEER_FAILED) << job.text(victim);
  EXPECT_EQ(job.common().rank[victim], static_cast<int32_t>(victim)) << job.text(victim);
  EXPECT_LT(static_cast<double>(job.common().seen_ns[victim] - continued_ns) * 1e-9, at_once);
}

// The machine's kernel accepts data from others until its buffers are full, so the network is not to blame.
TEST(NodeLeader, AStoppedLeaderIsNamedHoweverMuchOthersSay) {
  NodeJob job({1, 15}, 6000);
  job.start(train);
  ASSERT_TRUE(job.await_steps(20));
  const int64_t stopped_ns = now_ns();
  job.send(0, SIGSTOP);
  pause_ms(9000);
  job.send(0, SIGCONT);
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  job.expect(FSDP_PEER_FAILED, 0, "has not responded for 6.0 s: it is stopped or its host is overloaded", {0},
             stopped_ns, 6 + at_once);
}

TEST(NodeLeader, StopsShorterThanTheLimitAreNoFailure) {
  NodeJob job({2, 1, 1}, 4000);
  job.start(train);
  ASSERT_TRUE(job.await_steps(20));
  for (const uint32_t rank : {0u, 1u, 2u, 3u}) {
    job.send(rank, SIGSTOP);
    pause_ms(900);
    job.send(rank, SIGCONT);
    pause_ms(200);
  }
  for (uint32_t rank = 0; rank < 4; ++rank) job.send(rank, SIGSTOP);
  pause_ms(6000);  // like a machine that was suspended
  for (uint32_t rank = 0; rank < 4; ++rank) {
    job.send(rank, SIGCONT);
    pause_ms(100);
  }
  job.common().stop = true;
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  for (uint32_t r = 0; r < job.size(); ++r) EXPECT_EQ(job.common().status[r], FSDP_OK) << job.text(r);
}

TEST(NodeLeader, AnAbortReachesAllNodes) {
  for (const uint32_t who : {0u, 3u}) {
    NodeJob job({2, 2}, silence_ms);
    job.start([&](NodeRank &rank) {
      rank.meet(1);
      if (rank.rank != who) return rank.meet(2);
      rank.world->abort("the test wants it");
      pause_ms(500);
      rank.meet(2);
    });
    const int64_t start_ns = now_ns();
    ASSERT_TRUE(job.collect(10)) << "a rank hangs";
    job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(who), fmt::format("rank {} aborted: the test wants it", who),
               {who}, start_ns, 0.5 + at_once);
    EXPECT_EQ(job.common().status[who], FSDP_ABORTED) << job.text(who);
  }
}

// The ranks only check for failures, as every call of the library does.
TEST(NodeLeader, AnAbortReachesRanksThatDoNotWait) {
  for (const uint32_t who : {0u, 3u}) {
    NodeJob job({2, 2}, silence_ms);
    job.start([&](NodeRank &rank) {
      rank.meet(1);
      if (rank.rank == who) rank.world->abort("the test wants it");
      for (const int64_t end = now_ns() + 20'000'000'000; now_ns() < end; pause_ms(1)) rank.world->check();
    });
    const int64_t start_ns = now_ns();
    ASSERT_TRUE(job.collect(30)) << "a rank hangs";
    job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(who), fmt::format("rank {} aborted: the test wants it", who),
               {who}, start_ns, at_once);
    EXPECT_EQ(job.common().status[who], FSDP_ABORTED) << job.text(who);
  }
}

// Its world is destroyed at once after the abort, and the verdict must still be sent.
TEST(NodeLeader, AnAbortOfARankThatLeavesAtOnceReachesAllNodes) {
  for (const uint32_t who : {0u, 2u}) {
    NodeJob job({2, 2}, silence_ms);
    job.start([&](NodeRank &rank) {
      rank.meet(1);
      if (rank.rank == who) return rank.world->abort("gone");
      rank.meet(2);
    });
    const int64_t start_ns = now_ns();
    ASSERT_TRUE(job.collect(10)) << "a rank hangs";
    job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(who), fmt::format("rank {} aborted: gone", who), {who}, start_ns,
               at_once);
  }
}

TEST(NodeLeader, CallersThatWaitForEachOtherAreToldSo) {
  NodeJob job({1, 1}, silence_ms);
  job.start([](NodeRank &rank) {
    rank.meet(1);
    rank.waiter->set_call(rank.rank ? "fsdp_b" : "fsdp_a");
    rank.common->words[rank.rank][rank.rank].raise(2);
    rank.await(rank.rank, 2, rank.rank ? "gate b" : "gate a");
  });
  const int64_t start_ns = now_ns();
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  job.expect(FSDP_MISMATCH, 1, "rank 0 is in fsdp_a (gate a), rank 1 is in fsdp_b (gate b): they wait for each other",
             {}, start_ns, 1.5 + at_once);
}

// Rank 0 waits the whole time for a rank that comes late: a slow rank is not dead, and its wait crosses no other.
TEST(NodeLeader, ASlowCallerIsNoFailure) {
  NodeJob job({1, 2}, 1000);
  job.forming_ms = silence_ms;
  job.start([](NodeRank &rank) {
    rank.meet(1);
    if (rank.rank == 2) pause_ms(3500);
    rank.meet(2);
    rank.close();
  });
  ASSERT_TRUE(job.collect(15)) << "a rank hangs";
  for (uint32_t r = 0; r < job.size(); ++r) EXPECT_EQ(job.common().status[r], FSDP_OK) << job.text(r);
}

TEST(NodeLeader, ARankThatWaitsForOneThatLeftIsToldSo) {
  NodeJob job({1, 2}, silence_ms);
  job.start([](NodeRank &rank) {
    rank.meet(1);
    if (rank.rank == 1) {
      rank.world->leave();
      pause_ms(1000);
      return;
    }
    rank.meet(2);
  });
  const int64_t start_ns = now_ns();
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  job.expect(FSDP_PEER_FAILED, 1, "rank 1 has closed its context", {1}, start_ns, at_once);
}

TEST(NodeLeader, AnotherSecretDoesNotJoin) {
  NodeJob job({1, 1}, 1000);
  job.set_secret(1, "another");
  job.start(train);
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  EXPECT_EQ(job.common().status[1], FSDP_PEER_FAILED) << job.text(1);
  EXPECT_EQ(job.common().rank[1], 0) << job.text(1);
  EXPECT_EQ(job.common().status[0], FSDP_PEER_FAILED) << job.text(0);
  EXPECT_EQ(job.common().rank[0], 1) << job.text(0);
}

// The other ranks of each node learn of it from their leader.
TEST(NodeLeader, ALeaderThatDiesBeforeItConnectsIsNamed) {
  for (const uint32_t victim : {0u, 2u, 5u}) {
    NodeJob job({2, 2, 1, 2}, 1500);
    job.before_tree = [&](uint32_t rank) {
      if (rank == victim) ::_exit(0);
    };
    const int64_t start_ns = now_ns();
    job.start(train);
    ASSERT_TRUE(job.collect(10)) << "a rank hangs";
    double slowest = 0;
    for (uint32_t r = 0; r < job.size(); ++r) {
      if (r == victim) continue;
      EXPECT_EQ(job.common().status[r], FSDP_PEER_FAILED) << "rank " << r << ": " << job.text(r);
      EXPECT_EQ(job.common().rank[r], static_cast<int32_t>(victim)) << "rank " << r << ": " << job.text(r);
      slowest = std::max(slowest, static_cast<double>(job.common().seen_ns[r] - start_ns) * 1e-9);
    }
    EXPECT_LT(slowest, 1.5 + at_once);
    std::printf("seen by all after %.0f ms: %s\n", slowest * 1e3, job.text(victim ? 0 : 1).c_str());
  }
}

// A process can reach a leader's port but does not know the secret. It disturbs neither the forming nor the heartbeats.
TEST(NodeLeader, StrangersAreNotHeard) {
  NodeJob job({1, 2}, 1500);
  job.forming_ms = silence_ms;
  job.before_tree = [&](uint32_t rank) {
    if (rank == 1) pause_ms(600);
  };
  job.start(train);
  while (job.common().ready < job.size()) pause_ms(1);
  std::string problem;
  std::vector<Fd> strangers;
  const Fd datagrams(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  std::minstd_rand random(5);
  for (int i = 0; i < 300; ++i) {
    char bytes[200];
    for (char &byte : bytes) byte = static_cast<char>(random());
    if (i % 3 == 0) std::memcpy(bytes, "fsdpmeet", 8);
    if (i % 3 == 1) std::memcpy(bytes, "fsdpbeat", 8);
    const Endpoint to = parse_address(job.common().address[i % 2]);
    ::sendto(datagrams.get(), bytes, i % 2 ? 56 : sizeof bytes, 0, to.get(), to.length());
    Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::connect(stranger.get(), to.get(), to.length()) != 0) continue;
    (void)!::send(stranger.get(), bytes, static_cast<size_t>(i) % sizeof bytes, MSG_NOSIGNAL);
    if (i % 4 == 0) strangers.push_back(std::move(stranger));  // and sends nothing more
  }
  ASSERT_TRUE(job.await_steps(50)) << job.text(0) << job.text(1);
  pause_ms(1000);
  job.common().stop = true;
  ASSERT_TRUE(job.collect(10)) << "a rank hangs";
  for (uint32_t r = 0; r < job.size(); ++r) EXPECT_EQ(job.common().status[r], FSDP_OK) << job.text(r);
}

// Exchanges the datagrams of two nodes through a process between them.
class Told : public testing::Test {
 protected:
  Told() {
    for (const uint32_t node : {0u, 1u}) {
      listeners.push_back(open_leader_listener("127.0.0.1"));
      plan.nodes.push_back({node, "h", listeners.back().address});
    }
  }
  NodePlan plan_of(uint32_t node, const std::string &secret = "secret") const {
    NodePlan other = plan;
    other.rank = node;
    other.secret = secret;
    return other;
  }
  // Returns the reports of that node, such as "beat 1" or "dump 1 of 77".
  std::string heard(Datagrams &datagrams) {
    std::string text;
    for (int tries = 0; tries < 100 && text.empty(); ++tries, pause_ms(1))
      datagrams.receive([&](uint32_t of) { text += fmt::format("beat {}", of); },
                        [&](uint32_t of, int32_t process) { text += fmt::format("dump {} of {}", of, process); });
    return text;
  }
  // Returns the bytes of node 1's heartbeat to node 0. The socket of node 0 is not a Datagrams yet.
  std::vector<char> beat_of_one(uint64_t number) {
    const NodePlan one = plan_of(1);
    Datagrams(one, Fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0))).beat(0, number);
    std::vector<char> bytes(64);
    pollfd entry{listeners[0].datagrams.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&entry, 1, 10'000), 1);
    const ssize_t size = ::recv(listeners[0].datagrams.get(), bytes.data(), bytes.size(), 0);
    EXPECT_EQ(size, 56);
    bytes.resize(56);
    return bytes;
  }
  void send_to_zero(const std::vector<char> &bytes) const {
    const Endpoint to = parse_address(plan.nodes[0].address);
    ::sendto(stranger.get(), bytes.data(), bytes.size(), 0, to.get(), to.length());
  }
  static constexpr size_t kind_offset = 12;  // behind the mark and the sender's node
  NodePlan plan{0, {0, 1}, {}, "secret", "job"};
  std::vector<LeaderListener> listeners;
  const Fd stranger{::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
};

TEST_F(Told, OfACoreDumpByARankThatKnowsTheSecret) {
  const NodePlan zero = plan_of(0), one = plan_of(1), liar = plan_of(1, "another secret");
  Datagrams at_zero(zero, std::move(listeners[0].datagrams));
  DumpNotices(one).send(77);
  EXPECT_EQ(heard(at_zero), "dump 1 of 77");
  DumpNotices(liar).send(77);
  EXPECT_EQ(heard(at_zero), "");
}

// The bytes are those of a heartbeat, with the other kind.
TEST_F(Told, NothingByAReplayedBeat) {
  const NodePlan zero = plan_of(0);
  std::vector<char> bytes = beat_of_one(5);
  Datagrams at_zero(zero, std::move(listeners[0].datagrams));
  const uint32_t beat = 1, dump = 2;
  ASSERT_EQ(std::memcmp(bytes.data() + kind_offset, &beat, sizeof beat), 0);
  std::memcpy(bytes.data() + kind_offset, &dump, sizeof dump);
  send_to_zero(bytes);
  EXPECT_EQ(heard(at_zero), "");
  std::memcpy(bytes.data() + kind_offset, &beat, sizeof beat);
  send_to_zero(bytes);
  EXPECT_EQ(heard(at_zero), "beat 1");
  send_to_zero(bytes);
  EXPECT_EQ(heard(at_zero), "") << "the same one again";
}

// A stranger knows the form of a heartbeat from the source, and all numbers but the mark and the proof. More datagrams
// arrive between two checks than the socket's buffer holds.
TEST_F(Told, AHeartbeatBehindTheFloodOfAStranger) {
  const NodePlan zero = plan_of(0), one = plan_of(1);
  Datagrams at_zero(zero, std::move(listeners[0].datagrams)), at_one(one, std::move(listeners[1].datagrams));
  std::minstd_rand random(7);
  std::vector<char> stranger(56);
  for (int i = 0; i < 20'000; ++i) {
    for (char &byte : stranger) byte = static_cast<char>(random());
    const uint32_t node = 1, beat = 1;
    std::memcpy(stranger.data() + kind_offset - sizeof node, &node, sizeof node);
    std::memcpy(stranger.data() + kind_offset, &beat, sizeof beat);
    send_to_zero(stranger);
  }
  at_one.beat(0, 1);
  EXPECT_EQ(heard(at_zero), "beat 1");
  EXPECT_FALSE(at_zero.flooded()) << "the kernel has dropped them";
}

// A process that has seen a heartbeat in transit can send it again. All received datagrams are read at once, and again
// soon.
TEST_F(Told, AHeartbeatBehindManyReplays) {
  const NodePlan zero = plan_of(0), one = plan_of(1);
  const std::vector<char> replay = beat_of_one(1);
  Datagrams at_zero(zero, std::move(listeners[0].datagrams)), at_one(one, std::move(listeners[1].datagrams));
  send_to_zero(replay);
  EXPECT_EQ(heard(at_zero), "beat 1");
  EXPECT_FALSE(at_zero.flooded());
  for (int i = 0; i < 300; ++i) send_to_zero(replay);
  at_one.beat(0, 2);
  EXPECT_EQ(heard(at_zero), "beat 1");
  EXPECT_TRUE(at_zero.flooded());
  at_one.beat(0, 3);
  EXPECT_EQ(heard(at_zero), "beat 1");
  EXPECT_FALSE(at_zero.flooded());
}

// Node 1 has ranks 2 and 3. Its leader, rank 1, dumps core. The test plays node 0.
class Deputies : public testing::Test {
 protected:
  class Dumping final : public Links {
   public:
    bool send(uint32_t, Parcel, const Fd &) override { return false; }
    std::optional<Fd> take(Parcel) override { return std::nullopt; }
    void sleep(uint32_t) override {}
    void find_dead(const std::function<void(uint32_t)> &) override {}
    bool dumps_core(uint32_t rank) const noexcept override { return rank == 1; }
    std::optional<Fd> meet(Parcel, std::span<const uint32_t>, const std::function<Fd()> &) override { return {}; }
  };
  struct Member {
    Member(Deputies &job, uint32_t number)
        : seat(number, 4, job.file, std::make_unique<Dumping>(), rank.waiter, rank.failure, 1000) {
      NodePlan plan = job.plan;
      plan.rank = number;
      deputy = std::make_unique<CoreDumpReporter>(seat, plan);
      seat.control.set_membership(number, Membership::member);
      seat.pulse.look();
    }
    Rank rank;
    Seat seat;
    std::unique_ptr<CoreDumpReporter> deputy;
  };
  Deputies() : file(Control::create(4, {3, false})) {
    for (const uint32_t leader : {0u, 1u}) plan.nodes.push_back({leader, "h", listener.address});
    Control control(file, 4);
    control.set_membership(1, Membership::member);
    control.beat(1, 7);
  }
  // Returns the number of datagrams that node 0 has received.
  int told() {
    char bytes[64];
    int count = 0;
    while (::recv(listener.datagrams.get(), bytes, sizeof bytes, MSG_DONTWAIT) > 0) ++count;
    return count;
  }
  static void miss_a_beat(std::initializer_list<Member *> members) {
    pause_ms(150);
    for (Member *member : members) member->seat.pulse.look();
  }
  LeaderListener listener = open_leader_listener("127.0.0.1");
  NodePlan plan{0, {0, 1, 1, 1}, {}, "secret", "job"};
  const Fd file;
};

TEST_F(Deputies, TheLowestThatIsLeftTells) {
  Member two(*this, 2), three(*this, 3);
  two.deputy->run(-1, 0);
  EXPECT_EQ(told(), 0) << "the leader has just been heard";
  miss_a_beat({&two, &three});
  miss_a_beat({&two, &three});  // and one of the other rank, which may have been sent after the previous check
  three.deputy->run(-1, 0);
  EXPECT_EQ(told(), 0) << "rank 2 does";
  for (int i = 0; i < 10; ++i) two.deputy->run(-1, 0);
  EXPECT_EQ(told(), 3);
  two.seat.control.set_membership(2, Membership::gone);
  three.deputy->run(-1, 0);
  EXPECT_EQ(told(), 1);
}

TEST_F(Deputies, ARankThatLeavesForItTellsAtLast) {
  Member two(*this, 2);
  two.deputy->finish();
  EXPECT_EQ(told(), 1);
}

// Any rank may die, at any moment of its work.
TEST(NodeLeader, DeathsAtRandomMoments) {
  std::minstd_rand random(11);
  double slowest = 0;
  for (int trial = 0; trial < 30; ++trial) {
    NodeJob job({1 + trial % 3u, 2, 1 + trial % 2u}, silence_ms);
    const auto victim = static_cast<uint32_t>(random()) % job.size();
    job.start(train);
    ASSERT_TRUE(job.await_steps(1));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    const int64_t killed_ns = now_ns();
    job.send(victim, SIGKILL);
    ASSERT_TRUE(job.collect(10)) << "trial " << trial << ": a rank hangs";
    for (uint32_t r = 0; r < job.size(); ++r) {
      if (r == victim) continue;
      EXPECT_EQ(job.common().status[r], FSDP_PEER_FAILED) << "trial " << trial << ", rank " << r << job.text(r);
      EXPECT_EQ(job.common().rank[r], static_cast<int32_t>(victim)) << "trial " << trial << ": " << job.text(r);
      slowest = std::max(slowest, static_cast<double>(job.common().seen_ns[r] - killed_ns) * 1e-9);
    }
  }
  EXPECT_LT(slowest, at_once);
  std::printf("30 kills, slowest report %.0f ms\n", slowest * 1e3);
}

}  // namespace
}  // namespace fsdp::transport::test
