// SPDX-License-Identifier: Apache-2.0
// Tests messages between ranks of one host: results, mismatches, the end of rounds, and a rank that dies.
#include <gtest/gtest.h>

#include <csignal>

#include "message_bodies.h"

namespace fsdp::transport::test {
namespace {

void expect_well(const std::vector<std::string> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

void all_messages(Rank &rank) {
  MessageBench bench(rank);
  check_messages(bench, 0, odd_counts);
  end_round(bench);
  check_messages(bench, 1000, {5, 65'538});
  rank.leave();
}

class StagedSizes : public testing::TestWithParam<uint32_t> {};
#ifdef __SANITIZE_THREAD__
INSTANTIATE_TEST_SUITE_P(StagedMessages, StagedSizes,
                         testing::Values(2, 4));  // as many threads as there is something to race
#else
INSTANTIATE_TEST_SUITE_P(StagedMessages, StagedSizes, testing::Values(1, 2, 3, 4, 8));
#endif

TEST_P(StagedSizes, AreThePlainSums) { expect_well(run_threads(GetParam(), all_messages)); }
TEST_P(StagedSizes, AreThePlainSumsOnTheCallingThread) {
  RankOptions options;
  options.device.overlap = false;
  expect_well(run_threads(GetParam(), all_messages, options));
}

TEST(StagedMessages, DelaysDoNotMatter) {
  RankOptions options;
  options.device.delay_us = 300;
  expect_well(run_threads(3, all_messages, options));
}

TEST(StagedMessages, CountsWhatOthersGet) {
  expect_well(run_threads(4, [](Rank &rank) {
    std::vector<float> values(400);
    MessageBench bench(rank);
    const Sum span = everywhere_in_place(values.data(), values.size());
    bench.communicator->sum(std::span(&span, 1), false, {1, "a"}, *bench.stream);
    bench.finish();
    require(bench.communicator->sent_bytes() == 2 * 300 * sizeof(float),
            fmt::format("{} bytes", bench.communicator->sent_bytes()));
    rank.leave();
  }));
}

// The lengths of the parts matter, not only their sum, because ranks would otherwise add different elements.
TEST(StagedMessages, DifferentCallsAreNamed) {
  std::vector<Error> seen(3, Error(FSDP_OK, ""));
  run_threads(3, [&](Rank &rank) {
    seen[rank.rank()] = error_of([&] {
      std::vector<float> values(300'000);
      MessageBench bench(rank);
      const uint64_t count = rank.rank() == 2 ? 200'001 : 200'000;
      const Sum span = everywhere_in_place(values.data(), count);
      bench.communicator->sum(std::span(&span, 1), false, {3, "outer"}, *bench.stream);
      bench.finish();
      rank.meet();
    });
  });
  for (const Error &error : seen) {
    EXPECT_EQ(error.status, FSDP_MISMATCH) << error.message;
    EXPECT_EQ(error.rank, 2) << error.message;
    EXPECT_NE(error.message.find("rank 2 called all_reduce of 'outer' (#0, float32, 200001 elements)"),
              std::string::npos)
        << error.message;
    EXPECT_NE(error.message.find("called all_reduce of 'outer' (#0, float32, 200000 elements)"), std::string::npos)
        << error.message;
  }
}

TEST(StagedMessages, DifferentSplitsOfTheSameSumAreAMismatch) {
  std::vector<Error> seen(2, Error(FSDP_OK, ""));
  run_threads(2, [&](Rank &rank) {
    seen[rank.rank()] = error_of([&] {
      std::vector<float> values(100);
      MessageBench bench(rank);
      const uint64_t first = rank.rank() ? 60 : 40;
      const Sum spans[] = {everywhere_in_place(values.data(), first),
                           everywhere_in_place(values.data() + first, 100 - first)};
      bench.communicator->sum(spans, false, {3, "outer"}, *bench.stream);
      bench.finish();
      rank.meet();
    });
  });
  for (const Error &error : seen) {
    EXPECT_EQ(error.status, FSDP_MISMATCH) << error.message;
    EXPECT_EQ(error.rank, 1) << error.message;
  }
}

TEST(StagedMessages, AbandonInTheMiddle) {
  expect_well(run_threads(3, [](Rank &rank) {
    MessageBench bench(rank);
    abandon_in_the_middle(bench, 6, std::chrono::microseconds(300));
    rank.leave();
  }));
}

TEST(StagedMessages, AnEarlyEndIsAMismatch) {
  expect_well(run_threads(3, [](Rank &rank) {
    std::vector<float> values(1000);
    MessageBench bench(rank);
    const Sum span = everywhere_in_place(values.data(), values.size());
    for (int i = 0; i < (rank.rank() == 1 ? 1 : 2); ++i)
      bench.communicator->sum(std::span(&span, 1), false, {1, "outer"}, *bench.stream);
    bench.communicator->quiesce();
    bench.finish();
    const auto broken = bench.communicator->broken();
    if (rank.rank() != 1) require(broken && broken->status == FSDP_MISMATCH && broken->rank == 1, "no mismatch");
    rank.leave();
  }));
}

TEST(StagedMessages, ADeadRankIsNamed) {
  const auto codes = await_processes(start_processes(3, [](Rank &rank) {
    std::vector<float> values(4'000'000, 1.0F);
    MessageBench bench(rank);
    const Sum span = everywhere_in_place(values.data(), values.size());
    auto start = std::chrono::steady_clock::now();
    const Error error = error_of([&] {
      for (int i = 0; i < 2'000; ++i) {
        start = std::chrono::steady_clock::now();
        bench.communicator->sum(std::span(&span, 1), false, {1, "long"}, *bench.stream);
        if (rank.rank() == 1 && i == 3) ::kill(::getpid(), SIGKILL);  // its stream is inside a call
        bench.finish();
      }
    });
    require(error.status == FSDP_PEER_FAILED && error.rank == 1, error.message);
    require(seconds_since(start) < patience_seconds, "the death was noticed late");
  }));
  EXPECT_EQ(codes, (std::vector<int>{0, -SIGKILL, 0}));
}

}  // namespace
}  // namespace fsdp::transport::test
