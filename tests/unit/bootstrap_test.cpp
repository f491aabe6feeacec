// SPDX-License-Identifier: Apache-2.0
// How ranks find each other: the launcher's variables, the meeting of processes, and who tries to disturb it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "comm/bootstrap/address.h"
#include "comm/bootstrap/packet.h"
#include "shm_bodies.h"

namespace fsdp::comm::test {
namespace {

using namespace std::chrono_literals;
using Variables = std::map<std::string, std::string>;

const char *const all_variables[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",      "LOCAL_WORLD_SIZE",
                                     "MASTER_ADDR", "MASTER_PORT", "FSDP_JOB_SECRET", "FSDP_JOB_SECRET_FILE"};

struct Environment {
  explicit Environment(const Variables &variables) {
    for (const char *name : all_variables) ::unsetenv(name);
    for (const auto &[name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() {
    for (const char *name : all_variables) ::unsetenv(name);
  }
};

Variables with(Variables change) {
  Variables variables = {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  for (auto &[name, value] : change) {
    if (value == "-")
      variables.erase(name);
    else
      variables[name] = value;
  }
  return variables;
}

TEST(Environment, WorldOfOneAndFullSet) {
  {
    const Environment none({});
    const WorldOptions options = read_launcher_environment();
    EXPECT_EQ(options.size, 1U);
    EXPECT_EQ(options.rank, 0U);
  }
  const Environment full(with({{"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}, {"FSDP_JOB_SECRET", "s"}}));
  const WorldOptions options = read_launcher_environment();
  EXPECT_EQ(options.size, 2U);
  EXPECT_EQ(options.rank, 1U);
  EXPECT_EQ(options.rendezvous, "127.0.0.1:29500");
  EXPECT_EQ(options.secret, "s");
}

TEST(Environment, WhatIsWrongIsNamed) {
  const struct {
    Variables variables;
    fsdp_status status;
    std::vector<const char *> words;
  } table[] = {
      {with({{"RANK", "-"}}), FSDP_INVALID_ARGUMENT, {"but RANK is not"}},
      {with({{"WORLD_SIZE", "-"}, {"MASTER_PORT", "-"}}),
       FSDP_INVALID_ARGUMENT,
       {"but WORLD_SIZE, MASTER_PORT are not"}},
      {{{"MASTER_ADDR", "x"}}, FSDP_INVALID_ARGUMENT, {"MASTER_ADDR is set", "RANK, WORLD_SIZE, MASTER_PORT are not"}},
      {with({{"RANK", ""}}), FSDP_INVALID_ARGUMENT, {"but RANK is not"}},
      {with({{"RANK", "two"}}), FSDP_INVALID_ARGUMENT, {"RANK='two'"}},
      {with({{"RANK", "-1"}}), FSDP_INVALID_ARGUMENT, {"RANK='-1'"}},
      {with({{"RANK", " 1"}}), FSDP_INVALID_ARGUMENT, {"RANK=' 1'"}},
      {with({{"RANK", "1x"}}), FSDP_INVALID_ARGUMENT, {"RANK='1x'"}},
      {with({{"RANK", "99999999999999999999"}}), FSDP_INVALID_ARGUMENT, {"RANK='99999999999999999999'"}},
      {with({{"RANK", "2"}}), FSDP_INVALID_ARGUMENT, {"RANK=2", "WORLD_SIZE=2"}},
      {with({{"WORLD_SIZE", "0"}}), FSDP_INVALID_ARGUMENT, {"WORLD_SIZE='0'"}},
      {with({{"MASTER_PORT", "0"}}), FSDP_INVALID_ARGUMENT, {"MASTER_PORT='0'"}},
      {with({{"MASTER_PORT", "65536"}}), FSDP_INVALID_ARGUMENT, {"MASTER_PORT='65536'"}},
      {with({{"LOCAL_WORLD_SIZE", "1"}}), FSDP_UNSUPPORTED, {"LOCAL_WORLD_SIZE=1", "several hosts"}},
      {with({{"LOCAL_WORLD_SIZE", "3"}}), FSDP_INVALID_ARGUMENT, {"LOCAL_WORLD_SIZE='3'"}},
      {with({{"LOCAL_RANK", "2"}}), FSDP_INVALID_ARGUMENT, {"LOCAL_RANK='2'"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/nonexistent"}}), FSDP_INVALID_ARGUMENT, {"/nonexistent", "No such file"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/dev/null"}}), FSDP_INVALID_ARGUMENT, {"/dev/null"}},
      {with({{"FSDP_JOB_SECRET_FILE", "/x"}, {"FSDP_JOB_SECRET", "s"}}), FSDP_INVALID_ARGUMENT, {"both"}},
  };
  for (const auto &row : table) {
    const Environment environment(row.variables);
    const Error error = error_of([] { read_launcher_environment(); });
    EXPECT_EQ(error.status, row.status) << error.message;
    for (const char *word : row.words) EXPECT_NE(error.message.find(word), std::string::npos) << error.message;
  }
}

TEST(Environment, SecretFile) {
  const auto path = std::filesystem::temp_directory_path() / ("secret-" + std::to_string(::getpid()));
  std::ofstream(path) << "from a file\n";
  {
    const Environment environment(with({{"FSDP_JOB_SECRET_FILE", path}}));
    EXPECT_EQ(read_launcher_environment().secret, "from a file");
    EXPECT_EQ(read_job_secret(), "from a file");
  }
  std::filesystem::remove(path);
}

TEST(SocketName, DependsOnAllAndShowsNothing) {
  const std::string name = socket_name("host:1", "secret", 1000);
  EXPECT_NE(name, socket_name("host:2", "secret", 1000));
  EXPECT_NE(name, socket_name("host:1", "Secret", 1000));
  EXPECT_NE(name, socket_name("host:1", "secret", 1001));
  EXPECT_EQ(name, socket_name("host:1", "secret", 1000));
  EXPECT_EQ(name.size(), 5U + 32U);
}

TEST(Authentication, KnownAnswer) {  // RFC 4231, test case 2, behind the label's own end
  const std::string text = "what do ya want for nothing?";
  const auto *bytes = reinterpret_cast<const uint8_t *>(text.data());
  const Digest a = authenticate("Jefe", "label", {{bytes, text.size()}});
  EXPECT_TRUE(equal(a, authenticate("Jefe", "label", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("Jefe", "labe", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("jefe", "label", {{bytes, text.size()}})));
  EXPECT_FALSE(equal(a, authenticate("", "label", {{bytes, text.size()}})));
}

// ---- the meeting ----

// Runs one rank in a child; it writes how its joining ended.
struct Report {
  std::atomic<int32_t> status, rank;
  char text[512];
};

class Bootstrap : public testing::Test {
 protected:
  static constexpr size_t most = 16;
  void SetUp() override {
    void *memory = ::mmap(nullptr, most * sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    reports = static_cast<Report *>(memory);
    options = {0, 3, unique_rendezvous(), "the secret", 10'000};
  }
  void TearDown() override {
    await_processes(processes);
    ::munmap(reports, most * sizeof(Report));
  }

  // Returns the index of its report.
  size_t start(WorldOptions world) {
    const size_t index = processes.size();
    const pid_t process = ::fork();
    if (process == 0) {
      RankOptions rank_options;
      rank_options.timeout_ms = world.timeout_ms;
      Rank rank(rank_options);
      const Error error = error_of([&] {
        rank.world = create_process_world(world, rank.waiter, rank.failure, *rank.device);
        rank.make_team();
        rank.leave();
      });
      reports[index].status = error.status;
      reports[index].rank = error.rank;
      std::strncpy(reports[index].text, error.what(), sizeof reports[index].text - 1);
      ::_exit(0);
    }
    processes.push_back(process);
    return index;
  }
  size_t start(uint32_t rank) {
    WorldOptions world = options;
    world.rank = rank;
    return start(world);
  }
  void finish() {
    await_processes(processes);
    processes.clear();
  }
  void expect(size_t index, fsdp_status status, const std::string &text = "") {
    EXPECT_EQ(reports[index].status, status) << "process " << index << ": " << reports[index].text;
    EXPECT_NE(std::string(reports[index].text).find(text), std::string::npos) << reports[index].text;
  }
  Fd connect() const {
    const Address address(options);
    Fd socket;
    for (int tries = 0; tries < 500; ++tries) {
      socket = Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
      if (::connect(socket.get(), address.get(), address.length()) == 0) return socket;
      std::this_thread::sleep_for(10ms);
    }
    ADD_FAILURE() << "nobody listens";
    return socket;
  }

  Report *reports = nullptr;
  WorldOptions options;
  std::vector<pid_t> processes;
};

TEST_F(Bootstrap, AnyOrder) {
  const size_t two = start(2), one = start(1);
  std::this_thread::sleep_for(100ms);
  const size_t zero = start(0U);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Bootstrap, ATimeoutNamesTheMissing) {
  options.timeout_ms = 500;
  options.size = 4;
  const size_t zero = start(0U), two = start(2);
  finish();
  for (const size_t index : {zero, two}) {
    expect(index, FSDP_TIMEOUT, "ranks 1, 3 have not come to the rendezvous");
    EXPECT_EQ(reports[index].rank, 1);
  }
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
  std::this_thread::sleep_for(200ms);
  const size_t again = start(1);
  WorldOptions wrong = options;
  wrong.size = 5;
  wrong.rank = 4;
  const size_t other_size = start(wrong);
  wrong.size = 3;
  wrong.rank = 2;
  wrong.secret = "another";
  wrong.timeout_ms = 500;
  const size_t other_secret = start(wrong);
  std::this_thread::sleep_for(1s);
  const size_t two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
  expect(again, FSDP_INVALID_ARGUMENT, "another process is rank 1 already");
  expect(other_size, FSDP_MISMATCH, "rank 4 says that the world has 5 ranks, rank 0 says 3");
  expect(other_secret, FSDP_TIMEOUT, "rank 0 has not come");
}

TEST_F(Bootstrap, ASecondRankZeroIsTold) {
  const size_t zero = start(0U);
  std::this_thread::sleep_for(100ms);
  WorldOptions second = options;
  second.timeout_ms = 300;
  const size_t again = start(second);
  std::this_thread::sleep_for(600ms);
  const size_t one = start(1), two = start(2);
  finish();
  expect(again, FSDP_INVALID_ARGUMENT, "another process does");
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Bootstrap, HostileConnectionsDoNotDisturb) {
  const size_t zero = start(0U);
  std::vector<Fd> silent;
  for (int i = 0; i < 80; ++i) silent.push_back(connect());  // more than are let in at once
  std::vector<Fd> gone;
  for (int i = 0; i < 20; ++i) gone.push_back(connect());
  gone.clear();
  const size_t one = start(1), two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Bootstrap, GarbageDoesNotDisturb) {
  const size_t zero = start(0U);
  std::mt19937 random(3);
  const auto send = [](const Fd &socket, const void *data, size_t bytes, std::span<const int> files = {}) {
    send_packet(socket, data, bytes, files);
  };
  std::vector<Fd> sockets;
  for (const size_t bytes : {0, 1, 16, 80, 500, 5000, 100'000}) {
    std::vector<uint8_t> garbage(bytes);
    for (auto &byte : garbage) byte = static_cast<uint8_t>(random());
    sockets.push_back(connect());
    send(sockets.back(), garbage.data(), bytes);
    // The right head over garbage.
    auto answer = wire::make<wire::Answer>();
    if (bytes) std::memcpy(garbage.data(), &answer.head, std::min(bytes, sizeof answer.head));
    sockets.push_back(connect());
    send(sockets.back(), garbage.data(), bytes);
  }
  {  // A join without proof, with descriptors.
    auto join = wire::make<wire::Join>();
    join.rank = 1;
    join.world_size = 3;
    const int files[] = {0, 1};
    sockets.push_back(connect());
    send(sockets.back(), &join, sizeof join, files);
  }
  {  // A proof over the wrong secret: the connection ends without a word.
    sockets.push_back(connect());
    Fd &socket = sockets.back();
    await_readable(socket, 5000);
    const auto challenge = receive_packet(socket)->as<wire::Challenge>();
    ASSERT_TRUE(challenge);
    auto answer = wire::make<wire::Answer>();
    answer.nonce = make_nonce();
    answer.digest = wire::guest_digest("not the secret", challenge->nonce, answer.nonce);
    send(socket, &answer, sizeof answer);
    await_readable(socket, 5000);
    EXPECT_EQ(receive_packet(socket)->bytes, 0U);
  }
  {  // Who knows the secret, but joins as nonsense.
    sockets.push_back(connect());
    Fd &socket = sockets.back();
    await_readable(socket, 5000);
    const auto challenge = receive_packet(socket)->as<wire::Challenge>();
    ASSERT_TRUE(challenge);
    auto answer = wire::make<wire::Answer>();
    answer.nonce = make_nonce();
    answer.digest = wire::guest_digest(options.secret, challenge->nonce, answer.nonce);
    send(socket, &answer, sizeof answer);
    await_readable(socket, 5000);
    const auto proof = receive_packet(socket)->as<wire::Proof>();
    ASSERT_TRUE(proof);
    EXPECT_TRUE(equal(proof->digest, wire::host_digest(options.secret, challenge->nonce, answer.nonce)));
    auto join = wire::make<wire::Join>();
    join.rank = 77;
    join.world_size = 3;
    send(socket, &join, sizeof join);
    await_readable(socket, 5000);
    const auto refusal = receive_packet(socket)->as<wire::Refusal>();
    ASSERT_TRUE(refusal);
    EXPECT_EQ(refusal->status, FSDP_INVALID_ARGUMENT);
    EXPECT_STREQ(refusal->text, "rank 77 is outside [0, 3)");
  }
  const size_t one = start(1), two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

TEST_F(Bootstrap, AnotherVersionIsNamed) {
  const Address address(options);
  const Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address.get(), address.length()), 0);
  ASSERT_EQ(::listen(listener.get(), 5), 0);
  const size_t one = start(1);
  const Fd guest(::accept(listener.get(), nullptr, nullptr));
  auto challenge = wire::make<wire::Challenge>();
  challenge.head.version = 9;
  send_packet(guest, &challenge, sizeof challenge);
  finish();
  expect(one, FSDP_UNSUPPORTED, "rank 0 speaks version 9 of the bootstrap, the library of rank 1 speaks version 1");
}

TEST_F(Bootstrap, AFalseRankZeroIsNotTrusted) {
  const Address address(options);
  const Fd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address.get(), address.length()), 0);
  ASSERT_EQ(::listen(listener.get(), 5), 0);
  options.timeout_ms = 500;
  const size_t one = start(1);
  const Fd guest(::accept(listener.get(), nullptr, nullptr));
  const auto challenge = wire::make<wire::Challenge>();
  send_packet(guest, &challenge, sizeof challenge);
  await_readable(guest, 5000);
  const auto answer = receive_packet(guest)->as<wire::Answer>();
  ASSERT_TRUE(answer);
  auto proof = wire::make<wire::Proof>();
  proof.digest = answer->digest;  // sent back
  send_packet(guest, &proof, sizeof proof);
  await_readable(guest, 5000);
  const auto next = receive_packet(guest);
  EXPECT_TRUE(next && next->bytes == 0);  // no join: the rank has hung up
  finish();
  expect(one, FSDP_TIMEOUT);
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
}  // namespace fsdp::comm::test
