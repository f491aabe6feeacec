// SPDX-License-Identifier: Apache-2.0
// Tests leaders that connect in a tree. If a connection ends during this, it is made again.
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "membership/tree/dial.h"
#include "membership/tree/leader.h"
#include "membership/tree/message.h"
#include "membership/wire/handshake.h"
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
  // Plans two nodes with one rank each.
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
  // Accepts the next connection, and reads up to the guest's hello.
  FrameStream hear_hello() {
    Fd accepted = next_connection();
    StreamKeys keys;
    const std::string problem = prove(accepted, Role::host, "secret", "libfsdp node link job", soon(), &keys);
    if (!problem.empty()) throw Error(FSDP_PEER_FAILED, problem);
    FrameStream stream(std::move(accepted), tree::longest, keys);
    const auto frame = stream.receive(soon());
    if (!frame || !tree::as<tree::LinkHello>(*frame)) throw Error(FSDP_PEER_FAILED, "no hello has come");
    return stream;
  }
  // Forms the host, too, and expects the links of both.
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
  next_connection();  // the connection ends at once
  next_connection();
  expect_links(guest);
}

// The guest has sent its hello, but does not yet count as connected.
TEST_F(FormTree, ConnectsAgainUntilItIsAnswered) {
  auto guest = form(1);
  hear_hello();  // the connection ends after the hello
  expect_links(guest);
}

TEST_F(FormTree, SaysWhatAnotherJobAnswers) {
  auto guest = form(1);
  FrameStream host = hear_hello();
  const tree::LinkHello other{tree::version, 0, 3, 3, tree::native_order, tree::Bond::tree};
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

// A process between two leaders sends a frame in the name of one of them. Both leaders say that no rank has died and
// none is to blame.
TEST_F(FormTree, AFrameThatIsForgedBlamesTheLink) {
  auto guest = form(1), host = form(0);
  auto of_guest = guest.get(), of_host = host.get();
  Rank rank;
  auto seat = create_lone_seat(0, 2, rank.waiter, rank.failure);
  NodeLeader leader(*seat, plan(0), std::move(of_host), open_leader_listener("127.0.0.1"));
  const Verdict lie{accuse_rank(FailureKind::failed, 1, "a lie")};
  const auto forged = write_frame(Verdict::kind, tree::bytes_of(lie));
  for (int i = 0; i < 2; ++i) ::send(of_guest.at(0).socket().get(), forged.data(), forged.size(), MSG_NOSIGNAL);
  for (int i = 0; i < 300 && !seat->control.accused(); ++i) leader.run(-1, 10);
  for (int i = 0; i < 3; ++i) leader.run(-1, 1);
  ASSERT_TRUE(seat->control.accused());
  const Accusation verdict = seat->control.verdict();
  EXPECT_EQ(verdict.rank, -1);
  EXPECT_TRUE(verdict.text.copy().starts_with("host a (node 0) cannot hear host b (node 1): what came was not said by"))
      << verdict.text.copy();
  EXPECT_EQ(transport::error_of(verdict, 0).status, FSDP_PEER_FAILED);
  while (const auto frame = of_guest.at(0).receive(soon())) {
    const auto told = tree::as<Verdict>(*frame);
    if (!told) continue;
    EXPECT_EQ(told->accusation.text.copy(), verdict.text.copy());
    return;
  }
  ADD_FAILURE() << "the other leader is not told: " << of_guest.at(0).problem();
}

}  // namespace
}  // namespace fsdp::transport::test
