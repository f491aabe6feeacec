// SPDX-License-Identifier: Apache-2.0
// Ranks of one host reach rank 0 through the first of them. From a certain number of hosts on, hosts also reach rank 0
// through other hosts.
#include "membership/join/forming_watch.h"
#include "membership/join/guest.h"
#include "membership/join/tcp_visit.h"
#include "rendezvous_fixture.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

class Uplinks : public Rendezvous {
 protected:
  void SetUp() override {
    Rendezvous::SetUp();
    options.timeout_ms = 30'000;
  }
  void TearDown() override {
    for (const pid_t process : processes) ::kill(process, SIGKILL);
    Rendezvous::TearDown();
  }
  // Ranks 1, 2 and 3 share a host, and rank 1 has come first, so the others reach rank 0 through rank 1.
  void start_host() {
    one = start(1, "b");
    await_join(one);
    two = start(2, "b");
    three = start(3, "b");
    await_join(two);
    await_join(three);
  }
  void expect_told(std::initializer_list<size_t> survivors, int32_t rank, const std::string &text) {
    finish();
    for (const size_t index : survivors) {
      expect_ended(index, FSDP_PEER_FAILED, text);
      EXPECT_EQ(reports[index].rank, rank);
    }
  }
  void expect_ended(size_t index, fsdp_status status, const std::string &text) {
    EXPECT_EQ(reports[index].status, status) << index << ": " << reports[index].text;
    EXPECT_NE(std::string(reports[index].text).find(text), std::string::npos) << index << ": " << reports[index].text;
  }
  // Accepts the next connection by hand, as rank 0.
  FrameStream accept_next(const Fd &listener) {
    await_readable(listener, 10'000);
    return let_in(accept_from(listener));
  }

  // Makes a rank of host b by hand. It connects to the host's first rank, and has proven the secret.
  FrameStream come_to_host() {
    WorldOptions world = options;
    const HostMeeting host_meeting(world, "b");
    std::string problem;
    for (int tries = 0; tries < 500; ++tries) {
      if (Fd socket = host_meeting.visit(problem)) return prove_to(std::move(socket), Role::guest);
      std::this_thread::sleep_for(10ms);
    }
    ADD_FAILURE() << problem;
    return {};
  }

  size_t zero = 0, one = 0, two = 0, three = 0;
};

TEST_F(Uplinks, HostJoinsByOneConnection) {
  options.size = 4;
  const Fd listener = listen_at(at, 8);
  const size_t ranks[] = {start(1, "b"), start(2, "b"), start(3, "b")};
  FrameStream host = accept_next(listener);
  ASSERT_TRUE(hear<message::Join>(host));
  host.queue(message::share(message::Admitted{0, "a"}));
  host.flush();
  std::vector<std::vector<std::byte>> cards(4, bytes_of("card-0"));
  std::vector<std::string> known;
  for (int n = 0; n < 3; ++n) {
    const auto card = hear<message::Card>(host);
    ASSERT_TRUE(card);
    cards.at(card->rank) = card->bytes;
  }
  // All ranks reach each other if the first one reaches rank 0.
  for (const uint32_t r : {1, 2, 3}) EXPECT_EQ(cards[r], bytes_of("card-" + std::to_string(r) + "@127.0.0.1"));
  EXPECT_FALSE(accept_from(listener)) << "nobody else came";
  for (uint32_t r = 0; r < 4; ++r)
    host.queue(message::share(message::Entries{{r, r ? 1u : 0u, r ? "b" : "a", cards[r]}}));
  host.queue(message::share(message::Start{4, make_nonce()}));
  host.flush();
  EXPECT_TRUE(hear<message::Formed>(host));
  finish();
  for (const size_t index : ranks) {
    expect(index, FSDP_OK);
    EXPECT_EQ(nodes(index), (std::vector<uint32_t>{0, 1, 1, 1}));
  }
}

// Rank 0 sends all its messages at once. The listening socket is gone when the watch next looks.
TEST_F(Uplinks, TheJobStartsWithTheAdmission) {
  options.size = 2;
  hold = 3s;
  const Fd listener = listen_at(at, 8);
  const size_t rank = start(1, "b");
  FrameStream host = accept_next(listener);
  const auto card = hear<message::Card>(host);
  ASSERT_TRUE(card);
  host.queue(message::share(message::Admitted{0, "a"}));
  host.queue(message::share(message::Entries{{0, 0, "a", {}}, {1, 1, "b", card->bytes}}));
  host.queue(message::share(message::Start{2, make_nonce()}));
  host.flush();
  WorldOptions world = options;
  HostMeeting host_meeting(world, "b");
  for (const auto last = std::chrono::steady_clock::now() + 20s;
       !host_meeting.take() && std::chrono::steady_clock::now() < last;)
    std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(host_meeting.taken()) << "the name of the host is free again";
  EXPECT_EQ(reports[rank].ended_ns, 0) << "not before the end of the rank";
  EXPECT_TRUE(hear<message::Formed>(host));
  finish();
  expect(rank, FSDP_OK);
}

// A rank takes others along only once rank 0 has admitted it.
TEST_F(Uplinks, RefusedRankDelaysNoOtherRank) {
  options.size = 3;
  WorldOptions wrong = options;
  wrong.size = 5;
  wrong.rank = 4;
  wrong.host_id = "b";
  const size_t first = start(wrong);
  std::this_thread::sleep_for(200ms);  // it holds the host's name, and is looking for rank 0
  one = start(1, "b");
  two = start(2, "b");
  std::this_thread::sleep_for(200ms);
  zero = start(0, "a");
  finish();
  expect(first, FSDP_MISMATCH, "rank 4 says that the world has 5 ranks, rank 0 says 3");
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Uplinks, WrongRanksOfAHostAreRefusedAndTheJobForms) {
  options.size = 5;
  zero = start(0, "a");
  start_host();
  const size_t again = start(2, "b"), first_again = start(1, "b");
  await_end(again);
  await_end(first_again);
  std::this_thread::sleep_for(1s);  // rank 0 has learned of rank 2 from rank 1
  FrameStream elsewhere = enter();
  introduce(elsewhere, 2);
  const auto word = hear<message::Refused>(elsewhere);
  const size_t four = start(4, "c");
  finish();
  for (const size_t index : {zero, one, two, three, four}) expect(index, FSDP_OK);
  expect(again, FSDP_INVALID_ARGUMENT, "another process is rank 2 already");
  expect(first_again, FSDP_INVALID_ARGUMENT, "another process is rank 1 already");
  ASSERT_TRUE(word);
  EXPECT_NE(word->text.find("another process is rank 2 already"), std::string::npos) << word->text;
}

// Rank 0's answer to a process behind another rank is for that process alone, and its rank number is free again.
TEST_F(Uplinks, RankZeroRefusesOneRankOfAHost) {
  options.size = 3;
  WorldOptions wrong = options;
  wrong.size = 5;
  wrong.rank = 2;
  wrong.host_id = "b";
  zero = start(0, "a");
  one = start(1, "b");
  await_join(one);
  const size_t other = start(wrong);
  await_end(other);
  two = start(2, "b");
  finish();
  expect(other, FSDP_MISMATCH, "rank 2 says that the world has 5 ranks, rank 0 says 3");
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Uplinks, DeathOfARankThatOthersJoinedThroughBlamesOnlyThatRank) {
  options.size = 5;
  zero = start(0, "a");
  start_host();
  ::kill(processes[one], SIGKILL);
  expect_told({zero, two, three}, 1, "rank 1 ");
  EXPECT_NE(std::string(reports[two].text).find("before the job had formed"), std::string::npos) << reports[two].text;
}

TEST_F(Uplinks, ADeathBehindAnotherRankIsSeenByAll) {
  options.size = 5;
  zero = start(0, "a");
  start_host();
  ::kill(processes[two], SIGKILL);
  expect_told({zero, one, three}, 2, "died before the job had formed");
}

TEST_F(Uplinks, ADeathAfterTheRosterIsSeenByAll) {
  for (const bool first : {true, false}) {
    options.size = 4;
    hold = 20s;
    zero = start(0, "a");
    start_host();
    for (const size_t index : {zero, one, two, three})
      while (!reports[index].met) std::this_thread::sleep_for(1ms);
    ::kill(processes[first ? one : two], SIGKILL);
    expect_told({zero, first ? two : one, three}, first ? 1 : 2, "died before the job had formed");
  }
}

// The others of its host wait for descriptors that it has not sent.
TEST_F(Uplinks, ADeathBeforeItsDescriptorsIsSeenByAll) {
  options.size = 4;
  pause = 500ms;
  hold = 20s;
  zero = start(0, "a");
  start_host();
  for (const size_t index : {zero, one, two, three})
    while (!reports[index].met) std::this_thread::sleep_for(1ms);
  ::kill(processes[one], SIGKILL);
  expect_told({zero, two, three}, 1, "died before the job had formed");
}

TEST_F(Uplinks, TheDeathOfRankZeroIsSeenByAll) {
  options.size = 5;
  zero = start(0, "a");
  start_host();
  ::kill(processes[zero], SIGKILL);
  expect_told({one, two, three}, 0, "rank 0 ended before the job had formed");
}

// Rank 0's decision reaches the ranks of a host through the rank by which they came, whatever their own timeouts.
TEST_F(Uplinks, AVerdictReachesAllOfAHost) {
  options.size = 5;
  zero = [&] {
    WorldOptions world = options;
    world.rank = 0;
    world.host_id = "a";
    world.timeout_ms = 3000;
    return start(world);
  }();
  start_host();
  finish();
  for (const size_t index : {zero, one, two, three}) {
    expect(index, FSDP_TIMEOUT, "rank 4 has not come to the rendezvous");
    EXPECT_EQ(reports[index].rank, 4);
  }
}

// The first rank whose time is over tells all others.
TEST_F(Uplinks, RankThatGivesUpTellsRanksThatJoinedThroughIt) {
  options.size = 5;
  zero = start(0, "a");
  WorldOptions hasty = options;
  hasty.rank = 1;
  hasty.host_id = "b";
  hasty.timeout_ms = 1500;
  one = start(hasty);
  await_join(one);
  two = start(2, "b");
  await_join(two);
  finish();
  for (const size_t index : {zero, one, two})
    expect(index, FSDP_TIMEOUT, "rank 0 has not sent the start of the job to rank 1 within 1500 ms");
}

// It also passes on rank 0's answer, because another rank may be to blame.
TEST_F(Uplinks, RankThatGivesUpPassesOnTheVerdictOfRankZero) {
  options.size = 4;
  const Fd listener = listen_at(at, 8);
  WorldOptions hasty = options;
  hasty.rank = 1;
  hasty.host_id = "b";
  hasty.timeout_ms = 1500;
  one = start(hasty);
  FrameStream host = accept_next(listener);
  ASSERT_TRUE(hear<message::Join>(host));
  host.queue(message::share(message::Admitted{0, "a"}));
  host.flush();
  two = start(2, "b");
  await_join(two);
  ASSERT_TRUE(hear<Report>(host)) << "it gives up";
  std::this_thread::sleep_for(100ms);
  host.queue(message::share(Verdict{accuse_rank(FailureKind::failed, 3, "rank 3 died")}));
  host.flush();
  expect_told({two}, 3, "rank 3 died");
}

// A rank that holds the name of its host is stopped: the others connect to rank 0 by themselves.
TEST_F(Uplinks, ARankThatIsStoppedDoesNotHoldOthersBackForLong) {
  options.size = 3;
  options.timeout_ms = 9000;
  HostMeeting stopped(options, "b");
  ASSERT_TRUE(stopped.take());
  zero = start(0, "a");
  one = start(1, "b");
  two = start(2, "b");
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

// When all ranks have come, another process behind another host claims this rank.
TEST_F(Uplinks, RankThatComesAfterAllOthersIsToldSo) {
  options.size = 2;
  hold = 1s;
  zero = start(0, "a");
  FrameStream host = enter();
  join(host, 1);
  ASSERT_TRUE(hear<message::Start>(host));
  host.queue(message::share(message::Join{1, 2, 0, "b", "b"}));
  host.queue(message::share(Report{accuse_rank(FailureKind::aborted, 0, "of no rank here"), 0}));
  host.flush();
  const auto word = hear<message::Refused>(host);
  ASSERT_TRUE(word);
  EXPECT_EQ(word->to, 1);
  EXPECT_NE(word->text.find("all ranks have come"), std::string::npos) << word->text;
  finish();
  expect(zero, FSDP_OK);
}

// If the rank by which it comes dies, a rank that is not admitted yet tries again.
TEST_F(Uplinks, ARankThatIsNotAdmittedYetBlamesNoOther) {
  options.size = 3;
  WorldOptions world = options;
  std::optional<HostMeeting> host_meeting(std::in_place, world, "b");
  ASSERT_TRUE(host_meeting->take());
  const std::span<const Fd> listeners = host_meeting->open();
  two = start(2, "b");
  Fd socket;
  for (int tries = 0; tries < 2000 && !socket; ++tries) {
    for (const Fd &listener : listeners)
      if (!socket) socket = accept_from(listener);
    std::this_thread::sleep_for(5ms);
  }
  FrameStream first = let_in(std::move(socket));
  ASSERT_TRUE(hear<message::Join>(first));
  first = FrameStream();  // dead
  host_meeting.reset();
  zero = start(0, "a");
  one = start(1, "b");
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

// A process claims the same rank as another one, through the same connection. Its messages do not count as that rank's.
TEST_F(Uplinks, MessagesOfARefusedRankAreIgnored) {
  options.size = 5;
  zero = start(0, "a");
  one = start(1, "b");
  await_join(one);
  two = start(2, "b");
  await_join(two);
  FrameStream three_by_hand = come_to_host();
  introduce(three_by_hand, 3);
  three_by_hand.queue(message::share(message::Join{2, 5, 0, "b", "b"}));
  for (int times = 0; times < 2; ++times)
    three_by_hand.queue(message::share(message::Card{2, bytes_of("not that rank's")}));
  three_by_hand.queue(message::share(Report{accuse_death(2)}));
  three_by_hand.queue(message::share(Report{accuse_rank(FailureKind::aborted, 2, "it gives up"), 2}));
  three_by_hand.flush();
  const auto word = hear<message::Refused>(three_by_hand);
  ASSERT_TRUE(word);
  EXPECT_EQ(word->to, 2);
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(reports[zero].ended_ns, 0) << reports[zero].text;
  three_by_hand = FrameStream();
  expect_told({zero, one, two}, 3, "rank 3 on far died before the job had formed");
}

// The rank above passes such messages on to no other rank, because that rank would blame it for them.
class Nonsense : public Uplinks, public testing::WithParamInterface<std::vector<std::byte>> {};

TEST_P(Nonsense, NamesTheRankThatSentItAndNotTheRankAbove) {
  options.size = 5;
  zero = start(0, "a");
  one = start(1, "b");
  await_join(one);
  FrameStream three_by_hand = come_to_host();
  introduce(three_by_hand, 3);
  three_by_hand.queue(share_frame(GetParam()));
  three_by_hand.flush();
  expect_told({zero, one}, 3, "rank 3 on far sent what is no message of this version of the library");
}

std::vector<std::byte> report_of_rank_77() {
  const uint32_t ranks[] = {2, 77};
  return message::write(Report{accuse_ranks(FailureKind::failed, ranks, "they failed")});
}
INSTANTIATE_TEST_SUITE_P(Uplink, Nonsense, testing::Values(report_of_rank_77(), write_frame(Report::kind, {})),
                         [](const auto &info) {
                           return info.index ? "AShortReport" : "AReportOfARankThatTheJobLacks";
                         });

TEST_F(Uplinks, JoiningRankGetsTheVerdict) {
  options.size = 4;
  WorldOptions world = options;
  world.rank = 0;
  world.host_id = "a";
  world.timeout_ms = 3000;
  zero = start(world);
  one = start(1, "b");
  await_join(one);
  FrameStream coming = come_to_host();
  const auto told = hear<message::Refused>(coming);  // its library may be of another version
  ASSERT_TRUE(told);
  EXPECT_EQ(told->status, FSDP_TIMEOUT);
  EXPECT_NE(told->text.find("have not come to the rendezvous"), std::string::npos) << told->text;
}

// Another user's process has the name of the host: each rank connects by itself.
TEST_F(Uplinks, UnknownProcessAtTheHostsSocketDelaysNoRank) {
  if (::geteuid() != 0) GTEST_SKIP() << "another user's process is needed: only root can make one";
  options.size = 3;
  WorldOptions world = options;
  world.host_id = "b";
  HostMeeting host_meeting(world, "b");
  ASSERT_TRUE(host_meeting.take());
  const std::span<const Fd> listeners = host_meeting.open();
  (void)listeners;
  int listens[2];  // its end, where the stranger listens
  ASSERT_EQ(::pipe2(listens, O_CLOEXEC), 0);
  const pid_t stranger = ::fork();
  if (stranger == 0) {
    if (::setuid(65534) != 0) ::_exit(1);
    // The user of a listener is the one that calls listen().
    for (int file = 3; file < 64; ++file) {
      sockaddr_storage name{};
      socklen_t length = sizeof name;
      if (::getsockname(file, reinterpret_cast<sockaddr *>(&name), &length) == 0 && name.ss_family == AF_UNIX)
        ::listen(file, 8);
    }
    (void)!::write(listens[1], "1", 1);
    ::pause();
    ::_exit(0);
  }
  ::close(listens[1]);
  char byte = 0;
  ASSERT_EQ(::read(listens[0], &byte, 1), 1);
  ::close(listens[0]);
  zero = start(0, "a");
  one = start(1, "b");
  two = start(2, "b");
  finish();
  ::kill(stranger, SIGKILL);
  ::waitpid(stranger, nullptr, 0);
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

// -- many hosts --

message::Join host_of(uint32_t rank, const std::string &listens) { return {rank, 1000, 0, "id", "host", listens}; }

Fd any_socket() { return Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

TEST(Branches, ManyHostsAreRedirectedInTurn) {
  Branches branches;
  for (uint32_t r = 1; r < join_degree; ++r)
    branches.add(FrameStream(any_socket(), 1), host_of(r, r < 3 ? "10.0.0." + std::to_string(r) + ":1" : ""), true);
  for (uint32_t r = 500; r < 600; ++r) branches.add(FrameStream(any_socket(), 1), host_of(r, "of this host"), false);
  EXPECT_FALSE(branches.redirect(false)) << "there is a place left: ranks of this host take none";
  branches.add(FrameStream(any_socket(), 1), host_of(join_degree, ""), true);
  for (int turn = 0; turn < 2; ++turn)
    for (const uint32_t r : {1, 2}) {
      const auto to = branches.redirect(false);
      ASSERT_TRUE(to);
      EXPECT_EQ(to->rank, r);
      EXPECT_EQ(to->address, "10.0.0." + std::to_string(r) + ":1");
    }
  branches.of(1)->listens = "127.0.0.1:7";
  EXPECT_EQ(branches.redirect(false)->rank, 2U) << "only those of that host reach it";
  EXPECT_EQ(branches.redirect(false)->rank, 2U);
  branches.of(1)->listens = "nonsense";
  EXPECT_EQ(branches.redirect(true)->rank, 2U);
  branches.of(1)->watched = false;
  EXPECT_FALSE(branches.redirect(false)) << "one of them has gone";
}

// tests/tools/perf_test.sh covers 70 hosts with redirected processes.
TEST_F(Uplinks, RedirectedRankJoinsThere) {
  options.size = 200;
  const Fd listener = listen_at(at, 8), further = listen_at(free_place(), 8);
  const size_t rank = start(7, "b");
  FrameStream zeros = accept_next(listener);
  const auto join = hear<message::Join>(zeros);
  ASSERT_TRUE(join);
  EXPECT_NE(join->listens, "") << "others may be sent to it";
  zeros.queue(message::share(message::Redirect{3, "far", Endpoint::local(further).text()}));
  zeros.flush();
  zeros = FrameStream();
  FrameStream there = accept_next(further);
  const auto again = hear<message::Join>(there);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->rank, 7U);
  there.queue(message::share(message::Admitted{3, "far"}));
  there.flush();
  ASSERT_TRUE(hear<message::Card>(there));
  there = FrameStream();
  finish();
  expect(rank, FSDP_PEER_FAILED, "rank 3 ended before the job had formed");
  EXPECT_EQ(reports[rank].rank, 3);
  EXPECT_EQ(reports[rank].cards, 1) << "one card for both";
}

TEST_F(Uplinks, RankWhoseRedirectionFailsComesBack) {
  options.size = 200;
  const Fd listener = listen_at(at, 8);
  const Endpoint nobody = free_place();
  const size_t rank = start(7, "b");
  FrameStream zeros = accept_next(listener);
  ASSERT_TRUE(hear<message::Join>(zeros));
  zeros.queue(message::share(message::Redirect{3, "far", nobody.text()}));
  zeros.flush();
  zeros = FrameStream();
  zeros = accept_next(listener);
  ASSERT_TRUE(hear<message::Join>(zeros));
  zeros.queue(message::share(message::Refused{FSDP_MISMATCH, -1, "enough"}));
  zeros.flush();
  finish();
  expect(rank, FSDP_MISMATCH, "enough");
}

}  // namespace
}  // namespace fsdp::transport::test
