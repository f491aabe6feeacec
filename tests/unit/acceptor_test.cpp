// SPDX-License-Identifier: Apache-2.0
// Tests the acceptor with strangers. A rank that connects from far away needs several round trips, while silent
// strangers connect all the time.
#include "membership/wire/acceptor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <thread>

#include "membership/wire/packet.h"

namespace fsdp::membership::test {
namespace {

using namespace std::chrono_literals;
using Clock = Acceptor::Clock;

class Acceptors : public testing::Test {
 protected:
  void SetUp() override {
    rlimit files{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = std::min<rlim_t>(files.rlim_max, 4096);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
    if (files.rlim_cur < 4096) GTEST_SKIP() << "needs 4096 descriptors";
    std::string problem;
    listener = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 1024);
    acceptor.emplace(secret, label, &log);
    acceptor->listen(listener);
  }
  // Connects from this address of the loopback device, and never waits.
  Fd connect(uint32_t from) const {
    Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in own{};
    own.sin_family = AF_INET;
    own.sin_addr.s_addr = htonl(from);
    EXPECT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr *>(&own), sizeof own), 0) << std::strerror(errno);
    const Endpoint to = Endpoint::local(listener);
    EXPECT_TRUE(::connect(socket.get(), to.get(), to.length()) == 0 || errno == EINPROGRESS) << std::strerror(errno);
    return socket;
  }
  static bool has_hung_up(const Fd &guest) {
    char bytes[256];
    ssize_t got = 0;
    while ((got = ::recv(guest.get(), bytes, sizeof bytes, MSG_DONTWAIT)) > 0) {
    }
    return got == 0 || (errno != EAGAIN && errno != ENOTCONN);
  }
  void look() {
    for (Acceptor::AuthenticatedSocket &arrival : acceptor->look()) arrivals.push_back(std::move(arrival));
  }
  // Waits for the challenge, which shows that the acceptor has accepted the connection.
  void await_challenge(const Fd &guest) {
    pollfd entry{guest.get(), POLLIN, 0};
    while (::poll(&entry, 1, 1) == 0) look();
  }
  void add_strangers(int count, uint32_t from = near) {
    for (int i = 0; i < count; ++i) {
      strangers.push_back(connect(from));
      if (i % 50 == 49) look();
    }
    look();
  }
  // Returns whether the guest arrives when it proves the secret.
  bool arrives(const Fd &guest) {
    Handshake handshake(Role::guest, secret, label);
    for (const auto end = Clock::now() + 3s; arrivals.empty() && Clock::now() < end; look())
      if (handshake.advance(guest) == IoState::failed) return false;
    return arrivals.size() == 1 && arrivals[0].from == Endpoint::local(guest).text();
  }
  bool wakes() const {
    std::vector<pollfd> polls;
    acceptor->add_polls(polls);
    return ::poll(polls.data(), polls.size(), 0) > 0;
  }

  static constexpr uint32_t near = 0x7f000001, far = 0x7f000002, others = near + 256;
  static constexpr int places = 512;
  const std::string secret = "the secret", label = "connections of a test";
  std::vector<std::string> lines;
  RefusalLog log{"a connection", [this](fsdp_log_level, const std::string &text) { lines.push_back(text); }};
  Fd listener;
  std::optional<Acceptor> acceptor;
  std::vector<Fd> strangers;
  std::vector<Acceptor::AuthenticatedSocket> arrivals;
};

// In a large job the acceptor checks rarely. An answer that came after the last check counts before its place goes to
// another connection.
TEST_F(Acceptors, AnAnswerIsReadBeforeItsPlaceIsGivenAway) {
  Fd guest = connect(far);
  await_challenge(guest);
  for (uint32_t i = 0; i < 16; ++i) add_strangers((places - 1) / 16, others + i);
  add_strangers((places - 1) % 16, others + 16);
  Handshake handshake(Role::guest, secret, label);
  handshake.advance(guest);
  std::this_thread::sleep_for(2 * Acceptor::least_time);
  for (uint32_t i = 0; i < 100; ++i) strangers.push_back(connect(others + 17 + i));
  std::this_thread::sleep_for(20ms);
  look();
  ASSERT_EQ(arrivals.size(), 1u);
  EXPECT_EQ(arrivals[0].from, Endpoint::local(guest).text());
}

// A stranger's address loses only its own places. Connections from elsewhere keep all their time.
TEST_F(Acceptors, AFloodFromOneAddressTakesNoPlaceOfAnother) {
  const Fd guest = connect(far);
  await_challenge(guest);
  for (int tries = 0; tries < 10; ++tries) {
    strangers.clear();
    const auto start = Clock::now();
    const Fd one = connect(far);
    await_challenge(one);
    add_strangers(600);
    if (Clock::now() - start > 2s) continue;  // then its own time may be over
    EXPECT_TRUE(has_hung_up(strangers.front()));
    EXPECT_FALSE(has_hung_up(strangers.back()));
    EXPECT_TRUE(arrives(one));
    ASSERT_FALSE(lines.empty());
    EXPECT_NE(lines.back().find("it had proven nothing yet, and made room for a later one"), std::string::npos);
    return;
  }
  GTEST_SKIP() << "this machine makes no 600 connections in two seconds";
}

TEST_F(Acceptors, EachOfManyAddressesHasItsLeastTime) {
  std::vector<Clock::time_point> since;
  size_t gone = 0;
  for (uint32_t i = 0; i < 1500; ++i) {
    since.push_back(Clock::now());
    strangers.push_back(connect(others + i % 700));
    if (i % 50 < 49) continue;
    look();
    for (; gone < strangers.size() && has_hung_up(strangers[gone]); ++gone)
      ASSERT_GE(Clock::now() - since[gone], Acceptor::least_time) << gone;
  }
}

// Strangers whose time is over lose their places, because silent strangers would otherwise keep all others out.
TEST_F(Acceptors, StrangersThatHadTheirTimeMakeRoom) {
  for (uint32_t i = 0; i < 14; ++i) add_strangers(50, others + i);
  const Fd guest = connect(far);
  await_challenge(guest);  // the challenge comes when there is room
  EXPECT_TRUE(arrives(guest));
}

// A few strangers wake the caller, but a crowd does not. A flood then costs the caller only a look from time to time.
TEST_F(Acceptors, ACrowdDoesNotWakeTheCaller) {
  EXPECT_FALSE(wakes());
  add_strangers(10);
  EXPECT_FALSE(wakes()) << "all that has happened was seen";
  const char noise[100] = "no handshake";
  ASSERT_EQ(::send(strangers[3].get(), noise, sizeof noise, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof noise));
  EXPECT_TRUE(wakes());
  look();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0],
            "refused a connection from " + Endpoint::local(strangers[3]).text() + ": what came is not of libfsdp");
  const Fd next = connect(far);
  EXPECT_TRUE(wakes());
  add_strangers(100);
  EXPECT_TRUE(acceptor->crowded());
  strangers.push_back(connect(near));
  EXPECT_FALSE(wakes());
}

// Connections that the acceptor does not want yet wait in the kernel without waking the caller, and are accepted later.
TEST_F(Acceptors, TakesNothingWhileItIsToldSo) {
  EXPECT_TRUE(acceptor->look(false).empty());
  const Fd guest = connect(far);
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(wakes());
  EXPECT_TRUE(acceptor->look(false).empty());
  pollfd entry{guest.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&entry, 1, 50), 0) << "it was taken";
  EXPECT_FALSE(acceptor->idle());
  look();
  await_challenge(guest);
  EXPECT_TRUE(arrives(guest));
  EXPECT_TRUE(acceptor->idle());
}

// A connection that proves nothing ends when its time is over. The text says whether it was silent or had begun.
TEST_F(Acceptors, WhatProvesNothingInTimeIsRefusedWithTheReason) {
  const Fd silent = connect(near), slow = connect(far);
  await_challenge(silent);
  await_challenge(slow);
  ASSERT_EQ(::send(slow.get(), "fsdp", 4, MSG_NOSIGNAL), 4);
  for (const auto end = Clock::now() + 4 * Acceptor::proof_time; lines.size() < 2 && Clock::now() < end; look())
    std::this_thread::sleep_for(10ms);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "refused a connection from " + Endpoint::local(silent).text() + ": it has said nothing");
  EXPECT_EQ(lines[1],
            "refused a connection from " + Endpoint::local(slow).text() + ": the other end has not answered in time");
  EXPECT_TRUE(has_hung_up(silent));
  EXPECT_TRUE(has_hung_up(slow));
}

// A child of this process has a copy of the socket and lives on.
TEST_F(Acceptors, WhatIsRefusedHearsItsEndThoughAChildHasTheSocket) {
  const Fd guest = connect(near);
  await_challenge(guest);
  const pid_t child = ::fork();
  if (child == 0)
    for (;;) ::pause();
  const char noise[100] = "no handshake";
  EXPECT_EQ(::send(guest.get(), noise, sizeof noise, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof noise));
  while (lines.empty()) look();
  EXPECT_TRUE(has_hung_up(guest));
  EXPECT_FALSE(wakes()) << "what has gone wakes the caller";
  ::kill(child, SIGKILL);
}

// A unix socket's packets carry a handshake as a stream's bytes do. Data behind the handshake is left to the caller.
TEST_F(Acceptors, ReadsNoPacketBehindTheHandshake) {
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  const std::string name = "fsdp acceptor test " + std::to_string(::getpid());
  std::memcpy(place.sun_path + 1, name.data(), name.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const auto *address = reinterpret_cast<const sockaddr *>(&place);
  const Fd here(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ASSERT_EQ(::bind(here.get(), address, length), 0);
  ASSERT_EQ(::listen(here.get(), 8), 0);
  Acceptor one(secret, "", &log);
  one.listen(here);
  const Fd guest(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  ASSERT_EQ(::connect(guest.get(), address, length), 0);
  Handshake handshake(Role::guest, secret, "");
  for (int i = 0; i < 100 && arrivals.empty(); ++i) {
    for (Acceptor::AuthenticatedSocket &arrival : one.look()) arrivals.push_back(std::move(arrival));
    if (handshake.advance(guest) == IoState::done && i < 50) i = 50;
  }
  ASSERT_EQ(arrivals.size(), 1u);
  ASSERT_EQ(handshake.advance(guest), IoState::done);
  EXPECT_EQ(arrivals[0].from, "a process of this host");
  ASSERT_EQ(send_packet(guest, "a packet", 8), Sent::yes);
  const auto packet = receive_packet(arrivals[0].socket);
  ASSERT_TRUE(packet);
  EXPECT_EQ(packet->bytes, 8u);
}

TEST(RefusalLog, AStrangerWithoutEndFillsNoLog) {
  std::vector<std::string> lines;
  RefusalLog log("a connection for messages");
  log.note("nobody", "there is no log", {});
  log.set_log([&](fsdp_log_level, const std::string &text) { lines.push_back(text); });
  RefusalLog::Clock::time_point now{1h};
  for (int i = 0; i < 1'000; ++i) log.note("somebody", "a reason", now);
  ASSERT_EQ(lines.size(), 8u);
  EXPECT_EQ(lines.back(), "refused a connection for messages from somebody: a reason");
  for (int i = 0; i < 60; ++i) log.note("somebody", "a reason", now += 1s);
  ASSERT_EQ(lines.size(), 14u) << "one in ten seconds";
  EXPECT_EQ(lines[8],
            "refused a connection for messages from somebody: a reason; 1001 others were refused since the last line");
  now += 1h;
  for (int i = 0; i < 1'000; ++i) log.note("somebody", "a reason", now);
  EXPECT_EQ(lines.size(), 22u);
}

}  // namespace
}  // namespace fsdp::membership::test
