// SPDX-License-Identifier: Apache-2.0
// Tests how ranks of several hosts meet: which place each rank gets, and which error each gets if a rank is missing,
// wrong or dead.
#include <filesystem>

#include "membership/liveness/control.h"
#include "rendezvous_fixture.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

namespace files = std::filesystem;

// All hosts share this directory.
class FileRendezvous : public Rendezvous {
 protected:
  void SetUp() override {
    Rendezvous::SetUp();
    directory = files::temp_directory_path() / ("rendezvous-" + std::to_string(::getpid()));
    files::create_directory(directory);
    options.rendezvous = "file://" + directory.string();
    notice = notice_path(parse_meeting_point(options.rendezvous), options);
  }
  void TearDown() override {
    Rendezvous::TearDown();
    files::remove_all(directory);
  }
  files::path directory;
  std::string notice;
};

TEST_F(Rendezvous, HostsAreNumberedByTheirLowestRank) {
  options.size = 6;
  const std::string hosts[] = {"b", "a", "b", "c", "a", "a"};
  for (const uint32_t rank : {5, 3, 1, 0, 4, 2}) start(rank, hosts[rank]);
  finish();
  const RanksHere of_a{3, false}, of_b{2, true}, of_c{1, false}, here[] = {of_a, of_c, of_a, of_b, of_a, of_b};
  for (size_t index = 0; index < 6; ++index) {
    expect(index, FSDP_OK);
    EXPECT_EQ(nodes(index), (std::vector<uint32_t>{0, 1, 0, 2, 1, 1}));
    EXPECT_EQ(reports[index].control_size, static_cast<int32_t>(Control::size_bytes(6, here[index])));
    const std::string description = reports[index].description;
    EXPECT_NE(description.find("6 ranks as processes of 3 hosts"), std::string::npos) << description;
    EXPECT_EQ(description.find(options.secret), std::string::npos) << description;
  }
}

TEST_F(Rendezvous, CardsOfAllArriveEverywhere) {
  for (const uint32_t rank : {0, 1, 2}) start(rank);
  finish();
  for (size_t index = 0; index < 3; ++index) {
    expect(index, FSDP_OK);
    EXPECT_EQ(reports[index].cards, 1);
    EXPECT_STREQ(reports[index].cards_seen, "card-0@127.0.0.1 card-1@127.0.0.1 card-2@127.0.0.1");
  }
}

TEST_F(Rendezvous, AJobOfOneHostSharesIt) {
  for (const uint32_t rank : {0, 1, 2}) {
    WorldOptions world = options;
    world.rank = rank;
    start(world);
  }
  finish();
  for (size_t index = 0; index < 3; ++index) {
    expect(index, FSDP_OK);
    EXPECT_EQ(nodes(index), (std::vector<uint32_t>{0, 0, 0}));
    EXPECT_NE(std::string(reports[index].description).find("of one host"), std::string::npos);
  }
}

TEST_F(Rendezvous, WithoutASecretLoopbackIsServed) {
  options.secret.clear();
  for (const uint32_t rank : {0, 1, 2}) start(rank);
  finish();
  for (size_t index = 0; index < 3; ++index) expect(index, FSDP_OK);
}

TEST_F(Rendezvous, WithoutASecretNothingElseIs) {
  options.secret.clear();
  options.rendezvous = "tcp://192.0.2.1:29500";
  const size_t zero = start(0U), one = start(1);
  finish();
  for (const size_t index : {zero, one}) expect(index, FSDP_INVALID_ARGUMENT, "FSDP_JOB_SECRET_FILE");
}

TEST_F(Rendezvous, AnAddressOfAnotherHostCannotBeServed) {
  options.rendezvous = "tcp://192.0.2.1:29500";
  const size_t zero = start(0U);
  finish();
  expect(zero, FSDP_INVALID_ARGUMENT, "it must be that of the host of rank 0");
}

TEST_F(Rendezvous, ATimeoutNamesTheMissing) {
  options.size = 4;
  options.timeout_ms = 3000;
  const size_t zero = start(0U);
  connect();  // its time has begun: the time of rank 2, which waits for its answer, ends later
  const size_t two = start(2);
  finish();
  for (const size_t index : {zero, two}) {
    expect(index, FSDP_TIMEOUT, "ranks 1, 3 have not come to the rendezvous");
    EXPECT_EQ(reports[index].rank, 1);
  }
}

// Rank 0 and the others get the name service's error long before the timeout.
TEST_F(Rendezvous, AHostThatIsNotKnownIsToldAtOnce) {
  options.rendezvous = "tcp://no-such-host.invalid:29555";
  options.timeout_ms = 120'000;
  std::string words;
  ASSERT_TRUE(Endpoint::resolve("no-such-host.invalid", 29555, words).empty());
  const int64_t start_ns = now_ns();
  const size_t zero = start(0U), one = start(1);
  finish();
  for (const size_t index : {zero, one}) {
    expect(index, FSDP_INVALID_ARGUMENT, "the host 'no-such-host.invalid' has no address: " + words);
    EXPECT_LT(static_cast<double>(reports[index].ended_ns - start_ns) * 1e-9, 60);
  }
}

// All ranks end, even if only one host has such a kernel.
TEST_F(Rendezvous, ADeniedCallEndsAllRanksAtOnce) {
  for (const auto &[name, number] : {needed_calls[0], needed_calls[3]})
    for (const uint32_t victim : {0u, 1u}) {
      options.timeout_ms = 60'000;
      options.farewell_ms = 3000;
      std::vector<size_t> indexes;
      const int64_t start_ns = now_ns();
      for (uint32_t rank = 0; rank < 3; ++rank) {
        WorldOptions world = options;
        world.rank = rank;
        world.host_id = "host of " + std::to_string(rank);
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

TEST_F(Rendezvous, RanksOfAMachineInTwoNetworkNamespacesAreToldSo) {
  const size_t zero = start(0U, "a boot/1"), one = start(1, "another/1"), two = start(2, "a boot/2");
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
  EXPECT_NE(std::string(reports[zero].logged).find("ranks 0 and 2 are on one machine, in two network namespaces"),
            std::string::npos)
      << reports[zero].logged;
  EXPECT_EQ(describe_split_host({"a boot/1", "another/1", "a boot/1", "another/1"}), "");
  EXPECT_EQ(describe_split_host({"host of 0", "host of 1"}), "");
}

TEST_F(Rendezvous, ALoopbackAddressIsSaidToLeadNoFurther) {
  options.timeout_ms = 1000;
  const size_t one = start(1);
  finish();
  expect(one, FSDP_TIMEOUT, "a loopback address leads to rank 0 only within its host and network namespace");
  const size_t zero = start(0U);
  finish();
  expect(zero, FSDP_TIMEOUT, "(only for its host and network namespace, net:[");
}

TEST_F(Rendezvous, WithoutRankZero) {
  options.timeout_ms = 300;
  const size_t one = start(1);
  finish();
  expect(one, FSDP_TIMEOUT, "rank 1 has not found rank 0");
  EXPECT_EQ(reports[one].rank, 0);
}

// The last attempt ends at the limit, whatever it is doing then.
TEST_F(Rendezvous, ATimeoutTellsWhatEarlierTriesHaveFound) {
  for (const uint32_t ms : {300u, 310u, 320u, 330u, 340u, 350u}) {
    options.timeout_ms = ms;
    const size_t one = start(1);
    finish();
    expect(one, FSDP_TIMEOUT, "Connection refused");
  }
}

TEST_F(Rendezvous, ARankThatDiesBeforeAllHaveJoinedIsNamed) {
  options.size = 4;
  const size_t zero = start(0U), one = start(1);
  FrameStream dying = enter();
  join(dying, 2);
  await_join(one);
  dying = FrameStream();
  finish();
  for (const size_t index : {zero, one}) {
    expect(index, FSDP_PEER_FAILED, "rank 2 on far died before the job had formed");
    EXPECT_EQ(reports[index].rank, 2);
  }
}

TEST_F(Rendezvous, WrongRanksAreToldAndTheJobForms) {
  const size_t zero = start(0U), one = start(1);
  await_join(one);
  const size_t again = start(1);
  WorldOptions wrong = options;
  wrong.size = 5;
  wrong.rank = 4;
  const size_t other_size = start(wrong);
  wrong = options;
  wrong.rank = 2;
  wrong.secret = "another";
  wrong.timeout_ms = 1500;
  size_t other_secret = start(wrong);
  for (const size_t index : {again, other_size, other_secret}) await_end(index);
  // A rank whose time ends while rank 0 is about to refuse it reports only that, and another one tries.
  for (int tries = 0; tries < 5 && std::strstr(reports[other_secret].text, "in time"); ++tries)
    await_end(other_secret = start(wrong));
  const size_t two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
  expect(again, FSDP_INVALID_ARGUMENT, "another process is rank 1 already");
  expect(other_size, FSDP_MISMATCH, "rank 4 says that the world has 5 ranks, rank 0 says 3");
  expect(other_secret, FSDP_TIMEOUT, "do both have the same?");
}

// The missing rank has come with another secret, and rank 0 says so.
TEST_F(Rendezvous, TheTimeoutOfRankZeroTellsWhatItRefused) {
  options.size = 2;
  options.timeout_ms = 3000;
  const size_t zero = start(0U);
  WorldOptions wrong = options;
  wrong.rank = 1;
  wrong.secret = "another";
  start(wrong);
  finish();
  for (const char *part : {"it refused connections, the last from 127.0.0.1:", ": the peer has another job secret"})
    expect(zero, FSDP_TIMEOUT, part);
}

// A rank of an earlier attempt than rank 0's ends. If rank 0 is of an earlier attempt, it ends, and the others wait for
// the next rank 0.
TEST_F(Rendezvous, AttemptsDoNotMix) {
  const size_t early_zero = start(0U);
  WorldOptions next = options;
  next.attempt = 1;
  next.rank = 1;
  next.host_id = "one";
  const size_t one = start(next);
  await_end(early_zero);
  next.rank = 0;
  next.host_id = "zero";
  const size_t zero = start(next);
  connect();  // rank 0 listens
  const size_t early_two = start(2);
  await_end(early_two);
  next.rank = 2;
  next.host_id = "two";
  const size_t two = start(next);
  finish();
  expect(early_zero, FSDP_PEER_FAILED, "rank 1 has begun attempt 1 of this job, rank 0 is of attempt 0");
  expect(early_two, FSDP_PEER_FAILED, "rank 0 has begun attempt 1 of this job, rank 2 is of attempt 0");
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Rendezvous, TheListenerIsGoneWhenAllHaveJoined) {
  for (const uint32_t rank : {0, 1, 2}) start(rank);
  finish();
  std::string problem;
  EXPECT_FALSE(connect_to(at, limit(1s), problem));
  const Fd listener = listen_at(at, 1);
  EXPECT_TRUE(listener) << std::strerror(errno);
}

// No process can connect to the address of a group of hosts. The kernel reports that in the call.
TEST_F(Rendezvous, AnAddressThatNothingLeadsToIsToldAtOnce) {
  std::string problem;
  EXPECT_FALSE(connect_to(Endpoint::ipv4("224.0.0.1", 29500).value(), limit(3s), problem));
  EXPECT_EQ(problem, "224.0.0.1:29500: Network is unreachable");
}

TEST_F(FileRendezvous, RanksFindRankZeroAndTheFileIsRemoved) {
  const size_t one = start(1), two = start(2);
  std::this_thread::sleep_for(200ms);
  const size_t zero = start(0U);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
  EXPECT_TRUE(files::is_empty(directory));
}

// Dead jobs have left files: nonsense, an address at which no process listens, and one where a stranger sends nothing
// of use.
TEST_F(FileRendezvous, StaleFilesMisleadNoRank) {
  std::string problem;
  const Fd stranger = listen_at(Endpoint::resolve("127.0.0.1", 0, problem).at(0), 5);
  for (const std::string &text : {std::string("nonsense"), "fsdp-rendezvous 1 " + at.text() + "\n",
                                  std::string("fsdp-rendezvous 1 example.invalid:1\n"),
                                  "fsdp-rendezvous 1 " + Endpoint::local(stranger).text() + "\n"}) {
    std::ofstream(notice) << text;
    const size_t one = start(1), two = start(2);
    std::this_thread::sleep_for(300ms);
    while (Fd fooled = accept_from(stranger)) ::send(fooled.get(), "220 hello\r\n", 11, MSG_NOSIGNAL);
    const size_t zero = start(0U);
    finish();
    for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
    EXPECT_FALSE(files::exists(notice));
  }
}

TEST_F(FileRendezvous, ADirectoryThatIsNotThereIsNamed) {
  files::remove_all(directory);
  options.timeout_ms = 300;
  const size_t zero = start(0U), one = start(1);
  finish();
  expect(zero, FSDP_SYSTEM, notice);
  expect(one, FSDP_TIMEOUT, notice);
}

TEST(MeetingPointText, EveryKnownFormIsRead) {
  EXPECT_EQ(parse_meeting_point("any name:1").kind, MeetingPoint::Scheme::name);
  const MeetingPoint tcp = parse_meeting_point("tcp://[fe80::1]:80");
  EXPECT_EQ(tcp.host, "fe80::1");
  EXPECT_EQ(tcp.port, 80);
  EXPECT_EQ(parse_meeting_point("file:///a/b").directory, "/a/b");
  for (const char *wrong : {"tcp://", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://:1",
                            "tcp://host:1x", "tcp://a:b:1", "file://relative", "http://x"})
    EXPECT_EQ(error_of([&] { parse_meeting_point(wrong); }).status, FSDP_INVALID_ARGUMENT) << wrong;
}

}  // namespace
}  // namespace fsdp::transport::test
