// SPDX-License-Identifier: Apache-2.0
// Processes that are no ranks connect to the TCP rendezvous. The job forms nevertheless, and rank 0's memory does not
// grow.
#include <sys/resource.h>

#include <random>

#include "rendezvous_fixture.h"

namespace fsdp::transport::test {
namespace {

class Hostile : public Rendezvous {
 protected:
  // Returns the highest resident memory of a process so far.
  static uint64_t peak_bytes(pid_t process) {
    std::ifstream file("/proc/" + std::to_string(process) + "/status");
    for (std::string line; std::getline(file, line);)
      if (line.starts_with("VmHWM:")) return std::stoull(line.substr(6)) * 1024;
    ADD_FAILURE() << "no VmHWM of process " << process;
    return 0;
  }
  // Starts rank 0, and notes its memory when it listens.
  void begin() {
    zero = start(0U);
    connect();
    std::this_thread::sleep_for(100ms);
    before = peak_bytes(processes[zero]);
  }
  void expect_the_job_forms() {
    std::this_thread::sleep_for(100ms);
    EXPECT_LT(peak_bytes(processes[zero]) - before, 16U << 20);
    const auto began = std::chrono::steady_clock::now();
    const size_t one = start(1), two = start(2);
    finish();
    for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
    EXPECT_LT(seconds_since(began), 15);
  }
  static void send(const Fd &socket, const void *data, size_t bytes) {
    ::send(socket.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  // Sends a frame that a proven rank may send, with this head and body.
  static void send_frame(const FrameStream &stream, uint32_t kind, uint32_t announced,
                         const std::vector<std::byte> &body) {
    const uint32_t head[] = {FrameHead::magic, FrameHead::version, kind, announced};
    send(stream.socket(), head, sizeof head);
    if (!body.empty()) send(stream.socket(), body.data(), body.size());
  }

  size_t zero = 0;
  uint64_t before = 0;
};

TEST_F(Hostile, AThousandConnectionsThatSayNothing) {
  begin();
  std::vector<Fd> silent;
  for (int i = 0; i < 1000; ++i) silent.push_back(connect());
  expect_the_job_forms();
}

TEST_F(Hostile, AThousandConnectionsThatStopHalfWay) {
  begin();
  std::vector<Fd> sockets;
  const auto answer = wire::make<wire::Answer>();
  for (int i = 0; i < 1000; ++i) {
    sockets.push_back(connect());
    send(sockets.back(), &answer, sizeof answer / 2);
  }
  expect_the_job_forms();
}

TEST_F(Hostile, RandomBytesAndHugeLengths) {
  begin();
  std::mt19937 random(11);
  std::vector<uint32_t> noise(25'000);
  for (auto &word : noise) word = random();
  std::vector<Fd> sockets;
  for (int i = 0; i < 200; ++i) {
    sockets.push_back(connect());
    if (i % 2) std::memcpy(noise.data(), "fsdpmeet", 8);
    send(sockets.back(), noise.data() + i % 2, (noise.size() - 1) * 4 >> i % 17);
  }
  expect_the_job_forms();
}

TEST_F(Hostile, WrongSecretsVersionsAndReplays) {
  begin();
  std::vector<Fd> sockets;
  for (int i = 0; i < 20; ++i) {
    sockets.push_back(connect());
    EXPECT_NE(prove(sockets.back(), Role::guest, "not the secret", "rendezvous of job ", limit(5s)), "");
    sockets.push_back(connect());
    EXPECT_NE(prove(sockets.back(), Role::guest, options.secret, "another purpose", limit(5s)), "");
    sockets.push_back(connect());
    auto answer = wire::make<wire::Answer>();
    answer.head.version = 7;
    send(sockets.back(), &answer, sizeof answer);
  }
  // A rank's answer from one connection is sent again on the next.
  std::array<std::byte, sizeof(wire::Answer)> recorded{};
  {
    const Fd socket = connect();
    wire::Challenge challenge;
    for (size_t got = 0; got < sizeof challenge;) {
      await_readable(socket, 5000);
      const ssize_t count = ::recv(socket.get(), reinterpret_cast<char *>(&challenge) + got, sizeof challenge - got, 0);
      ASSERT_GT(count, 0);
      got += static_cast<size_t>(count);
    }
    auto answer = wire::make<wire::Answer>();
    answer.nonce = make_nonce();
    answer.digest = wire::guest_digest(options.secret, challenge.nonce, answer.nonce, ": rendezvous of job ");
    std::memcpy(recorded.data(), &answer, sizeof answer);
    send(socket, recorded.data(), recorded.size());
    wire::Proof proof;
    await_readable(socket, 5000);
    // The original answer was right on its own connection.
    EXPECT_EQ(::recv(socket.get(), &proof, sizeof proof, 0), static_cast<ssize_t>(sizeof proof));
  }
  const Fd again = connect();
  send(again, recorded.data(), recorded.size());
  char challenge_and_more[1000];
  size_t heard = 0;
  for (ssize_t count = 1; count > 0; heard += count > 0 ? static_cast<size_t>(count) : 0) {
    await_readable(again, 5000);
    count = ::recv(again.get(), challenge_and_more, sizeof challenge_and_more, 0);
  }
  EXPECT_EQ(heard, sizeof(wire::Challenge));  // and without a proof
  expect_the_job_forms();
}

// A process that knows the secret and sends nonsense has no more success.
TEST_F(Hostile, NonsenseBehindTheProof) {
  begin();
  std::vector<FrameStream> streams;
  std::mt19937 random(13);
  for (uint32_t i = 0; i < 60; ++i) {
    streams.push_back(enter());
    std::vector<std::byte> noise(random() % 2000);
    for (auto &byte : noise) byte = static_cast<std::byte>(random());
    switch (i % 6) {
      case 0: send(streams.back().socket(), noise.data(), noise.size()); break;
      case 1: send_frame(streams.back(), 1, UINT32_MAX, noise); break;     // longer than any message
      case 2: send_frame(streams.back(), 1, message::longest, {}); break;  // announced and never sent
      case 3: streams.back().queue(1, noise); break;
      case 4: streams.back().queue(message::share(message::Start{3, {}})); break;  // only rank 0 may send this
      default: join(streams.back(), 77);
    }
  }
  for (FrameStream &stream : streams) stream.flush();
  expect_the_job_forms();
}

TEST_F(Hostile, ADuplicateIsRefused) {
  begin();
  const size_t one = start(1);
  await_join(one);
  FrameStream stream = enter();
  join(stream, 1);
  const auto frame = stream.receive(limit(5s));
  ASSERT_TRUE(frame);
  const auto parsed = message::parse(frame->kind, frame->body);
  const auto *refusal = std::get_if<message::Refused>(&parsed.message);
  ASSERT_TRUE(refusal);
  EXPECT_NE(refusal->text.find("another process is rank 1 already"), std::string::npos) << refusal->text;
  const size_t two = start(2);
  finish();
  for (const size_t index : {zero, one, two}) expect(index, FSDP_OK);
}

}  // namespace
}  // namespace fsdp::transport::test
