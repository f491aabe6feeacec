// SPDX-License-Identifier: Apache-2.0
// Tests failures of NCCL. No call waits for ever, and the error names the cause.
#include "nccl_bench.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

TEST_F(NcclTest, AnInitialisationThatHangsEndsOnAllRanks) {
  control().set(Knob::hang_init_rank, 2);
  const auto start = std::chrono::steady_clock::now();
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) { Bench bench(mine); });
  EXPECT_LT(seconds_since(start), 8);
  for (const Error &error : problems) {
    EXPECT_EQ(error.status, FSDP_TIMEOUT) << error.message;
    EXPECT_TRUE(has(error, "NCCL communicator 'gather' of 2 ranks")) << error.message;
    EXPECT_TRUE(has(error, "ncclCommInitRankConfig of NCCL 2.32.3 was still in progress after 3000 ms"))
        << error.message;
  }
  EXPECT_EQ(control().count(Count::aborts), 2);
}

TEST_F(NcclTest, ARankThatDoesNotComeIsNamed) {
  const auto problems = run_ranks({2, 3000}, [](NcclRank &mine) {
    if (mine.rank() == 0) Bench bench(mine);
    // This rank must not leave before the other one has given up.
    const auto start = std::chrono::steady_clock::now();
    while (!mine.failure.failed() && seconds_since(start) < 20) std::this_thread::sleep_for(1ms);
  });
  EXPECT_EQ(problems[0].status, FSDP_TIMEOUT) << problems[0].message;
  EXPECT_EQ(problems[0].rank, 1);
}

TEST_F(NcclTest, AnAsynchronousErrorFailsTheContextAndFreesTheGpu) {
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    mine.synchronize(*bench.stream);
    mine.meet();
    if (mine.rank() == 1) {
      control().set(Knob::async_error_rank, 2);
      control().set(Knob::async_error, 6);
    } else {
      bench.gather();
    }
    while (!mine.failure.failed()) std::this_thread::sleep_for(1ms);
    expect_freed(mine, *bench.stream, 1);
    mine.failure.check();
  });
  EXPECT_EQ(problems[1].status, FSDP_PEER_FAILED) << problems[1].message;
  EXPECT_EQ(problems[1].origin, FSDP_ORIGIN_NCCL);
  EXPECT_EQ(problems[1].origin_code, 6);
  EXPECT_TRUE(has(problems[1], "a link went down (simulated)")) << problems[1].message;
  EXPECT_TRUE(has(problems[1], "rank 1: ncclCommGetAsyncError returned 6, \"remote process exited"))
      << problems[1].message;
  EXPECT_EQ(problems[0].rank, 1) << problems[0].message;
}

TEST_F(NcclTest, AFailureFreesAGpuThatWaits) {
  control().set(Knob::hang_collective, 1);
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    mine.meet();
    mine.fail_with_all();
    expect_freed(mine, *bench.stream, 1);
    EXPECT_TRUE(has(error_of([&] { bench.gather(); }), "the test aborts"));
  });
  expect_well(problems);
  EXPECT_EQ(control().count(Count::aborts), 2);
}

TEST_F(NcclTest, AnAbortThatTakesLongHoldsNoCallerUp) {
  control().set(Knob::hang_collective, 1);
  control().set(Knob::abort_ms, 5000);
  run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    mine.meet();
    mine.fail_with_all();
    std::this_thread::sleep_for(100ms);  // the guard is inside the abort
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(has(error_of([&] { bench.gather(); }), "the test aborts"));
    EXPECT_TRUE(bench.communicator->released(Ticket{1}));
    EXPECT_LT(seconds_since(start), 3.5);
  });
}

TEST_F(NcclTest, ACollectiveThatDoesNotEndIsATimeout) {
  control().set(Knob::hang_collective, 2);
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    const auto start = std::chrono::steady_clock::now();
    while (!mine.failure.failed() && seconds_since(start) < 10) std::this_thread::sleep_for(1ms);
    expect_freed(mine, *bench.stream, 1);
    mine.failure.check();
  });
  const bool timed_out = has(problems[0], "all_gather of 'layer.3' (#0, 4096 bytes)") ||
                         has(problems[1], "all_gather of 'layer.3' (#0, 4096 bytes)");
  EXPECT_TRUE(timed_out) << problems[0].message << '\n' << problems[1].message;
}

// Waiting for the caller's own slow work is no timeout.
TEST_F(NcclTest, SlowIsNotStuck) {
  expect_well(run_ranks({2, 3000}, [](NcclRank &mine) {
    Bench bench(mine);
    const auto own = mine.device->create_stream("slow");
    const auto event = mine.device->create_event();
    mine.meet();
    {
      const simulated::Hold hold;
      own->fill(bench.pool->data(), 1, 16);
      own->record(*event);
      bench.stream->wait(*event);
      bench.gather();
      std::this_thread::sleep_for(4000ms);
    }
    mine.synchronize(*bench.stream);
  }));
}

TEST_F(NcclTest, APeerThatFailsIsNamedWhileTheGpuWaits) {
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 1) fail(FSDP_SYSTEM, "rank 1 has had enough");
    bench.gather();
    const auto start = std::chrono::steady_clock::now();
    while (!mine.failure.failed() && seconds_since(start) < 10) std::this_thread::sleep_for(1ms);
    EXPECT_LT(seconds_since(start), 5);
    expect_freed(mine, *bench.stream, 1);
    mine.failure.check();
  });
  EXPECT_EQ(problems[0].status, FSDP_PEER_FAILED) << problems[0].message;
  EXPECT_EQ(problems[0].rank, 1);
  EXPECT_TRUE(has(problems[0], "rank 1 has had enough")) << problems[0].message;
}

TEST_F(NcclTest, APeerThatHasLeftIsNamedWhileTheGpuWaits) {
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    {
      Bench bench(mine);
      mine.meet();
      if (mine.rank() == 0) {
        bench.gather();
        const auto start = std::chrono::steady_clock::now();
        while (!mine.failure.failed() && seconds_since(start) < 10) std::this_thread::sleep_for(1ms);
        expect_freed(mine, *bench.stream, 1);
        mine.failure.check();
      }
    }
    mine.world->leave();
  });
  EXPECT_EQ(problems[0].status, FSDP_PEER_FAILED) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "all_gather of 'layer.3' (#0, 4096 bytes): rank 1 has closed its context"))
      << problems[0].message;
}

TEST_F(NcclTest, RanksThatEnqueuedDifferentThingsLearnOfItAtTheEndOfTheRound) {
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    if (mine.rank() == 1) bench.gather();
    bench.communicator->quiesce();
    const Error error = error_of([&] { bench.communicator->next_round(); });
    expect_freed(mine, *bench.stream, 1);
    throw error;
  });
  for (const Error &error : problems) {
    EXPECT_EQ(error.status, FSDP_MISMATCH) << error.message;
    EXPECT_TRUE(has(error, "the last all_gather of 'layer.3' (#1, 4096 bytes)")) << error.message;
  }
}

// All ranks discard a step, however far each of them had come.
TEST_F(NcclTest, WhatAllRanksAbandonIsAbortedAndMadeAnew) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    const auto other = mine.team->create_collectives("reduce");
    const auto reduces = mine.device->create_stream("reduce");
    for (int round = 0; round < 3; ++round) {
      bench.gather();
      if (mine.rank() == 1) bench.gather();
      if (mine.rank() == 0) other->barrier({2, "end"}, *reduces);
      bench.communicator->abandon();
      bench.communicator->next_round();
      expect_freed(mine, *bench.stream, 1);
      std::memset(bench.arena->writable() + mine.rank() * Bench::part, static_cast<int>(10 * round + mine.rank()),
                  Bench::part);
      bench.gather();
      other->barrier({2, "end"}, *reduces);
      mine.synchronize(*bench.stream);
      mine.synchronize(*reduces);
      EXPECT_EQ(mine.read<uint8_t>(bench.pool->data() + Bench::part, 1)[0], 10 * round + 1);
      bench.communicator->quiesce();
      bench.communicator->next_round();
    }
  }));
  EXPECT_EQ(control().count(Count::aborts), 12);
}

TEST_F(NcclTest, NothingComesAfterQuiesce) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.communicator->quiesce();
    EXPECT_EQ(error_of([&] { bench.gather(); }).status, FSDP_INTERNAL);
    bench.communicator->next_round();
    bench.gather();
    mine.synchronize(*bench.stream);
  }));
}

TEST_F(NcclTest, ACommunicatorDestroyedWithWorkInFlightFailsItsContext) {
  control().set(Knob::hang_collective, 1);
  const auto problems = run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    bench.gather();
    const auto start = std::chrono::steady_clock::now();
    bench.communicator.reset();
    EXPECT_LT(seconds_since(start), 5);
    expect_freed(mine, *bench.stream, 1);
    mine.failure.check();
  });
  const bool said = has(problems[0], "destroyed with work in flight: all_gather of 'layer.3'") ||
                    has(problems[1], "destroyed with work in flight: all_gather of 'layer.3'");
  EXPECT_TRUE(said) << problems[0].message << '\n' << problems[1].message;
}

}  // namespace
}  // namespace fsdp::transport::test
