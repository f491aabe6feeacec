// SPDX-License-Identifier: Apache-2.0
// Ranks end when all know which ranks are in the job, but the leaders of the hosts have not found each other yet. Whole
// worlds over TCP run beside hand-made leaders that never connect.
#include <algorithm>

#include "membership/tree/dial.h"
#include "net_ranks.h"
#include "rendezvous_fixture.h"
#include "transport/hierarchy/cards.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

class FormingWorld : public Rendezvous {
 protected:
  void SetUp() override {
    Rendezvous::SetUp();
    options.size = 4;
    options.timeout_ms = 30'000;
    options.heartbeat_timeout_ms = 1000;  // nothing here waits for it
  }
  void TearDown() override {
    for (const pid_t process : processes) ::kill(process, SIGKILL);
    Rendezvous::TearDown();
  }

  size_t start_world(uint32_t rank, const std::string &host) {
    WorldOptions world = options;
    world.rank = rank;
    world.host_id = host;
    const size_t index = processes.size();
    const pid_t process = ::fork();
    if (process == 0) {
      live(world, reports[index]);
      ::_exit(0);
    }
    processes.push_back(process);
    return index;
  }
  // Ranks 0 and 1 share a host. Ranks 2 and 3 have a host each, listen, and do not connect.
  void start_forming() {
    zero = start_world(0, "near");
    one = start_world(1, "near");
    for (const uint32_t rank : {2u, 3u}) {
      streams.push_back(enter());
      listeners.push_back(open_leader_listener("127.0.0.1"));
      introduce(streams.back(), rank);
      RankCard card;
      const auto nowhere = bytes_of("127.0.0.1:1");
      card.tcp = nowhere;
      card.leader = listeners.back().address;
      card.descriptors = count_descriptors();
      streams.back().queue(message::share(message::Card{rank, write_card(card)}));
      EXPECT_TRUE(streams.back().flush());
    }
    for (FrameStream &stream : streams) EXPECT_TRUE(hear<message::Start>(stream));
    std::this_thread::sleep_for(1500ms);  // longer than the heartbeat's limit; no rank gives up because of that
  }
  void expect_told(std::initializer_list<size_t> survivors, int32_t rank, int64_t since_ns) {
    finish();
    for (const size_t index : survivors) {
      expect(index, FSDP_PEER_FAILED, "rank " + std::to_string(rank));
      EXPECT_EQ(reports[index].rank, rank) << reports[index].text;
      EXPECT_GT(reports[index].ended_ns, since_ns) << reports[index].text;
      EXPECT_LT(static_cast<double>(reports[index].ended_ns - since_ns) * 1e-9, patience_seconds)
          << reports[index].text;
    }
  }

  size_t zero = 0, one = 0;
  std::vector<FrameStream> streams;
  std::vector<LeaderListener> listeners;

 private:
  static void live(const WorldOptions &world, MeetingReport &report) {
    RankOptions rank_options;
    rank_options.timeout_ms = world.timeout_ms;
    Rank rank(rank_options);
    const Error error =
        error_of([&] { rank.world = create_process_world(world, rank.waiter, rank.failure, *rank.device); });
    report.ended_ns = now_ns();
    report.status = error.status;
    report.rank = error.rank;
    std::strncpy(report.text, error.what(), sizeof report.text - 1);
  }
};

TEST_F(FormingWorld, ALeaderThatDiesIsNamedAtOnce) {
  start_forming();
  const int64_t died_ns = now_ns();
  streams[0] = FrameStream();
  const auto told = hear<Verdict>(streams[1]);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->accusation.rank, 2);
  expect_told({zero, one}, 2, died_ns);
}

TEST_F(FormingWorld, ANeighbourThatDiesIsNamedAtOnce) {
  start_forming();
  const int64_t died_ns = now_ns();
  ::kill(processes[one], SIGKILL);
  const auto told = hear<Verdict>(streams[1]);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->accusation.rank, 1);
  expect_told({zero}, 1, died_ns);
}

TEST_F(FormingWorld, RankZeroThatDiesIsNamedAtOnce) {
  start_forming();
  const int64_t died_ns = now_ns();
  ::kill(processes[zero], SIGKILL);
  expect_told({one}, 0, died_ns);
}

// No process ends. The job's limit ends the wait, and not the heartbeat's.
TEST_F(FormingWorld, ARankThatNeverConnectsIsNamedAtTheLimit) {
  options.timeout_ms = 4000;
  const int64_t start_ns = now_ns();
  start_forming();
  finish();
  for (const size_t index : {zero, one}) {
    expect(index, FSDP_PEER_FAILED, "did not connect while the job formed: not within");
    EXPECT_EQ(reports[index].rank, 2);
    EXPECT_LT(static_cast<double>(reports[index].ended_ns - start_ns) * 1e-9, 6.5);
  }
}

// Rank 0 is hand-made, and its roster says that all ranks have UCX. Rank 1 has asked for TCP, and opened nothing else.
TEST_F(FormingWorld, WhatTheRosterSaysOfARankIsWhatItBrought) {
  options.size = 2;
  const Fd listener = listen_at(at, 4);
  ::setenv("FSDP_NET", "tcp", 1);
  one = start_world(1, "near");
  ::unsetenv("FSDP_NET");
  await_readable(listener, 10'000);
  FrameStream stream = let_in(accept_from(listener));
  const auto brought = hear<message::Card>(stream);
  ASSERT_TRUE(brought);
  // The bytes must live as long as the card.
  RankCard card = read_card(brought->bytes).value();
  card.asked = NetChoice::ucx;
  card.ucx = card.tcp;
  const auto changed = write_card(card);
  const message::Entries entries{{0, 0, "a host", changed}, {1, 1, "a host", changed}};
  stream.queue(message::share(entries));
  stream.queue(message::share(message::Start{2, {}}));
  EXPECT_TRUE(stream.flush());
  const auto told = hear<Report>(stream);
  finish();
  expect(one, FSDP_MISMATCH, "rank 0 says of rank 1 (a host) what that rank has not brought to the rendezvous");
  ASSERT_TRUE(told) << "the others are told";
  EXPECT_EQ(told->accusation.rank, 1);
}

// The same holds for forged messages of rank 0, before the roster and after it.
TEST_F(FormingWorld, ForgedWordsOfRankZeroBlameNoRank) {
  options.size = 2;
  const LeaderListener leader = open_leader_listener("127.0.0.1");
  for (const bool met : {false, true}) {
    at = free_place();
    options.rendezvous = "tcp://" + at.text();
    const Fd listener = listen_at(at, 4);
    one = start_world(1, "near");
    await_readable(listener, 10'000);
    FrameStream stream = let_in(accept_from(listener));
    const auto brought = hear<message::Card>(stream);
    ASSERT_TRUE(brought);
    RankCard card;
    const auto nowhere = bytes_of("127.0.0.1:1");
    card.tcp = nowhere;
    card.leader = leader.address;
    card.descriptors = count_descriptors();
    if (met) {
      const auto written = write_card(card);
      stream.queue(message::share(message::Entries{{0, 0, "a", written}, {1, 1, "b", brought->bytes}}));
      stream.queue(message::share(message::Start{2, {}}));
      EXPECT_TRUE(stream.flush());
    }
    const auto forged = message::write(Verdict{accuse_rank(FailureKind::aborted, 0, "a lie")});
    for (int i = 0; i < 2; ++i) ::send(stream.socket().get(), forged.data(), forged.size(), MSG_NOSIGNAL);
    const auto told = hear<Report>(stream);
    finish();
    expect(one, FSDP_PEER_FAILED, "before the job has formed: what came was not said by the other end");
    EXPECT_EQ(reports[one].rank, -1) << reports[one].text;
    ASSERT_TRUE(told) << "rank 0 is told";
    EXPECT_EQ(told->accusation.rank, -1);
  }
}

// One rank lacks FSDP_UCX_TCP=trusted, or all ranks do. Every rank reports the same error, and the report of no rank
// refers to the rank's own error for the reason.
TEST_F(FormingWorld, WithoutTrustInTcpAllRanksSayTheSame) {
  options.size = 3;
  ::setenv("FSDP_NET", "ucx", 1);
  for (const std::vector<uint32_t> &without : {std::vector<uint32_t>{0, 1, 2}, {2}, {0}}) {
    std::vector<size_t> indices;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      use_loopback();
      if (std::ranges::count(without, rank)) ::unsetenv("FSDP_UCX_TCP");
      indices.push_back(start_world(rank, "host of " + std::to_string(rank)));
    }
    use_loopback();
    finish();
    for (const size_t index : indices) {
      expect(index, FSDP_UNSUPPORTED, "set FSDP_UCX_TCP=trusted on every rank");
      EXPECT_STREQ(reports[index].text, reports[indices[0]].text);
      EXPECT_EQ(reports[index].rank, static_cast<int32_t>(without[0]));
      EXPECT_NE(std::string(reports[index].text).find(fmt::format("rank {} (", without[0])), std::string::npos);
    }
    options.attempt++;
  }
  ::unsetenv("FSDP_NET");
}

// The key of the connections is derived from the secret. Ranks without a secret meet at loopback addresses.
TEST_F(FormingWorld, EncryptionNeedsASecret) {
  ::setenv("FSDP_NET_ENCRYPTION", "on", 1);
  options.size = 2;
  options.secret.clear();
  zero = start_world(0, "near");
  one = start_world(1, "far");
  ::unsetenv("FSDP_NET_ENCRYPTION");
  finish();
  for (const size_t index : {zero, one})
    EXPECT_NE(
        std::string(reports[index].text).find("FSDP_NET_ENCRYPTION=on needs a job secret: set FSDP_JOB_SECRET_FILE"),
        std::string::npos)
        << reports[index].text;
}

}  // namespace
}  // namespace fsdp::transport::test
