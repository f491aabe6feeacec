// SPDX-License-Identifier: Apache-2.0
// Leaders that connect to each other: a connection that ends on the way is made again.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <thread>

#include "comm/nodes/form.h"

namespace fsdp::comm::test {
namespace {

using namespace std::chrono_literals;

class FormMesh : public testing::Test {
 protected:
  void SetUp() override {
    std::string problem;
    listener = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 16);
    ASSERT_TRUE(listener) << std::strerror(errno);
    others = listen_at(Endpoint::numeric("127.0.0.1", 0, problem).at(0), 16);
    ASSERT_TRUE(others) << std::strerror(errno);
  }
  // Of two nodes with a rank each.
  MeshPlan plan(uint32_t rank, uint32_t forming_ms = 5000) const {
    MeshPlan plan;
    plan.rank = rank;
    plan.node_of = {0, 1};
    plan.nodes = {{0, "a", Endpoint::local(listener).text()}, {1, "b", Endpoint::local(others).text()}};
    plan.secret = "secret";
    plan.job = "job";
    plan.forming_ms = forming_ms;
    return plan;
  }
  std::future<std::vector<Stream>> form(uint32_t rank, uint32_t forming_ms = 5000) {
    return std::async(std::launch::async,
                      [=, this] { return form_mesh(plan(rank, forming_ms), rank ? others : listener, waiter); });
  }
  // The next connection, which then ends.
  void hang_up() {
    Fd accepted;
    while (!(accepted = accept_from(listener))) std::this_thread::sleep_for(1ms);
  }

  Failure failure;
  Waiter waiter{failure, nullptr, nullptr, 10'000};
  Fd listener, others;
};

TEST_F(FormMesh, ConnectsAgain) {
  auto guest = form(1);
  hang_up();
  hang_up();
  auto host = form(0);
  const auto of_guest = guest.get(), of_host = host.get();
  ASSERT_TRUE(of_guest.at(0) && of_host.at(1));
  EXPECT_TRUE(of_guest[0].open() && of_host[1].open());
}

// It does not take a connection for made that the other end has dropped.
TEST_F(FormMesh, SaysWhyItNeverCould) {
  auto guest = form(1, 500);
  std::atomic<bool> over{false};
  std::thread host([&] {
    while (!over) {
      const Fd dropped = accept_from(listener);
      std::this_thread::sleep_for(1ms);
    }
  });
  try {
    guest.get();
    ADD_FAILURE() << "it connected";
  } catch (const Error &error) {
    EXPECT_EQ(error.status, FSDP_PEER_FAILED);
    EXPECT_EQ(error.rank, 0);
    EXPECT_NE(error.message.find("rank 0 (leader of node 0, host a) did not connect while the job formed"),
              error.message.npos) << error.message;
  }
  over = true;
  host.join();
}

}  // namespace
}  // namespace fsdp::comm::test
