// SPDX-License-Identifier: Apache-2.0
// Leaders that connect in a tree: a connection that ends on the way is made again.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "membership/tree/dial.h"
#include "membership/tree/door.h"
#include "membership/tree/leader.h"
#include "membership/tree/message.h"
#include "membership/wire/proof.h"
#include "shm_ranks.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

class FormTree : public testing::Test {
 protected:
  void SetUp() override {
    std::string problem;
    listener = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 16);
    ASSERT_TRUE(listener) << std::strerror(errno);
    others = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 16);
    ASSERT_TRUE(others) << std::strerror(errno);
  }
  // Of two nodes with a rank each.
  NodePlan plan(uint32_t rank, uint32_t forming_ms = 5000) const {
    NodePlan plan;
    plan.rank = rank;
    plan.node_of = {0, 1};
    plan.nodes = {{0, "a", Endpoint::local(listener).text()}, {1, "b", Endpoint::local(others).text()}};
    plan.secret = "secret";
    plan.job = "job";
    plan.forming_ms = forming_ms;
    return plan;
  }
  std::future<NodeLinks> form(uint32_t rank, uint32_t forming_ms = 5000) {
    return std::async(std::launch::async, [=, this] {
      NodeLinks links;
      form_tree(plan(rank, forming_ms), rank ? others : listener, waiter, links);
      return links;
    });
  }
  Limit soon() const { return {std::chrono::steady_clock::now() + 3s, waiter}; }
  Fd next_connection() {
    const Limit limit = soon();
    for (;;) {
      if (Fd accepted = accept_from(listener)) return accepted;
      if (limit.over()) throw Error(FSDP_TIMEOUT, "nobody connects");
      std::this_thread::sleep_for(1ms);
    }
  }
  // The next connection, up to the guest's hello.
  FrameStream hear_hello() {
    Fd accepted = next_connection();
    StreamKeys keys;
    const std::string problem = prove(accepted, Role::host, "secret", "libfsdp node link job", soon(), &keys);
    if (!problem.empty()) throw Error(FSDP_PEER_FAILED, problem);
    FrameStream stream(std::move(accepted), tree::longest, keys);
    const auto frame = stream.receive(soon());
    if (!frame || !tree::as<tree::Hello>(*frame)) throw Error(FSDP_PEER_FAILED, "no hello has come");
    return stream;
  }
  // Now that its host forms too.
  void expect_links(std::future<NodeLinks> &guest) {
    auto host = form(0);
    const auto of_guest = guest.get(), of_host = host.get();
    ASSERT_TRUE(of_guest.at(0) && of_host.at(1));
    EXPECT_TRUE(of_guest.at(0).open() && of_host.at(1).open());
  }
  std::string error_of(std::future<NodeLinks> &guest) {
    try {
      guest.get();
      return "it connected";
    } catch (const Error &error) {
      EXPECT_EQ(error.status, FSDP_PEER_FAILED);
      EXPECT_EQ(error.rank, 0);
      return error.message;
    }
  }

  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 10'000};
  Fd listener, others;
};

TEST_F(FormTree, ConnectsAgain) {
  auto guest = form(1);
  next_connection();  // and its end
  next_connection();
  expect_links(guest);
}

// It has said its hello, and does not take that for enough.
TEST_F(FormTree, ConnectsAgainUntilItIsAnswered) {
  auto guest = form(1);
  hear_hello();  // and the connection's end
  expect_links(guest);
}

TEST_F(FormTree, SaysWhatAnotherJobAnswers) {
  auto guest = form(1);
  FrameStream host = hear_hello();
  const tree::Hello other{tree::version, 0, 3, 3, tree::native_order, tree::Bond::tree};
  ASSERT_TRUE(host.send(static_cast<uint32_t>(other.kind), tree::bytes_of(other), soon()));
  EXPECT_NE(error_of(guest).find("it answered as a node of another job"), std::string::npos);
}

TEST_F(FormTree, SaysWhyItNeverCould) {
  auto guest = form(1, 3000);
  std::atomic<bool> over{false};
  std::jthread host([&] {
    while (!over) {
      const Fd dropped = accept_from(listener);
      std::this_thread::sleep_for(1ms);
    }
  });
  const std::string text = error_of(guest);
  over = true;
  EXPECT_NE(text.find("rank 0 (leader of node 0, host a) did not connect while the job formed: the other end hung up"),
            text.npos)
      << text;
}

// A leader that connects from far away needs round trips, while strangers that say nothing connect all the time.
class CrowdedDoor : public FormTree {
 protected:
  void SetUp() override {
    FormTree::SetUp();
    rlimit files{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
    files.rlim_cur = std::min<rlim_t>(files.rlim_max, 4096);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
    if (files.rlim_cur < 4096) GTEST_SKIP() << "needs 4096 descriptors";
    std::string problem;
    listener = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 1024);
    parent = plan(0);
    child = plan(1);
  }
  // From this address of the loopback device, never waiting.
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
  // The challenge has come, and so the door has taken it.
  static void await_challenge(Door &door, const Fd &guest) {
    pollfd entry{guest.get(), POLLIN, 0};
    while (::poll(&entry, 1, 1) == 0) door.look(true);
  }
  void add_strangers(Door &door, int count, uint32_t from = stranger) {
    for (int i = 0; i < count; ++i) {
      strangers.push_back(connect(from));
      if (i % 50 == 49) door.look(true);
    }
    door.look(true);
  }
  // Of a guest that has heard the challenge: does the door let it in?
  bool enters(Door &door, Fd guest) const {
    Handshake proof(Role::guest, child.secret, link_label(child));
    return enters(door, std::move(guest), proof);
  }
  bool enters(Door &door, Fd guest, Handshake &proof) const {
    for (const Limit limit = soon(); proof.state() == Handshake::State::waiting && !limit.over(); door.look(true))
      proof.advance(guest);
    if (proof.state() != Handshake::State::proven) return false;
    FrameStream stream(std::move(guest), tree::longest, proof.keys());
    greet(stream, child, tree::Bond::tree);
    for (const Limit limit = soon(); !limit.over();) {
      stream.flush();
      if (!door.look(true).empty()) return true;
    }
    return false;
  }

  static constexpr uint32_t stranger = 0x7f000001, far_away = 0x7f000002;
  NodePlan parent, child;
  std::vector<Fd> strangers;
};

// Looks are rare in a large job: an answer that came after the last one counts before its place goes to another.
TEST_F(CrowdedDoor, ReadsAnAnswerBeforeItGivesItsPlaceAway) {
  Door door(parent, listener);
  Fd guest = connect(far_away);
  await_challenge(door, guest);
  Handshake proof(Role::guest, child.secret, link_label(child));
  proof.advance(guest);
  for (uint32_t i = 0; i < 800; ++i) strangers.push_back(connect(far_away + 1 + i % 4));
  std::this_thread::sleep_for(2 * Door::least_time);
  door.look(true);
  EXPECT_TRUE(enters(door, std::move(guest), proof));
}

// A stranger's address loses its own places: what comes from elsewhere has all the time that it would have.
TEST_F(CrowdedDoor, AFloodFromOneAddressTakesNoPlaceOfAnother) {
  for (int tries = 0; tries < 10; ++tries) {
    strangers.clear();
    Door door(parent, listener);
    const auto start = std::chrono::steady_clock::now();
    Fd guest = connect(far_away);
    await_challenge(door, guest);
    add_strangers(door, 600);
    if (std::chrono::steady_clock::now() - start > 1500ms) continue;  // then its own time may be over
    EXPECT_TRUE(has_hung_up(strangers.front()));
    EXPECT_FALSE(has_hung_up(strangers.back()));
    EXPECT_TRUE(enters(door, std::move(guest)));
    return;
  }
  GTEST_SKIP() << "this machine makes no 600 connections in a second";
}

TEST_F(CrowdedDoor, EachOfManyAddressesHasItsLeastTime) {
  using Clock = std::chrono::steady_clock;
  Door door(parent, listener);
  std::vector<Clock::time_point> since;
  size_t gone = 0;
  for (uint32_t i = 0; i < 1500; ++i) {
    since.push_back(Clock::now());
    strangers.push_back(connect(stranger + 256 + i % 700));
    if (i % 50 < 49) continue;
    door.look(true);
    for (; gone < strangers.size() && has_hung_up(strangers[gone]); ++gone)
      ASSERT_GE(Clock::now() - since[gone], Door::least_time) << gone;
  }
}

// Those that have had it make room: else silent strangers would keep all others out.
TEST_F(CrowdedDoor, StrangersThatHadTheirTimeMakeRoom) {
  Door door(parent, listener);
  for (uint32_t i = 0; i < 14; ++i) add_strangers(door, 50, stranger + 256 + i);
  Fd guest = connect(far_away);
  await_challenge(door, guest);  // comes when there is room
  EXPECT_TRUE(enters(door, std::move(guest)));
}

// What waits there wakes nobody, so that a flood costs a look from time to time.
TEST_F(CrowdedDoor, StrangersWakeNobody) {
  Door door(parent, listener);
  std::vector<pollfd> polls;
  add_strangers(door, 10);
  door.add_polls(polls, true);
  EXPECT_EQ(polls.size(), 11u);
  add_strangers(door, 100);
  polls.clear();
  door.add_polls(polls, true);
  EXPECT_TRUE(polls.empty());
}

// Somebody between two leaders says something for one of them: nobody has died, and no rank is to blame. Both say so.
TEST_F(FormTree, AFrameThatIsForgedBlamesTheLink) {
  auto guest = form(1), host = form(0);
  auto of_guest = guest.get(), of_host = host.get();
  Rank rank;
  auto seat = create_lone_seat(0, 2, rank.waiter, rank.failure);
  NodeLeader leader(*seat, plan(0), std::move(of_host), open_leader_listener("127.0.0.1"));
  tree::VerdictMessage lie{};
  lie.accusation = accuse_rank(Verdict::failed, 1, "a lie");
  const auto forged = write_frame(static_cast<uint32_t>(lie.kind), tree::bytes_of(lie));
  for (int i = 0; i < 2; ++i) ::send(of_guest.at(0).socket().get(), forged.data(), forged.size(), MSG_NOSIGNAL);
  for (int i = 0; i < 300 && !seat->control.accused(); ++i) leader.run(-1, 10);
  for (int i = 0; i < 3; ++i) leader.run(-1, 1);
  ASSERT_TRUE(seat->control.accused());
  const Accusation verdict = seat->control.verdict();
  EXPECT_EQ(verdict.rank, -1);
  EXPECT_TRUE(verdict.copy_text().starts_with("host a (node 0) cannot hear host b (node 1): what came was not said by"))
      << verdict.copy_text();
  EXPECT_EQ(transport::error_of(verdict, 0).status, FSDP_PEER_FAILED);
  while (const auto frame = of_guest.at(0).receive(soon())) {
    const auto told = tree::as<tree::VerdictMessage>(*frame);
    if (!told) continue;
    EXPECT_EQ(told->accusation.copy_text(), verdict.copy_text());
    return;
  }
  ADD_FAILURE() << "the other leader is not told: " << of_guest.at(0).problem();
}

}  // namespace
}  // namespace fsdp::transport::test
