// SPDX-License-Identifier: Apache-2.0
// Tests how processes meet to form a job: in any order, and with ranks missing, wrong or dead.
#include <csignal>
#include <filesystem>
#include <fstream>

#include "bootstrap_fixture.h"
#include "membership/join/rank_links.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

// An end that has not read all received bytes resets the connection after it has sent the reason.
TEST(Packet, TheLastWordBeforeAResetIsHeard) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const Fd near(pair[0]);
  Fd far(pair[1]);
  ASSERT_EQ(send_packet(near, "unread", 6), Sent::yes);
  const auto word = wire::make_refused(FSDP_PEER_FAILED, 2, "rank 2 died");
  ASSERT_EQ(send_packet(far, &word, sizeof word), Sent::yes);
  far.reset();
  const auto heard = receive_packet(near);
  ASSERT_TRUE(heard && heard->as<wire::RefusedPacket>());
  EXPECT_EQ(heard->as<wire::RefusedPacket>()->text.view(), "rank 2 died");
  const auto end = receive_packet(near);
  ASSERT_TRUE(end);
  EXPECT_EQ(end->bytes, 0u);
}

TEST(Packet, AResetAloneIsAnEnd) {
  int pair[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
  const Fd near(pair[0]);
  ASSERT_EQ(send_packet(near, "unread", 6), Sent::yes);
  Fd(pair[1]).reset();
  for (int i = 0; i < 2; ++i) {
    const auto end = receive_packet(near);
    ASSERT_TRUE(end);
    EXPECT_EQ(end->bytes, 0u);
  }
}

TEST_F(Bootstrap, RanksMayComeInAnyOrder) {
  const size_t two = start(2), one = start(1);
  std::this_thread::sleep_for(100ms);
  const size_t zero = start(0U);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Bootstrap, ATimeoutNamesTheMissing) {
  options.timeout_ms = 3000;
  options.size = 4;
  const size_t zero = start(0U);
  connect();  // its time has begun: the time of rank 2, which waits for its answer, ends later
  const size_t two = start(2);
  finish();
  for (const size_t index : {zero, two}) {
    expect(index, FSDP_TIMEOUT, "ranks 1, 3 have not come to the rendezvous");
    EXPECT_EQ(reports[index].rank, 1);
  }
}

// All ranks end at once and say which call is denied to which rank, however long their timeout is.
TEST_F(Bootstrap, ADeniedCallEndsAllRanksAtOnce) {
  for (const auto &[name, number] : needed_calls)
    for (const uint32_t victim : {0u, 1u}) {
      options.rendezvous = unique_rendezvous();
      options.timeout_ms = 60'000;
      std::vector<size_t> indexes;
      const int64_t start_ns = now_ns();
      for (uint32_t rank = 0; rank < 3; ++rank) {
        WorldOptions world = options;
        world.rank = rank;
        world.farewell_ms = 3000;
        indexes.push_back(start(world, rank == victim ? std::optional(number) : std::nullopt));
      }
      finish();
      for (uint32_t rank = 0; rank < 3; ++rank) {
        expect(indexes[rank], rank == victim ? FSDP_SYSTEM : FSDP_PEER_FAILED,
               fmt::format("this process may not call {}", name));
        if (rank != victim) {
          EXPECT_EQ(reports[indexes[rank]].rank, static_cast<int32_t>(victim));
        }
        EXPECT_LT(static_cast<double>(reports[indexes[rank]].ended_ns - start_ns) * 1e-9, 30) << name << rank;
      }
    }
}

// The same holds if all ranks run under one profile: no rank waits for another.
TEST_F(Bootstrap, ACallThatIsDeniedToAllEndsAllRanksAtOnce) {
  options.timeout_ms = 60'000;
  const int64_t start_ns = now_ns();
  for (const uint32_t rank : {0u, 1u, 2u}) {
    WorldOptions world = options;
    world.rank = rank;
    start(world, SYS_memfd_create);
  }
  finish();
  for (const size_t index : {0u, 1u, 2u}) {
    expect(index, FSDP_SYSTEM, "this process may not call memfd_create");
    EXPECT_LT(static_cast<double>(reports[index].ended_ns - start_ns) * 1e-9, 30);
  }
}

TEST_F(Bootstrap, ATimeoutNamesTheNetworkNamespace) {
  options.timeout_ms = 1000;
  const std::string space = std::filesystem::read_symlink("/proc/self/ns/net");
  const size_t zero = start(0U);
  finish();
  expect(zero, FSDP_TIMEOUT, "(in rank 0's network namespace, " + space + ")");
  const size_t one = start(1);
  finish();
  expect(one, FSDP_TIMEOUT, "in this rank's network namespace (" + space + ")");
}

// The last rank never comes. If a rank dies during this wait, all ranks that have come learn it long before the
// timeout.
TEST_F(Bootstrap, ARankThatDiesBeforeAllHaveJoinedIsNamed) {
  options.size = 4;
  const size_t zero = start(0U), one = start(1), two = start(2);
  for (const uint32_t rank : {1, 2}) await_admission(rank);
  const int64_t died_ns = now_ns();
  ::kill(processes[two], SIGKILL);
  finish();
  expect_death({zero, one}, 2, died_ns);
}

TEST_F(Bootstrap, ARankThatDiesAsSoonAsItHasJoinedIsNamed) {
  options.size = 4;
  const size_t zero = start(0U), one = start(1);
  await_admission(1);
  const pid_t two = ::fork();
  if (two == 0) {
    const RankDescriptors descriptors = make_descriptors();
    const int files[] = {descriptors.process.get(), descriptors.outbox.get()};
    const Fd socket = meet();
    ::raise(SIGSTOP);
    join(socket, 2, files);
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(two, nullptr, WUNTRACED);
  const Fd late = meet();  // rank 3 is about to join, and rank 0 waits 2 s for that, so the fork came before
  ::kill(two, SIGCONT);
  EXPECT_EQ(await_processes({two})[0], -SIGKILL);
  const int64_t died_ns = now_ns();
  finish();
  expect_death({zero, one}, 2, died_ns);
  const auto told = hear<wire::RefusedPacket>(late);  // its library may be of another version
  ASSERT_TRUE(told);
  EXPECT_EQ(told->rank, 2);
  EXPECT_EQ(told->text.view(), "rank 2 died before the job had formed");
}

// The rank is in the handshake when another rank dies. If no rank answered, it would look for rank 0 until its timeout.
TEST_F(Bootstrap, ARankInTheHandshakeIsToldWhyTheJobFails) {
  options.size = 4;
  options.farewell_ms = 10'000;  // rank 0 ends as soon as all ranks are told
  const size_t zero = start(0U), one = start(1), two = start(2);
  for (const uint32_t rank : {1, 2}) await_admission(rank);
  const Fd late = connect();
  ::kill(processes[two], SIGKILL);
  await_end(one);  // rank 0 has told it
  answer(late, options.secret);
  EXPECT_TRUE(hear<wire::Proof>(late));
  join(late, 3);
  const auto told = hear<wire::VerdictPacket>(late);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->verdict.accusation.rank, 2);
  EXPECT_EQ(told->verdict.accusation.text.copy(), "rank 2 died before the job had formed");
  finish();
  expect(zero, FSDP_PEER_FAILED, "rank 2 died");
  expect(one, FSDP_PEER_FAILED, "rank 2 died");
}

// The process of the rank lives, so its pidfd reports nothing.
TEST_F(Bootstrap, ARankThatGivesUpIsNamed) {
  options.size = 4;
  const size_t zero = start(0U), one = start(1);
  await_admission(1);
  const RankDescriptors descriptors = make_descriptors();
  const int files[] = {descriptors.process.get(), descriptors.outbox.get()};
  {
    const Fd socket = meet();
    join(socket, 2, files);
    await_admission(2);
  }
  finish();
  for (const size_t index : {zero, one}) {
    expect(index, FSDP_PEER_FAILED, "rank 2 gave up before the job had formed");
    EXPECT_EQ(reports[index].rank, 2);
  }
}

TEST_F(Bootstrap, AnotherLibraryIsRefusedByBothVersions) {
  const size_t zero = start(0U);
  const Fd socket = meet();
  auto other = wire::make<wire::JoinPacket>();
  other.rank = 1;
  other.world_size = options.size;
  other.wire_version = wire_version + 1;
  other.library.set("9.8.7");
  send_packet(socket, &other, sizeof other);
  const auto refusal = hear<wire::RefusedPacket>(socket);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->status, FSDP_MISMATCH);
  EXPECT_NE(refusal->text.copy().find(
                fmt::format("rank 1 has libfsdp 9.8.7 (wire format {}), rank 0 has libfsdp", wire_version + 1)),
            std::string::npos)
      << refusal->text.view();
  const size_t one = start(1), two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
  EXPECT_EQ(std::string(reports[zero].logged), "refused a process of this host: " + refusal->text.copy());
  EXPECT_STREQ(reports[one].logged, "");
}

TEST_F(Bootstrap, WithoutRankZero) {
  options.timeout_ms = 300;
  const size_t one = start(1);
  finish();
  expect(one, FSDP_TIMEOUT, "rank 0 has not come to the rendezvous");
  EXPECT_EQ(reports[one].rank, 0);
}

TEST_F(Bootstrap, WrongRanksAreToldAndTheJobForms) {
  const size_t zero = start(0U), one = start(1);
  await_admission(1);
  const size_t again = start(1);
  WorldOptions wrong = options;
  wrong.size = 5;
  wrong.rank = 4;
  const size_t other_size = start(wrong);
  wrong.size = 3;
  wrong.rank = 2;
  wrong.secret = "another";
  wrong.timeout_ms = 500;
  size_t other_secret = start(wrong);
  for (const size_t index : {again, other_size, other_secret}) await_end(index);
  // If the time of this rank ends while rank 0 is about to refuse it, it reports only that. So another one tries.
  for (int tries = 0; tries < 5 && std::strstr(reports[other_secret].text, "rank 0 has not sent"); ++tries)
    await_end(other_secret = start(wrong));
  const size_t two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
  expect(again, FSDP_INVALID_ARGUMENT, "another process is rank 1 already");
  expect(other_size, FSDP_MISMATCH, "rank 4 says that the world has 5 ranks, rank 0 says 3");
  expect(other_secret, FSDP_TIMEOUT, "rank 0 has not come");
}

TEST_F(Bootstrap, ASecondRankZeroIsTold) {
  const size_t zero = start(0U);
  connect();  // rank 0 listens
  WorldOptions second = options;
  second.timeout_ms = 300;
  const size_t again = start(second);
  await_end(again);
  const size_t one = start(1), two = start(2);
  finish();
  expect(again, FSDP_INVALID_ARGUMENT, "another process does");
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Bootstrap, TheListenerIsGoneWhenAllHaveJoined) {
  options.size = 1;
  finish();
  options.size = 2;
  const size_t zero = start(0U), one = start(1);
  finish();
  expect(zero, FSDP_OK);
  expect(one, FSDP_OK);
  std::ifstream sockets("/proc/net/unix");
  const std::string name = socket_name(options.rendezvous, options.secret, ::geteuid());
  for (std::string line; std::getline(sockets, line);) EXPECT_EQ(line.find(name), std::string::npos);
}

TEST(Failure, InterruptedWhileWaitingForRanks) {
  RankOptions rank_options;
  rank_options.hook = [](void *) -> int32_t { return 1; };
  for (const uint32_t r : {0, 1}) {
    Rank rank(rank_options);
    const Error error = error_of([&] {
      create_process_world({r, 2, unique_rendezvous(), "", 10'000}, rank.waiter, rank.failure, *rank.device);
    });
    EXPECT_EQ(error.status, FSDP_INTERRUPTED) << error.message;
  }
}

}  // namespace
}  // namespace fsdp::transport::test
