// SPDX-License-Identifier: Apache-2.0
// How processes meet to form a job, and who tries to disturb it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <optional>

#include "comm/bootstrap/address.h"
#include "comm/bootstrap/packet.h"
#include "comm/bootstrap/process_links.h"
#include "shm_bodies.h"

namespace fsdp::comm::test {
namespace {

using namespace std::chrono_literals;

// Runs one rank in a child; it writes how its joining ended.
struct Report {
  std::atomic<int32_t> status, rank;
  std::atomic<int64_t> ended_ns;
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
      reports[index].ended_ns = now_ns();
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

  static int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  // -- a rank by hand --
  // The next message, if it is one of this kind.
  template <class Message>
  static std::optional<Message> hear(const Fd &socket) {
    await_readable(socket, 5000);
    const auto packet = receive_packet(socket);
    return packet ? packet->as<Message>() : std::nullopt;
  }
  // Answers the challenge with this secret; returns what rank 0 must prove.
  Digest answer(const Fd &socket, const std::string &secret) const {
    const auto challenge = hear<wire::Challenge>(socket);
    if (!challenge) throw std::runtime_error("no challenge");
    auto answer = wire::make<wire::Answer>();
    answer.nonce = make_nonce();
    answer.digest = wire::guest_digest(secret, challenge->nonce, answer.nonce);
    send_packet(socket, &answer, sizeof answer);
    return wire::host_digest(secret, challenge->nonce, answer.nonce);
  }
  // Has proven the secret, and may join.
  Fd meet() const {
    Fd socket = connect();
    const Digest expected = answer(socket, options.secret);
    const auto proof = hear<wire::Proof>(socket);
    if (!proof || !equal(proof->digest, expected)) throw std::runtime_error("rank 0 does not prove the secret");
    return socket;
  }
  void join(const Fd &socket, uint32_t rank, std::span<const int> files = {}) const {
    auto join = wire::make<wire::Join>();
    join.rank = rank;
    join.world_size = options.size;
    send_packet(socket, &join, sizeof join, files);
  }
  // Returns when rank 0 has let this rank in: until then a second one is refused for another reason, if at all.
  void await_admission(uint32_t rank) const {
    for (;;) {
      const Fd socket = meet();
      join(socket, rank);
      const auto refusal = hear<wire::Refusal>(socket);
      if (refusal && std::string(refusal->text).find("already") != std::string::npos) return;
      std::this_thread::sleep_for(1ms);
    }
  }
  // All of these end with the death of that rank, soon after it.
  void expect_death(std::initializer_list<size_t> survivors, int32_t rank, int64_t died_ns) {
    for (const size_t index : survivors) {
      expect(index, FSDP_PEER_FAILED, fmt::format("rank {} died before the job had formed", rank));
      EXPECT_EQ(reports[index].rank, rank);
      EXPECT_LT(static_cast<double>(reports[index].ended_ns - died_ns) * 1e-9, patience_seconds);
    }
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

// The last rank never comes: who dies meanwhile is named to all who have come, long before the timeout.
TEST_F(Bootstrap, WhoDiesBeforeAllHaveJoinedIsNamed) {
  options.size = 4;
  const size_t zero = start(0U), one = start(1), two = start(2);
  for (const uint32_t rank : {1, 2}) await_admission(rank);
  const int64_t died_ns = now_ns();
  ::kill(processes[two], SIGKILL);
  finish();
  expect_death({zero, one}, 2, died_ns);
}

TEST_F(Bootstrap, WhoDiesAsSoonAsItHasJoinedIsNamed) {
  options.size = 4;
  const size_t zero = start(0U), one = start(1);
  await_admission(1);
  const Fd late = meet();  // rank 3 is about to join
  const pid_t two = ::fork();
  if (two == 0) {
    const Doors doors = make_doors();
    const int files[] = {doors.process.get(), doors.outbox.get()};
    join(meet(), 2, files);
    ::kill(::getpid(), SIGKILL);
  }
  EXPECT_EQ(await_processes({two})[0], -SIGKILL);
  const int64_t died_ns = now_ns();
  finish();
  expect_death({zero, one}, 2, died_ns);
  const auto refusal = hear<wire::Refusal>(late);
  ASSERT_TRUE(refusal);
  EXPECT_STREQ(refusal->text, "rank 2 died before the job had formed");
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
    const int files[] = {0, 1};
    sockets.push_back(connect());
    join(sockets.back(), 1, files);
  }
  {  // A proof over the wrong secret: the connection ends without a word.
    sockets.push_back(connect());
    answer(sockets.back(), "not the secret");
    await_readable(sockets.back(), 5000);
    EXPECT_EQ(receive_packet(sockets.back())->bytes, 0U);
  }
  {  // Who knows the secret, but joins as nonsense.
    sockets.push_back(meet());
    join(sockets.back(), 77);
    const auto refusal = hear<wire::Refusal>(sockets.back());
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
