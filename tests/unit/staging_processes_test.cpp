// SPDX-License-Identifier: Apache-2.0
// Ranks are processes, each with its own simulated GPU. They share pinned memory of the host, and the death of one ends
// the others. It is a program of its own, because it must fork before it has any thread.
#include <gtest/gtest.h>
#include <signal.h>

#include "staging_bodies.h"

namespace fsdp::transport::test {
namespace {

TEST(StagingProcesses, EveryCollectiveHasTheBitsOfTheHost) {
  const auto processes = start_processes(
      3, [](Rank &rank) { same_bits(rank, 0, 1, 3); }, on_gpu());
  EXPECT_EQ(await_processes(processes), std::vector<int>(3, 0));
}

TEST(StagingProcesses, ADeathEndsTheOthersWithinASecond) {
  const Body body = [](Rank &rank) {
    TwoWays ways(rank);
    const uint64_t count = 20'000, from = ways.take(count * 12), to = ways.take(count * 4);
    const Sum span = slice_sum(ways.at(from), count, 3, ways.part() + to);
    rank.meet();
    if (rank.rank() == 1) ::raise(SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    const Error error = error_of([&] {
      ways.communicator->sum({&span, 1}, false, {1, "alone"}, *ways.stream);
      rank.synchronize(*ways.stream);
    });
    require(error.status == FSDP_PEER_FAILED && error.rank == 1, error.message);
    require(seconds_since(start) < patience_seconds, "the death was seen late");
  };
  EXPECT_EQ(await_processes(start_processes(3, body, on_gpu())), (std::vector<int>{0, -SIGKILL, 0}));
}

}  // namespace
}  // namespace fsdp::transport::test
