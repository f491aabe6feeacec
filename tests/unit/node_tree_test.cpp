// SPDX-License-Identifier: Apache-2.0
// Tests the tree of leaders: its shape, and jobs in trees so narrow that leaders pass messages on.
#include <sys/ioctl.h>

#include <array>
#include <future>

#include "node_job.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::test {
namespace {

NodePlan plan_of(uint32_t node, uint32_t count, uint32_t degree) {
  NodePlan plan;
  plan.degree = degree;
  plan.rank = node;
  for (uint32_t n = 0; n < count; ++n) {
    plan.node_of.push_back(n);
    plan.nodes.push_back({n, "h", ""});
  }
  return plan;
}

class Trees : public testing::TestWithParam<std::tuple<uint32_t, uint32_t>> {
 protected:
  const uint32_t count = std::get<0>(GetParam()), degree = std::get<1>(GetParam());
  std::vector<NodePlan> plans = [this] {
    std::vector<NodePlan> all;
    for (uint32_t n = 0; n < count; ++n) all.push_back(plan_of(n, count, degree));
    return all;
  }();
};
INSTANTIATE_TEST_SUITE_P(NodeTree, Trees,
                         testing::Values(std::tuple{1u, 64u}, std::tuple{2u, 64u}, std::tuple{65u, 64u},
                                         std::tuple{66u, 64u}, std::tuple{300u, 64u}, std::tuple{6u, 1u},
                                         std::tuple{31u, 2u}, std::tuple{40u, 3u}));

TEST_P(Trees, HaveEachNodeOnce) {
  std::vector<uint32_t> below(count);
  for (uint32_t n = 0; n < count; ++n) {
    const auto children = plans[n].children();
    EXPECT_LE(children.size(), degree);
    for (const uint32_t child : children) {
      ASSERT_LT(child, count);
      ++below[child];
      EXPECT_TRUE(plans[n].is_child(child));
      EXPECT_EQ(plans[child].parent(), n);
      EXPECT_TRUE(plans[child].is_bound(n) && plans[n].is_bound(child));
    }
  }
  EXPECT_EQ(below[0], 0U);
  EXPECT_EQ(std::count(below.begin() + 1, below.end(), 1U), count - 1);
}

TEST_P(Trees, LeadFromEachNodeToEach) {
  uint32_t longest = 0;
  for (uint32_t from = 0; from < count; ++from)
    for (uint32_t to = 0; to < count; ++to) {
      uint32_t at = from, hops = 0;
      while (at != to && hops <= count) {
        const uint32_t next = plans[at].next_hop(to);
        ASSERT_TRUE(plans[at].is_bound(next)) << at << " to " << to;
        at = next;
        ++hops;
      }
      ASSERT_EQ(at, to) << from << " to " << to;
      longest = std::max(longest, hops);
    }
  if (degree == 64) {
    EXPECT_EQ(longest, count > 65 ? 4U - (count < 131) : std::min(count - 1, 2U));  // node 66's parent is node 1
  }
}

// With 16,384 ranks on hosts of eight, no leader has more than 65 connections.
TEST(NodeTree, IsTwoLevelsDeepFor2048Hosts) {
  for (const uint32_t node : {0u, 1u, 31u, 32u, 64u, 65u, 2047u}) {
    const NodePlan plan = plan_of(node, 2048, tree_degree);
    EXPECT_LE(plan.children().size() + plan.has_parent(), 65U) << node;
    uint32_t depth = 0;
    for (uint32_t at = node; at != 0; at = plan.parent_of(at)) ++depth;
    EXPECT_LE(depth, 2U) << node;
  }
}

// Counts the states of 8 waiting ranks that are sent in ten seconds.
uint32_t count_states(uint32_t ranks, bool waits_end) {
  NodePlan plan;
  for (uint32_t r = 0; r < ranks; ++r) plan.node_of.push_back(r / 8);
  const Fd file = Control::create(ranks, {8, true});
  Control control(file, ranks);
  for (uint32_t r = 0; r < 8; ++r) control.set_membership(r, Membership::member);
  RemoteStates mirror(control, plan);
  uint32_t said = 0;
  const auto look = [&](uint64_t ms) { mirror.look(ms, [&](const tree::RankState &) { ++said; }); };
  look(100'000);
  EXPECT_EQ(said, 8U) << "who is there is told at once";
  said = 0;
  for (uint64_t ms = 300'000; ms < 310'000; ms += 50) {
    for (uint32_t r = 0; r < 8; ++r) {
      const bool waits = !waits_end || (ms / 500) % 2;
      const uint64_t number = ms / 1000;
      control.waits()[r].wait_and_looks = wait_and_looks(number, waits ? 1 + ms % 1000 : 0);
    }
    look(ms);
  }
  return said;
}

// When one of 16,384 ranks is late, all others wait. Each leader hears of each of them, and passes it on to 64 leaders.
TEST(NodeTree, WaitsOfManyRanksAreToldOfLessOften) {
  const uint32_t few = count_states(16, false);
  EXPECT_GE(few, 8U * 95);
  EXPECT_LE(few, 8U * 105);
  EXPECT_NEAR(count_states(192, false), few / 3, 8);
  for (const bool waits_end : {false, true}) EXPECT_EQ(count_states(16'384, waits_end), 8U) << waits_end;
}

// Returns the bytes that a leader has queued for a child that reads nothing, while ranks below another child wait again
// and again.
TEST(NodeTree, WaitsDoNotFillTheBuffersOfOneThatIsSilent) {
  Rank rank;
  NodePlan plan = plan_of(0, 3, tree_degree);
  plan.node_of.resize(1);
  plan.node_of.insert(plan.node_of.end(), 300, 1);
  plan.node_of.push_back(2);
  plan.nodes[2].leader = 301;
  plan.secret = "secret";
  const auto size = static_cast<uint32_t>(plan.node_of.size());
  LeaderListener listener = open_leader_listener("127.0.0.1");
  for (NodePlace &place : plan.nodes) place.address = listener.address;
  std::vector<FrameStream> children(2);
  NodeLinks links;
  auto parent = std::async(std::launch::async, [&] { form_tree(plan, listener.stream, rank.waiter, links); });
  for (uint32_t child = 0; child < 2; ++child) {
    NodePlan own = plan;
    own.rank = child ? 301 : 1;
    Dial dial(own, 0, tree::Bond::tree);
    while (dial.advance() == Dial::State::trying) pause_ms(1);
    ASSERT_EQ(dial.state(), Dial::State::answered) << dial.problem();
    children[child] = dial.take();
  }
  parent.get();
  auto seat = create_lone_seat(0, size, rank.waiter, rank.failure);
  NodeLeader leader(*seat, plan, std::move(links), std::move(listener));
  for (uint32_t turn = 1; turn <= 20; ++turn) {
    tree::StateMap states;
    for (uint32_t r = 1; r <= 300; ++r)
      states[r] = {r, 0, static_cast<uint32_t>(Membership::member), 0, uint64_t{1} << 32 | turn};
    for (const SharedFrame &frame : tree::write_states(states, true, 4096)) children[0].queue(frame);
    for (uint32_t r = 1; r <= 20; ++r) {
      const tree::WaitText text{r, 1, {}};
      children[0].queue(static_cast<uint32_t>(text.kind), tree::bytes_of(text));
    }
    while (!children[0].flush()) leader.run(-1, 1);
    for (int i = 0; i < 5; ++i) leader.run(-1, 1);
  }
  EXPECT_EQ(seat->control.waits()[300].wait_and_looks, wait_and_looks(1, 20)) << "this node has heard them all";
  int waiting = 0;
  ASSERT_EQ(::ioctl(children[1].socket().get(), FIONREAD, &waiting), 0);
  while (const auto frame = children[0].receive())
    EXPECT_NE(frame->kind, static_cast<uint32_t>(tree::LinkKind::wait_text)) << "it has told it itself";
  EXPECT_GT(waiting, 20'000) << "some have gone";
  EXPECT_LT(waiting, 50'000);
}

// Leaders that cannot reach the root decide alone after a second, and must hear of the death before that. On a busy
// machine some do not hear of it in time, and another job is tried.
void expect_death(
    const std::vector<uint32_t> &nodes, uint32_t degree, uint32_t victim,
    const std::function<void(NodeJob &)> &prepare = [](NodeJob &) {}) {
  constexpr double promised = 0.9;
  double slowest = 0;
  for (int tries = 0; tries < 5 && (tries == 0 || slowest > promised); ++tries) {
    NodeJob job(nodes, silence_ms);
    job.degree = degree;
    job.all_exchange = false;
    job.start(train);
    ASSERT_TRUE(job.await_steps(20));
    prepare(job);
    const int64_t killed_ns = now_ns();
    job.send(victim, SIGKILL);
    ASSERT_TRUE(job.collect(10)) << "a rank hangs";
    job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(victim), fmt::format("rank {} died", victim), {victim}, killed_ns,
               at_once);
    job.expect_nothing_left({victim});
    slowest = 0;
    for (uint32_t r = 0; r < job.size(); ++r)
      if (r != victim) slowest = std::max(slowest, static_cast<double>(job.common().seen_ns[r] - killed_ns) * 1e-9);
  }
  EXPECT_LT(slowest, promised);
}

class Narrow : public testing::TestWithParam<uint32_t> {
 protected:
  static std::unique_ptr<NodeJob> make(std::vector<uint32_t> ranks_of_nodes, uint32_t limit_ms, uint32_t degree) {
    auto job = std::make_unique<NodeJob>(std::move(ranks_of_nodes), limit_ms);
    job->degree = degree;
    job->all_exchange = false;  // only the tree reports it
    return job;
  }
};
INSTANTIATE_TEST_SUITE_P(NodeTree, Narrow, testing::Values(1, 2));

TEST_P(Narrow, JobsFormTrainAndEnd) {
  auto job = make({1, 2, 1, 1, 1, 1}, 1000, GetParam());
  job->forming_ms = silence_ms;
  job->start(train);
  ASSERT_TRUE(job->await_steps(200));
  pause_ms(1500);
  job->common().stop = true;
  ASSERT_TRUE(job->collect(10)) << "a rank hangs";
  for (uint32_t r = 0; r < job->size(); ++r) EXPECT_EQ(job->common().status[r], FSDP_OK) << job->text(r);
  job->expect_nothing_left();
}

// The nodes above and below a dead leader learn of it, and so do the ranks of its own node.
TEST_P(Narrow, ADeathIsKnownEverywhere) {
  for (const uint32_t victim : {0u, 1u, 2u, 4u, 6u}) expect_death({1, 2, 1, 1, 1, 1}, GetParam(), victim);
}

// Nine leaders turn to eight refuge places.
TEST(NodeTree, MoreOrphansThanARefugeHasSeatsAllHearTheVerdict) { expect_death(std::vector<uint32_t>(19, 1), 9, 1); }

TEST_P(Narrow, AStopIsKnownEverywhere) {
  for (const uint32_t victim : {0u, 1u}) {
    auto job = make({1, 2, 1, 1, 1}, 1500, GetParam());
    job->forming_ms = silence_ms;
    job->start(train);
    ASSERT_TRUE(job->await_steps(20));
    const int64_t stopped_ns = now_ns();
    job->send(victim, SIGSTOP);
    pause_ms(3500);
    job->send(victim, SIGCONT);
    ASSERT_TRUE(job->collect(10)) << "a rank hangs";
    job->expect(FSDP_PEER_FAILED, static_cast<int32_t>(victim),
                "has not responded for 1.5 s: it is stopped or its host is overloaded", {victim}, stopped_ns,
                1.5 + at_once);
  }
}

TEST_P(Narrow, AnAbortReachesAllNodes) {
  for (const uint32_t who : {0u, 2u, 6u}) {
    auto job = make({1, 2, 1, 1, 1, 1}, silence_ms, GetParam());
    job->start([&](NodeRank &rank) {
      rank.meet(1);
      if (rank.rank == who) return rank.world->abort("gone");
      rank.meet(2);
    });
    const int64_t start_ns = now_ns();
    ASSERT_TRUE(job->collect(10)) << "a rank hangs";
    job->expect(FSDP_PEER_FAILED, static_cast<int32_t>(who), fmt::format("rank {} aborted: gone", who), {who}, start_ns,
                at_once);
  }
}

// The states of ranks pass through all nodes between them.
TEST_P(Narrow, CallersAtItsEndsThatWaitForEachOtherAreToldSo) {
  auto job = make({1, 1, 1, 1, 1, 1}, silence_ms, GetParam());
  job->start([](NodeRank &rank) {
    rank.meet(1);
    if (rank.rank != 4 && rank.rank != 5) {  // they wait for both
      rank.common->words[0][rank.rank].raise(2);
      rank.common->words[1][rank.rank].raise(2);
      return rank.await(0, 2, "gate a");
    }
    const uint32_t gate = rank.rank - 4;
    rank.waiter->set_call(gate ? "fsdp_b" : "fsdp_a");
    rank.common->words[gate][rank.rank].raise(2);
    rank.await(gate, 2, gate ? "gate b" : "gate a");
  });
  const int64_t start_ns = now_ns();
  ASSERT_TRUE(job->collect(10)) << "a rank hangs";
  job->expect(FSDP_MISMATCH, 5, "rank 4 is in fsdp_a (gate a), rank 5 is in fsdp_b (gate b): they wait for each other",
              {}, start_ns, 2 + at_once);
}

// A rank's message reaches the rank that it is for, or all ranks.
TEST_P(Narrow, PostsComeWhereTheyAreFor) {
  auto job = make({1, 1, 1, 1, 1, 1}, silence_ms, GetParam());
  job->start([](NodeRank &rank) {
    rank.meet(1);
    const uint64_t word = 0xabcd;
    if (rank.rank == 5) rank.world->post(std::as_bytes(std::span(&word, 1)), "for one", 4);
    uint64_t heard = 0;
    char text[post_text_bytes];
    const auto read = [&] { return rank.world->read_post(5, std::as_writable_bytes(std::span(&heard, 1)), text); };
    const auto end = now_ns() + int64_t{5'000'000'000};
    if (rank.rank == 4)
      while (!read() && now_ns() < end) pause_ms(1);
    rank.meet(2);
    if (rank.rank < 4 && read()) throw Error(FSDP_INTERNAL, "a post for another rank");
    if (rank.rank == 4 && (heard != word || text != std::string("for one")))
      throw Error(FSDP_INTERNAL, "no post has come");
    rank.meet(3);
    const uint64_t next = 0xef;
    if (rank.rank == 5) rank.world->post(std::as_bytes(std::span(&next, 1)), "for all", std::nullopt);
    while (rank.rank != 5 && (!read() || heard != next) && now_ns() < end) pause_ms(1);
    if (rank.rank != 5 && (heard != next || text != std::string("for all")))
      throw Error(FSDP_INTERNAL, "no post for all has come");
    rank.close();
  });
  ASSERT_TRUE(job->collect(15)) << "a rank hangs";
  for (uint32_t r = 0; r < job->size(); ++r) EXPECT_EQ(job->common().status[r], FSDP_OK) << job->text(r);
}

// A leader and its parent die. The nodes below both turn to the first nodes.
TEST_P(Narrow, TwoDeathsInALineAreKnownEverywhere) {
  auto job = make({1, 1, 1, 1, 1, 1, 1}, silence_ms, GetParam());
  job->start(train);
  ASSERT_TRUE(job->await_steps(20));
  const int64_t killed_ns = now_ns();
  job->send(0, SIGKILL);
  job->send(1, SIGKILL);
  ASSERT_TRUE(job->collect(10)) << "a rank hangs";
  for (uint32_t r = 2; r < 7; ++r) {
    EXPECT_EQ(job->common().status[r], FSDP_PEER_FAILED) << job->text(r);
    EXPECT_LT(static_cast<uint32_t>(job->common().rank[r]), 2U) << job->text(r);
    EXPECT_LT(static_cast<double>(job->common().seen_ns[r] - killed_ns) * 1e-9, at_once);
  }
}

// Processes reach the ports of the first nodes while the job runs, and send nothing. (Nodes from 8 on do not decide
// before a second.)
TEST(NodeTree, StrangersTakeNoRefuge) {
  std::vector<Fd> strangers;
  expect_death(std::vector<uint32_t>(19, 1), 9, 1, [&](NodeJob &job) {
    for (uint32_t i = 0; i < refuge_count * 40; ++i) {
      const Endpoint to = parse_address(job.common().address[i % refuge_count]);
      Fd stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      (void)::connect(stranger.get(), to.get(), to.length());
      (void)!::send(stranger.get(), "fsdpmeet", i % 9, MSG_NOSIGNAL);
      strangers.push_back(std::move(stranger));
    }
    const uint32_t steps = job.common().steps[0];
    ASSERT_TRUE(job.await_steps(steps + 20));
  });
}

// A leader is on a slow machine. Between its proof and its first message more time passes than a stranger is allowed.
TEST(NodeTree, ALeaderThatHasProvenTheSecretHasTimeToSpeak) {
  NodePlan plan;
  plan.secret = "the secret";
  plan.job = "a job";
  plan.node_of = {0, 1};
  const LeaderListener listener = open_leader_listener("127.0.0.1");
  for (uint32_t n = 0; n < 2; ++n) plan.nodes.push_back({n, "a host", listener.address});
  NodePlan theirs = plan;
  theirs.rank = 1;
  Newcomers newcomers_here(plan, listener.stream);
  int code = 0;
  const Endpoint place = parse_address(listener.address);
  Fd slow = begin_connecting(place, code);
  const Fd silent = begin_connecting(place, code);
  Handshake handshake(Role::guest, plan.secret, link_label(plan));
  for (int i = 0; i < 1000 && handshake.advance(slow) == IoState::waiting; ++i) {
    EXPECT_TRUE(newcomers_here.look().empty());
    pause_ms(1);
  }
  ASSERT_EQ(handshake.state(), IoState::done) << handshake.problem();
  for (const int64_t end = now_ns() + 5'500'000'000; now_ns() < end; pause_ms(50))
    EXPECT_TRUE(newcomers_here.look().empty());
  FrameStream stream(std::move(slow), tree::longest, handshake.keys());
  greet(stream, theirs, tree::Bond::tree);
  stream.flush();
  std::vector<Newcomers::Newcomer> newcomers;
  for (int i = 0; i < 1000 && newcomers.empty(); ++i, pause_ms(1)) newcomers = newcomers_here.look();
  ASSERT_EQ(newcomers.size(), 1u);
  EXPECT_EQ(newcomers[0].hello.node, 1u);
  std::array<char, 1024> proof;
  ssize_t got = 0;
  while ((got = ::recv(silent.get(), proof.data(), proof.size(), MSG_DONTWAIT)) > 0) continue;
  EXPECT_EQ(got, 0) << "who has said nothing was kept: " << std::strerror(errno);
}

// The child has the descriptors that its parent had open, and lives on.
TEST(NodeTree, ALeaderWhoseChildLivesOnIsDeadAtOnce) {
  for (const uint32_t victim : {0u, 1u}) {
    NodeJob job({1, 1, 1}, silence_ms);
    job.start([&](NodeRank &rank) {
      rank.meet(1);
      if (rank.rank == victim) {
        const pid_t child = ::fork();
        if (child == 0)
          for (;;) ::pause();
        rank.common->child = child;
      }
      train(rank);
    });
    ASSERT_TRUE(job.await_steps(20));
    const int64_t killed_ns = now_ns();
    job.send(victim, SIGKILL);
    const bool ended = job.collect(20);
    ::kill(job.common().child, SIGKILL);
    ASSERT_TRUE(ended) << "a rank hangs";
    job.expect(FSDP_PEER_FAILED, static_cast<int32_t>(victim), fmt::format("rank {} died", victim), {victim}, killed_ns,
               at_once);
  }
}

// This is the leader of node 1 of three. The test plays its parent and its neighbour at node 2.
class ChildLeader : public testing::Test {
 protected:
  void SetUp() override {
    plan.secret = "secret";
    plan.heartbeat_timeout_ms = 1000;
    plan.forming_ms = 2000;
    for (uint32_t n = 0; n < 3; ++n) listeners.push_back(open_leader_listener("127.0.0.1"));
    for (uint32_t n = 0; n < 3; ++n) plan.nodes[n].address = listeners[n].address;
    NodePlan root = plan, other = plan;
    root.rank = 0;
    other.rank = 2;
    Dial dial(plan, 0, tree::Bond::tree);
    Newcomers newcomers_here(root, listeners[0].stream);
    while (dial.advance() == Dial::State::trying) {
      for (Newcomers::Newcomer &newcomer : newcomers_here.look()) {
        parent = std::move(newcomer.stream);
        greet(parent, root, tree::Bond::tree);
      }
      parent.flush();
    }
    ASSERT_EQ(dial.state(), Dial::State::answered) << dial.problem();
    NodeLinks links;
    links.emplace(0, dial.take());
    seat = create_lone_seat(1, 3, rank.waiter, rank.failure);
    neighbour = std::make_unique<Datagrams>(other_ = other, std::move(listeners[2].datagrams));
    leader = std::make_unique<NodeLeader>(*seat, plan, std::move(links), std::move(listeners[1]));
  }
  void run_for(int64_t ms) {
    for (const int64_t end = now_ns() + ms * 1'000'000; now_ns() < end;) leader->run(-1, 10);
  }
  void say(uint32_t kind, std::span<const std::byte> bytes) {
    parent.queue(kind, bytes);
    parent.flush();
  }
  Rank rank;
  NodePlan plan = plan_of(1, 3, tree_degree), other_;
  std::vector<LeaderListener> listeners;
  FrameStream parent;
  std::shared_ptr<Seat> seat;
  std::unique_ptr<Datagrams> neighbour;
  std::unique_ptr<NodeLeader> leader;
};

// The parent waits for other children to connect, and sends no heartbeats before they have.
TEST_F(ChildLeader, GivesAParentThatFormsItsTime) {
  run_for(1600);
  EXPECT_FALSE(seat->control.accused());
  const tree::Beat beat{1};
  say(static_cast<uint32_t>(beat.kind), tree::bytes_of(beat));
  run_for(1800);
  EXPECT_TRUE(seat->control.accused()) << "it has been heard, and is silent";
}

// If the parent is silent, the leader cannot know whether the neighbour has left, too.
TEST_F(ChildLeader, AccusesNoLinkThatASilentParentWouldExplain) {
  neighbour->beat(1, 1);
  run_for(100);
  const tree::Goodbye goodbye{};
  say(static_cast<uint32_t>(goodbye.kind), tree::bytes_of(goodbye));
  run_for(3000);
  EXPECT_FALSE(seat->control.accused()) << seat->control.verdict().text.copy();
}

// Another path in the tree may bring older news.
TEST_F(ChildLeader, ANodeThatHasLeftDoesNotComeBack) {
  for (const Membership membership : {Membership::gone, Membership::member}) {
    const tree::StateMap states = {{2, {2, 0, static_cast<uint32_t>(membership), 0, 0}}};
    for (const SharedFrame &frame : tree::write_states(states, false, tree::longest)) parent.queue(frame);
    parent.flush();
    run_for(50);
    EXPECT_EQ(seat->control.membership(2), Membership::gone);
  }
}

// A broken parent sends such verdicts. Rank -1 stands for a link; 3 and more are no ranks of the job.
class StrangeRank : public ChildLeader, public testing::WithParamInterface<int32_t> {};
INSTANTIATE_TEST_SUITE_P(NodeTree, StrangeRank, testing::Values(3, 16'384, INT32_MAX, -2, INT32_MIN),
                         [](const auto &info) { return fmt::format("{}", static_cast<uint32_t>(info.param)); });

TEST_P(StrangeRank, IsNotBlamedButTheRankThatNamesIt) {
  Verdict verdict{accuse_rank(FailureKind::failed, 2, "it failed")};
  verdict.accusation.rank = GetParam();
  say(static_cast<uint32_t>(verdict.kind), tree::bytes_of(verdict));
  run_for(2000);
  EXPECT_EQ(seat->control.verdict().rank, 0);
  EXPECT_TRUE(seat->control.verdict().text.copy().ends_with("sent what is no message of this version of the library"));
}

// A rank that the job lacks is not blamed as a member of a set, either.
TEST_F(ChildLeader, BlamesNoSetWithARankThatTheJobLacks) {
  Verdict verdict{accuse_rank(FailureKind::died, 2, "ranks 2, 3 died")};
  verdict.accusation.ranks.add(3);
  say(static_cast<uint32_t>(verdict.kind), tree::bytes_of(verdict));
  run_for(300);
  for (const uint32_t blamed : error_of(seat->control.verdict(), 1).ranks) EXPECT_LT(blamed, 3u);
}

// The parent's connection stays open until the core is written, and nothing goes up by it.
TEST_F(ChildLeader, TurnsAwayFromAParentThatDumpsCore) {
  NodePlan root = plan;
  root.rank = 0;
  DumpNotices(root).send(77);
  run_for(400);
  ASSERT_TRUE(seat->control.accused());
  EXPECT_TRUE(seat->control.verdict().text.copy().ends_with("(pid 77, host h) is dumping core"))
      << seat->control.verdict().text.copy();
  while (parent.receive()) {
  }
  EXPECT_FALSE(parent.open());
}

// A peer has brought the address to the rendezvous.
TEST(NodeTree, AnAddressThatIsNoneIsFoundBeforeItIsNeeded) {
  Rank rank;
  NodePlan plan = plan_of(0, 3, 1);
  LeaderListener listener = open_leader_listener("127.0.0.1");
  for (NodePlace &place : plan.nodes) place.address = listener.address;
  plan.nodes[2].address = "nowhere";
  auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
  const Error error = test::error_of([&] { NodeLeader leader(*seat, plan, {}, std::move(listener)); });
  EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT) << error.message;
}

// A process that knows the secret says that it is the root, and asks for refuge.
TEST(NodeTree, NoNodeIsAboveTheRoot) {
  Rank rank;
  NodePlan plan = plan_of(2, 3, 1);
  LeaderListener listener = open_leader_listener("127.0.0.1");
  for (NodePlace &place : plan.nodes) place.address = listener.address;
  auto seat = create_lone_seat(2, 3, rank.waiter, rank.failure);
  NodeLeader leader(*seat, plan, {}, std::move(listener));
  NodePlan root = plan;
  root.rank = 0;
  Dial dial(root, 2, tree::Bond::refuge);
  for (int i = 0; i < 500 && dial.advance() == Dial::State::trying; ++i) leader.run(-1, 1);
  EXPECT_EQ(dial.state(), Dial::State::answered) << dial.problem();
}

// A node has nothing to report, and arrives when everything is decided.
TEST(NodeTree, ALateRefugeeHearsTheVerdict) {
  Rank rank;
  NodePlan plan = plan_of(0, 3, 1);
  plan.secret = "secret";
  LeaderListener listener = open_leader_listener("127.0.0.1");
  for (NodePlace &place : plan.nodes) place.address = listener.address;
  auto seat = create_lone_seat(0, 3, rank.waiter, rank.failure);
  NodeLeader leader(*seat, plan, {}, std::move(listener));
  seat->control.decide(accuse_rank(FailureKind::failed, 1, "it failed"));
  for (int i = 0; i < 3; ++i) leader.run(-1, 1);
  NodePlan own = plan;
  own.rank = 2;
  Dial dial(own, 0, tree::Bond::refuge);
  for (int i = 0; i < 500 && dial.advance() == Dial::State::trying; ++i) leader.run(-1, 1);
  ASSERT_EQ(dial.state(), Dial::State::answered) << dial.problem();
  FrameStream refuge = dial.take();
  std::optional<Frame> frame;
  for (int i = 0; i < 500 && !(frame = refuge.receive()); ++i) leader.run(-1, 1);
  ASSERT_TRUE(frame);
  const auto verdict = tree::as<Verdict>(*frame);
  ASSERT_TRUE(verdict);
  EXPECT_EQ(verdict->accusation.text.copy(), "it failed");
}

}  // namespace
}  // namespace fsdp::transport::test
