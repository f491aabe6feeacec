// SPDX-License-Identifier: Apache-2.0
// Tests TCP between ranks: which processes may connect, and how an end handles bytes that are no frames.
#include <gtest/gtest.h>
#include <poll.h>

#include <random>
#include <thread>

#include "base/error.h"
#include "membership/wire/frame_stream.h"
#include "membership/wire/handshake.h"
#include "membership/wire/packet.h"
#include "transport/names.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

class Tcp : public testing::Test {
 protected:
  void SetUp() override {
    listener = listen_at(Endpoint::resolve("127.0.0.1", 0, problem).at(0), 16);
    ASSERT_TRUE(listener) << std::strerror(errno);
    at = Endpoint::local(listener);
    guest = connect_to(at, limit(5s), problem);
    ASSERT_TRUE(guest) << problem;
    host = accept();
    ASSERT_TRUE(host);
  }
  // Returns the latest connection. The listener may learn of it a moment after the end that connected.
  Fd accept() const {
    await_readable(listener, 5000);
    return accept_from(listener);
  }
  Limit limit(std::chrono::milliseconds time) const { return {std::chrono::steady_clock::now() + time, waiter}; }
  // Returns each end's description of the other: "" or a problem.
  std::pair<std::string, std::string> both(const std::string &host_secret, const std::string &guest_secret,
                                           const std::string &host_label = "x", const std::string &guest_label = "x") {
    std::string of_host, of_guest;
    std::thread other([&] {
      of_host = prove(host, Role::host, host_secret, host_label, limit(5s));
      if (!of_host.empty()) host.reset();
    });
    of_guest = prove(guest, Role::guest, guest_secret, guest_label, limit(5s));
    other.join();
    return {of_host, of_guest};
  }

  // Both ends use these keys in tests without a process between them.
  const StreamKeys keys{};
  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 10'000};
  std::string problem;
  Fd listener, host, guest;
  Endpoint at;
};

TEST_F(Tcp, BothKnowTheSecret) { EXPECT_EQ(both("s", "s"), std::make_pair(std::string(), std::string())); }

TEST_F(Tcp, AnotherSecretIsRefused) {
  const auto [of_host, of_guest] = both("s", "t");
  EXPECT_NE(of_host.find("another job secret"), std::string::npos) << of_host;
  EXPECT_NE(of_guest.find("hung up"), std::string::npos) << of_guest;
}

TEST_F(Tcp, AnotherPurposeIsRefused) {
  const auto [of_host, of_guest] = both("s", "s", "link 1", "link 2");
  EXPECT_NE(of_host.find("another purpose"), std::string::npos) << of_host;
  EXPECT_FALSE(of_guest.empty());
}

// An end that only sends back what it receives, in either role, proves nothing.
TEST_F(Tcp, AMirrorIsRefused) {
  std::thread mirror([&] {
    char buffer[256];
    while (true) {
      await_readable(guest, 5000);
      const ssize_t got = ::recv(guest.get(), buffer, sizeof buffer, 0);
      if (got <= 0) return;
      ::send(guest.get(), buffer, static_cast<size_t>(got), MSG_NOSIGNAL);
    }
  });
  EXPECT_NE(prove(host, Role::host, "s", "x", limit(5s)), "");
  host.reset();
  mirror.join();
}

TEST_F(Tcp, SilenceEndsAtTheLimit) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(prove(host, Role::host, "s", "x", limit(200ms)).find("in time"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 4s);
}

TEST_F(Tcp, RandomBytesAreRefused) {
  std::mt19937 random(5);
  std::array<uint32_t, 64> noise;
  for (auto &word : noise) word = random();
  ASSERT_EQ(::send(guest.get(), noise.data(), sizeof noise, 0), static_cast<ssize_t>(sizeof noise));
  EXPECT_EQ(prove(host, Role::host, "s", "x", limit(5s)), "what came is not of libfsdp");
}

// An answer that was valid on one connection is refused on the next.
TEST_F(Tcp, AReplayedAnswerIsRefused) {
  std::array<std::byte, sizeof(wire::Answer)> recorded;
  {
    const std::string secret = "s";
    Handshake host_side(Role::host, secret, "x"), guest_side(Role::guest, secret, "x");
    host_side.advance(host);
    await_readable(guest, 5000);
    guest_side.advance(guest);
    await_readable(host, 5000);
    ASSERT_EQ(::recv(host.get(), recorded.data(), recorded.size(), MSG_PEEK), static_cast<ssize_t>(recorded.size()));
    ASSERT_EQ(host_side.advance(host), IoState::done);
  }
  const Fd again = connect_to(at, limit(5s), problem);
  const Fd accepted = accept();
  ASSERT_EQ(::send(again.get(), recorded.data(), recorded.size(), 0), static_cast<ssize_t>(recorded.size()));
  EXPECT_NE(prove(accepted, Role::host, "s", "x", limit(5s)).find("another job secret"), std::string::npos);
}

TEST_F(Tcp, AnotherVersionIsNamed) {
  auto answer = wire::make<wire::Answer>();
  answer.head.version = 9;
  ASSERT_EQ(::send(guest.get(), &answer, sizeof answer, 0), static_cast<ssize_t>(sizeof answer));
  EXPECT_EQ(prove(host, Role::host, "s", "x", limit(5s)),
            "the other end speaks version 9 of the bootstrap, this one version 1");
}

TEST_F(Tcp, FramesOfAllSizesArrive) {
  FrameStream from(std::move(guest), 0, keys), to(std::move(host), 1 << 20, keys);
  std::thread sender([&] {
    for (const size_t bytes : {0, 1, 15, 16, 100'000, 1 << 20})
      EXPECT_TRUE(from.send(static_cast<uint32_t>(bytes % 7), std::vector<std::byte>(bytes, std::byte{42}), limit(5s)));
  });
  for (const size_t bytes : {0, 1, 15, 16, 100'000, 1 << 20}) {
    const auto frame = to.receive(limit(5s));
    ASSERT_TRUE(frame) << to.problem();
    EXPECT_EQ(frame->kind, bytes % 7);
    EXPECT_EQ(frame->body, std::vector<std::byte>(bytes, std::byte{42}));
  }
  sender.join();
  from = FrameStream();
  EXPECT_FALSE(to.receive(limit(5s)));
  EXPECT_EQ(to.problem(), "the other end closed the connection");
}

// The other end sends its last message and closes, although this end has sent more. So the kernel resets the
// connection.
TEST_F(Tcp, LastWordsAreHeardThoughSendingFails) {
  FrameStream leaver(std::move(guest), 100, keys), stays(std::move(host), 100, keys);
  ASSERT_TRUE(stays.send(1, {}, limit(5s)));
  await_readable(leaver.socket(), 5000);
  ASSERT_TRUE(leaver.send(7, {}, limit(5s)));
  leaver = FrameStream();
  pollfd reset{stays.socket().get(), 0, 0};
  ASSERT_EQ(::poll(&reset, 1, 5000), 1);
  EXPECT_FALSE(stays.send(2, {}, limit(5s)));
  EXPECT_FALSE(stays.open());
  const auto frame = stays.receive();
  ASSERT_TRUE(frame) << stays.problem();
  EXPECT_EQ(frame->kind, 7U);
  EXPECT_FALSE(stays.receive());
}

TEST_F(Tcp, AFrameThatIsTooLongEndsTheStream) {
  FrameStream from(std::move(guest), 0, keys), to(std::move(host), 100, keys);
  EXPECT_TRUE(from.send(1, std::vector<std::byte>(101), limit(5s)));
  EXPECT_FALSE(to.receive(limit(5s)));
  EXPECT_EQ(to.problem(), "a frame announces 101 bytes, at most 100 are allowed");
  EXPECT_EQ(to.code(), EBADMSG) << "whichever process has announced it";
}

// Two ends have proven the secret to each other. A process between them sees all their bytes.
class Between : public Tcp {
 protected:
  void SetUp() override {
    Tcp::SetUp();
    ASSERT_FALSE(HasFatalFailure());
    StreamKeys host_keys;
    std::string of_host;
    std::thread other([&] { of_host = prove(host, Role::host, "s", "x", limit(5s), &host_keys); });
    ASSERT_EQ(prove(guest, Role::guest, "s", "x", limit(5s), &guest_keys), "");
    other.join();
    ASSERT_EQ(of_host, "");
    to = FrameStream(std::move(host), 100, host_keys);
  }
  // Writes frames as an end with these keys does, and returns the bytes of each frame.
  std::vector<std::vector<std::byte>> frames_of(const StreamKeys &with) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) throw std::bad_alloc();
    const Fd out(ends[1]);
    FrameStream from{Fd(ends[0]), 0, with};
    std::vector<std::vector<std::byte>> frames;
    for (uint32_t i = 0; i < 3; ++i) {
      from.queue(7, std::vector<std::byte>(20, std::byte{42}));
      EXPECT_TRUE(from.flush());
      frames.emplace_back(1000);
      frames.back().resize(static_cast<size_t>(::recv(out.get(), frames.back().data(), 1000, MSG_DONTWAIT)));
    }
    return frames;
  }
  void pass_on(const std::vector<std::byte> &bytes) const {
    ASSERT_EQ(::send(guest.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  // Returns how many frames are received. The stream has ended because of the bytes after them.
  size_t heard_before_the_end() {
    size_t count = 0;
    while (to.receive(limit(5s))) ++count;
    EXPECT_EQ(to.code(), EBADMSG) << to.problem();
    EXPECT_TRUE(to.speaks()) << "the other end may hear of it";
    return count;
  }

  StreamKeys guest_keys;
  FrameStream to;
};

TEST_F(Between, AProxyThatChangesNothingIsNotNoticed) {
  for (const auto &frame : frames_of(guest_keys)) {
    pass_on(frame);
    const auto heard = to.receive(limit(5s));
    ASSERT_TRUE(heard) << to.problem();
    EXPECT_EQ(heard->kind, 7U);
    EXPECT_EQ(heard->body, std::vector<std::byte>(20, std::byte{42}));
  }
}

TEST_F(Between, AFrameThatIsLeftOutEndsIt) {
  const auto frames = frames_of(guest_keys);
  pass_on(frames[0]);
  pass_on(frames[2]);
  EXPECT_EQ(heard_before_the_end(), 1U);
}

TEST_F(Between, AFrameThatIsRepeatedEndsIt) {
  const auto frames = frames_of(guest_keys);
  pass_on(frames[0]);
  pass_on(frames[0]);
  EXPECT_EQ(heard_before_the_end(), 1U);
}

TEST_F(Between, WhatThisEndHasSaidItselfEndsIt) {
  pass_on(frames_of({guest_keys.in, guest_keys.out})[0]);
  EXPECT_EQ(heard_before_the_end(), 0U);
}

// The ends have the same secret and purpose, but other nonces.
TEST_F(Between, AFrameOfAnotherConnectionEndsIt) {
  const std::string secret = "s";
  pass_on(frames_of(Handshake(Role::guest, secret, "x").keys())[0]);
  EXPECT_EQ(heard_before_the_end(), 0U);
}

TEST_F(Between, AFrameWithoutATagIsNotHeard) {
  auto frame = frames_of(guest_keys)[0];
  frame.resize(FrameHead::size_bytes + 20);
  pass_on(frame);
  EXPECT_FALSE(to.receive(limit(100ms)));
  EXPECT_TRUE(to.open()) << "it may still come";
  pass_on(std::vector<std::byte>(32));
  EXPECT_EQ(heard_before_the_end(), 0U);
}

// Changes a bit in bytes of the head (the length may become that of another frame), of the body and of the tag.
class ABit : public Between, public testing::WithParamInterface<size_t> {};
TEST_P(ABit, ThatIsChangedEndsIt) {
  auto frame = frames_of(guest_keys)[0];
  ASSERT_EQ(frame.size(), 16U + 20 + 32);
  frame[GetParam()] ^= std::byte{1};
  pass_on(frame);
  pass_on(frame);  // where it seems to be longer
  EXPECT_EQ(heard_before_the_end(), 0U);
}
INSTANTIATE_TEST_SUITE_P(Between, ABit, testing::Range(size_t{0}, size_t{16 + 20 + 32}, size_t{3}));

TEST_F(Tcp, NothingIsSaidBeforeTheProof) {
  FrameStream stream(std::move(guest), 100);
  stream.queue(1, {});
  EXPECT_THROW(stream.flush(), Error);
  EXPECT_THROW(stream.receive(), Error);
}

TEST_F(Tcp, NoProcessListens) {
  listener.reset();
  EXPECT_FALSE(connect_to(at, limit(5s), problem));
  EXPECT_NE(problem.find("Connection refused"), std::string::npos) << problem;
}

TEST(EndpointText, AddressesOfBothFamiliesAreRead) {
  std::string problem;
  EXPECT_EQ(Endpoint::resolve("127.0.0.2", 80, problem).at(0).text(), "127.0.0.2:80");
  EXPECT_TRUE(Endpoint::resolve("127.0.0.2", 80, problem).at(0).loopback());
  EXPECT_EQ(Endpoint::resolve("::1", 80, problem).at(0).text(), "[::1]:80");
  EXPECT_TRUE(Endpoint::resolve("::1", 80, problem).at(0).loopback());
  EXPECT_FALSE(Endpoint::resolve("192.0.2.1", 80, problem).at(0).loopback());
  EXPECT_TRUE(Endpoint::resolve("no such host", 80, problem).empty());
  EXPECT_FALSE(problem.empty());
}

}  // namespace
}  // namespace fsdp::transport::test
