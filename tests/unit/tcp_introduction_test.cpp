// SPDX-License-Identifier: Apache-2.0
// Connections between ranks begin with a proof of the job's secret, for this job and this rank. A process is refused if
// it has no proof, or one that was made for another purpose.
#include <gtest/gtest.h>

#include <sys/socket.h>
#include <sys/uio.h>
#include <optional>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "transport/message/tcp/introduction.h"
#include "transport/message/tcp/transport.h"

namespace fsdp::transport::tcp {
namespace {

using namespace std::chrono_literals;
using State = IoState;

struct Meeting {
  State guest = State::waiting, host = State::waiting;
  std::string guest_problem, host_problem;
  uint32_t host_peer = 0;
  bool encrypted = false;
};

Endpoint loopback() {
  std::string problem;
  return Endpoint::numeric("127.0.0.1", 0, problem).front();
}

// The rank that accepts connections: its Acceptor, and the Introduction of connections that the Acceptor hands on.
class HostEnd {
 public:
  HostEnd(const JobNames &job, const Fd &listener)
      : job_(job),
        log_("a connection", [this](fsdp_log_level, const std::string &text) { refused_ = text; }),
        acceptor_(job.secret, job.label(job.rank), &log_) {
    acceptor_.listen(listener);
  }
  State advance() {
    if (one_) return one_->advance();
    for (Acceptor::AuthenticatedSocket &arrival : acceptor_.look())
      one_.emplace(job_, std::move(arrival), Acceptor::Clock::now() + Acceptor::message_time);
    return refused_.empty() ? State::waiting : State::failed;
  }
  bool proven() const { return one_.has_value(); }
  std::string problem() const { return one_ ? one_->problem() : refused_; }
  uint32_t peer() const { return one_ ? one_->peer() : 0; }
  std::unique_ptr<Tls> take_tls() { return one_ ? one_->take_tls() : nullptr; }

 private:
  const JobNames &job_;
  std::string refused_;
  RefusalLog log_;
  Acceptor acceptor_;
  std::optional<Introduction> one_;
};

// guest connects to rank `to`, at which host listens.
Meeting meet(const JobNames &guest_names, const JobNames &host_names, uint32_t to) {
  const Fd listener = listen_at(loopback(), 4);
  const auto deadline = Introduction::Clock::now() + 10s;
  Introduction guest(guest_names, to, Endpoint::local(listener), deadline, deadline);
  HostEnd host(host_names, listener);
  Meeting seen;
  for (int i = 0; i < 100'000 && (seen.guest == State::waiting || seen.host == State::waiting); ++i) {
    if (seen.guest == State::waiting) seen.guest = guest.advance();
    if (seen.host == State::waiting) seen.host = host.advance();
    std::this_thread::sleep_for(100us);
  }
  seen.guest_problem = guest.problem();
  seen.host_problem = host.problem();
  seen.host_peer = host.peer();
  seen.encrypted = guest.take_tls() && host.take_tls();
  return seen;
}

JobNames names(uint32_t rank) { return {"the secret", "a job", rank, 4, {}, nullptr, {}}; }

JobNames guarded(uint32_t rank, NetProtection protection) {
  JobNames names{"the secret", "a job", rank, 4, protection, nullptr, {}};
  static const TlsLibrary library = load_tls_library();
  if (protection.encryption) names.tls = &library;
  return names;
}

TEST(TcpIntroduction, TwoRanksOfAJobMeet) {
  const Meeting seen = meet(names(1), names(3), 3);
  EXPECT_EQ(seen.guest, State::done) << seen.guest_problem;
  EXPECT_EQ(seen.host, State::done) << seen.host_problem;
  EXPECT_EQ(seen.host_peer, 1u);
}

TEST(TcpIntroduction, NothingIsLeftOfTheSecretAndTheKey) {
  alignas(JobNames) unsigned char memory[sizeof(JobNames)] = {};
  auto *names = new (memory) JobNames{"secretsecret", "a job", 1, 4, {}, nullptr, {}};
  names->key.fill(0x5a);
  names->~JobNames();
  const std::string left(reinterpret_cast<const char *>(memory), sizeof memory);
  EXPECT_EQ(left.find("secret"), std::string::npos);
  EXPECT_EQ(left.find("ZZ"), std::string::npos);
}

TEST(TcpIntroduction, TwoRanksAgreeOnWhatGuardsThem) {
  for (const bool checksum : {false, true})
    for (const bool encryption : {false, true}) {
      const Meeting seen = meet(guarded(1, {checksum, encryption}), guarded(3, {checksum, encryption}), 3);
      EXPECT_EQ(seen.guest, State::done) << seen.guest_problem;
      EXPECT_EQ(seen.host, State::done) << seen.host_problem;
      EXPECT_EQ(seen.encrypted, encryption);
    }
  const std::pair<NetProtection, NetProtection> differ[] = {
      {{false, true}, {}}, {{}, {false, true}}, {{true, false}, {}}, {{}, {true, false}}};
  for (const auto &[guest, host] : differ) {
    const Meeting seen = meet(guarded(1, guest), guarded(3, host), 3);
    EXPECT_NE(seen.guest, State::done);
    EXPECT_EQ(seen.host, State::failed);
    EXPECT_NE(seen.host_problem.find("another FSDP_NET_CHECKSUM or FSDP_NET_ENCRYPTION"), std::string::npos);
  }
}

// This process knows everything that a rank knows, up to its first words within TLS.
struct Pretender {
  Pretender(const JobNames &names, const Endpoint &to)
      : proof(Role::guest, names.secret, names.label(3)),
        greeting{0x66736768, 1, 0x01020304, 4, 1, 3, 0, 1},
        tls(*names.tls, Role::guest, names.key, "libfsdp messages, rank 1 to rank 3") {
    int code = 0;
    socket = begin_connecting(to, code);
  }
  // Takes turns with the host.
  void go_on() {
    if (proof.advance(socket) != IoState::done) return;
    if (!greeted) greeted = ::send(socket.get(), &greeting, sizeof greeting, MSG_NOSIGNAL) > 0;
    Greeting answer;
    if (!answered) answered = ::recv(socket.get(), &answer, sizeof answer, MSG_DONTWAIT) == sizeof answer;
    if (!answered || said || tls.shake_hands(socket) != IoState::done) return;
    iovec part{const_cast<uint8_t *>(binding.data()), binding.size()};
    said = tls.send(socket, &part, 1) > 0;
  }
  Handshake proof;
  Greeting greeting;
  Tls tls;
  Fd socket;
  const Binding binding{};
  bool greeted = false, answered = false, said = false;
};

// The proof belongs to another connection than the bytes that follow it.
TEST(TcpIntroduction, WhatIsSaidFirstWithinTlsBindsItToTheProof) {
  const JobNames names_of_3 = guarded(3, {false, true});
  const Fd listener = listen_at(loopback(), 4);
  Pretender guest(names_of_3, Endpoint::local(listener));
  HostEnd host(names_of_3, listener);
  State state = State::waiting;
  for (int i = 0; i < 100'000 && state == State::waiting; ++i) {
    guest.go_on();
    state = host.advance();
    std::this_thread::sleep_for(100us);
  }
  EXPECT_TRUE(guest.said);
  EXPECT_EQ(state, State::failed);
  EXPECT_EQ(host.problem(), "what the other end says within TLS is of another connection");
}

TEST(TcpIntroduction, NamesThatDoNotFitAreRefused) {
  struct Case {
    const char *what;
    JobNames guest, host;
    uint32_t to;
    bool proven;  // it has the right secret
  };
  const Case cases[] = {
      {"another secret", {"another", "a job", 1, 4, {}, nullptr, {}}, names(3), 3, false},
      {"no secret", {"", "a job", 1, 4, {}, nullptr, {}}, names(3), 3, false},
      {"another job", {"the secret", "another", 1, 4, {}, nullptr, {}}, names(3), 3, false},
      {"for another rank", names(1), names(3), 2, false},
      {"another world size", {"the secret", "a job", 1, 5, {}, nullptr, {}}, names(3), 3, true},
      {"a rank that the world does not have", {"the secret", "a job", 4, 4, {}, nullptr, {}}, names(3), 3, true},
      {"the higher rank connects", names(3), names(2), 2, true},
      {"a rank to itself", names(3), names(3), 3, true},
  };
  for (const Case &one : cases) {
    const Meeting seen = meet(one.guest, one.host, one.to);
    EXPECT_EQ(seen.host, State::failed) << one.what;
    EXPECT_NE(seen.guest, State::done) << one.what;
    EXPECT_NE(seen.host_problem, "") << one.what;
    EXPECT_EQ(seen.host_problem.find("another job, or of another version") != std::string::npos, one.proven)
        << one.what << ": " << seen.host_problem;
  }
}

// The bytes of a valid conversation cannot open another one, because each conversation has its own nonces.
TEST(TcpIntroduction, AReplayGetsNowhere) {
  const Fd listener = listen_at(loopback(), 4);
  const Endpoint place = Endpoint::local(listener);
  const JobNames right = names(1), here = names(3);
  const auto deadline = Introduction::Clock::now() + 10s;

  // A man in the middle of a valid conversation records the guest's bytes.
  const Fd middle = listen_at(loopback(), 4);
  Introduction guest(right, 3, Endpoint::local(middle), deadline, deadline);
  Fd to_guest, to_host;
  std::string problem;
  int code = 0;
  for (int i = 0; i < 20'000 && !(to_guest = accept_from(middle)); ++i) std::this_thread::sleep_for(1ms);
  to_host = begin_connecting(place, code);
  HostEnd host(here, listener);
  std::vector<char> said;
  State host_state = State::waiting, guest_state = State::waiting;
  for (int i = 0; i < 100'000 && (host_state == State::waiting || guest_state == State::waiting); ++i) {
    char bytes[512];
    if (guest_state == State::waiting) guest_state = guest.advance();
    if (const ssize_t count = ::recv(to_guest.get(), bytes, sizeof bytes, MSG_DONTWAIT); count > 0) {
      said.insert(said.end(), bytes, bytes + count);
      ASSERT_EQ(::send(to_host.get(), bytes, static_cast<size_t>(count), MSG_NOSIGNAL), count);
    }
    if (host_state == State::waiting) host_state = host.advance();
    if (const ssize_t count = ::recv(to_host.get(), bytes, sizeof bytes, MSG_DONTWAIT); count > 0) {
      ASSERT_EQ(::send(to_guest.get(), bytes, static_cast<size_t>(count), MSG_NOSIGNAL), count);
    }
    std::this_thread::sleep_for(100us);
  }
  ASSERT_EQ(host_state, State::done) << host.problem();
  ASSERT_GT(said.size(), sizeof(Greeting));

  Fd again = begin_connecting(place, code);
  HostEnd second(here, listener);
  ASSERT_EQ(::send(again.get(), said.data(), said.size(), MSG_NOSIGNAL), static_cast<ssize_t>(said.size()));
  State state = State::waiting;
  for (int i = 0; i < 100'000 && state == State::waiting; ++i) {
    state = second.advance();
    std::this_thread::sleep_for(100us);
  }
  EXPECT_EQ(state, State::failed);
  EXPECT_NE(second.problem().find("another job secret"), std::string::npos) << second.problem();
}

// First no process listens. Then one listens and does not answer.
TEST(TcpIntroduction, TellsWhyItCannotConnect) {
  Endpoint nobody;
  {
    const Fd listener = listen_at(loopback(), 4);
    nobody = Endpoint::local(listener);
  }
  const JobNames mine = names(1);
  const auto soon = Introduction::Clock::now() + 50ms, later = soon + 10s;
  Introduction refused(mine, 3, nobody, later, later);
  State state = State::waiting;
  for (int i = 0; i < 100'000 && state == State::waiting; ++i) state = refused.advance();
  EXPECT_EQ(state, State::failed);
  EXPECT_EQ(refused.code(), ECONNREFUSED);
  EXPECT_FALSE(refused.final());
  EXPECT_NE(refused.problem().find(nobody.text()), std::string::npos) << refused.problem();

  const Fd silent = listen_at(loopback(), 4);
  Introduction late(mine, 3, Endpoint::local(silent), soon, later);
  for (state = State::waiting; state == State::waiting;) state = late.advance();
  EXPECT_EQ(late.code(), ETIMEDOUT);
}

// A rank that has sent its greeting may be admitted at any moment. If the connection ends then, that counts as the end
// of a rank. The other end gives a rank that has proven the secret more time than a stranger.
TEST(TcpIntroduction, ARankThatHasGreetedWaitsToBeLetIn) {
  for (const bool encryption : {false, true}) {
    const Fd listener = listen_at(loopback(), 4);
    const JobNames here = guarded(3, {false, encryption}), mine = guarded(1, {false, encryption});
    const auto now = Introduction::Clock::now(), soon = now + 1s;
    Introduction guest(mine, 3, Endpoint::local(listener), soon, now + 20s);
    HostEnd host(here, listener);
    for (int i = 0; i < 100'000 && !host.proven(); ++i) {  // it has not read the greeting
      ASSERT_EQ(guest.advance(), State::waiting) << guest.problem();
      ASSERT_EQ(host.advance(), State::waiting) << host.problem();
    }
    ASSERT_EQ(guest.advance(), State::waiting);
    std::this_thread::sleep_until(soon + 10ms);
    State guest_state = guest.advance(), host_state = State::waiting;
    for (int i = 0; i < 100'000 && (guest_state == State::waiting || host_state == State::waiting); ++i) {
      if (host_state == State::waiting) host_state = host.advance();
      if (guest_state == State::waiting) guest_state = guest.advance();
      std::this_thread::sleep_for(100us);
    }
    EXPECT_EQ(guest_state, State::done) << guest.problem();
    EXPECT_EQ(host_state, State::done) << host.problem();
  }
}

TEST(TcpInterface, IsTheOneThatWasChosen) {
  ::unsetenv("FSDP_NET_INTERFACE");
  EXPECT_EQ(find_interface("127.0.0.1").address(), "127.0.0.1");
  for (const char *chosen : {"lo", "127.0.0.1"}) {
    ::setenv("FSDP_NET_INTERFACE", chosen, 1);
    EXPECT_EQ(find_interface("127.0.0.5").address(), "127.0.0.1") << chosen;
  }
  ::setenv("FSDP_NET_INTERFACE", "127.0.0.9", 1);
  EXPECT_EQ(find_interface("127.0.0.1").address(), "127.0.0.9");
  for (const char *none : {"0.0.0.0", "::", "224.0.0.1", "ff02::1"}) {
    ::setenv("FSDP_NET_INTERFACE", none, 1);
    EXPECT_THROW(find_interface("127.0.0.1"), Error) << none;
  }
  ::setenv("FSDP_NET_INTERFACE", "nowhere7", 1);
  try {
    find_interface("127.0.0.1");
    ADD_FAILURE() << "an interface that is not there";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_INVALID_ARGUMENT);
    EXPECT_NE(error.message.find("'nowhere7'"), std::string::npos) << error.message;
    EXPECT_NE(error.message.find("lo"), std::string::npos) << error.message;
  }
  ::unsetenv("FSDP_NET_INTERFACE");
}

}  // namespace
}  // namespace fsdp::transport::tcp
