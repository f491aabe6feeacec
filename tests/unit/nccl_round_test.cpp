// SPDX-License-Identifier: Apache-2.0
// Tests the agreement of ranks that give up a step, and how communicators are replaced if their work cannot end.
#include "nccl_bench.h"
#include "transport/nccl/connection.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

// A capture that fails on some ranks leaves the model as it was.
TEST_F(NcclTest, WhatOneRankCapturesIsNoDifference) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 0) {
      const GatherGraph graph(mine, bench);
    }
    EXPECT_TRUE(mine.team->ends_alike());
    bench.gather();
    mine.synchronize(*bench.stream);
    EXPECT_TRUE(mine.team->ends_alike());
  }));
}

// Each communicator has the same collectives, and on the GPUs they wait for each other.
TEST_F(NcclTest, TheOrderBetweenCommunicatorsIsCompared) {
  for (const int64_t version : {22907, 23203}) {  // ordered by events, and by NCCL
    control().set(Knob::version, version);
    expect_well(run_ranks({2}, [](NcclRank &mine) {
      Bench bench(mine);
      const auto other = mine.team->create_collectives("reduce");
      const auto reduces = mine.device->create_stream("reduce");
      for (int round = 0; round < 2; ++round) {
        if (mine.rank() == 0) bench.gather();
        other->barrier({2, "end"}, *reduces);
        if (mine.rank() == 1) bench.gather();
        EXPECT_FALSE(mine.team->ends_alike());
        mine.team->cut();
        mine.team->renew();
        expect_freed(mine, *bench.stream, 1);
        expect_freed(mine, *reduces, 1);
        bench.gather();
        other->barrier({2, "end"}, *reduces);
        mine.synchronize(*bench.stream);
        mine.synchronize(*reduces);
        EXPECT_TRUE(mine.team->ends_alike());
      }
    }));
  }
}

// NCCL's links break when a peer aborts, and the peer may know earlier that ranks differ.
TEST_F(NcclTest, APeerThatAbortsFirstFailsNoRank) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 0) bench.gather();
    EXPECT_FALSE(mine.team->ends_alike());
    if (mine.rank() == 1) {
      control().set(Knob::async_error_rank, 2);
      control().set(Knob::async_error, 6);
      std::this_thread::sleep_for(200ms);
    }
    mine.team->cut();
    if (mine.rank() == 1) control().set(Knob::async_error, 0);
    mine.team->renew();
    bench.gather();
    mine.synchronize(*bench.stream);
  }));
}

TEST_F(NcclTest, AnErrorThatLastsIsBelievedAfterAnAgreement) {
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) {
    Bench bench(mine);
    EXPECT_TRUE(mine.team->ends_alike());
    if (mine.rank() == 1) {
      control().set(Knob::async_error_rank, 2);
      control().set(Knob::async_error, 6);
    }
    const auto start = std::chrono::steady_clock::now();
    while (!mine.failure.failed() && seconds_since(start) < 10) std::this_thread::sleep_for(1ms);
    mine.failure.check();
  });
  EXPECT_TRUE(has(problems[1], "a link went down (simulated)")) << problems[1].message;
}

// A destroyed graph keeps no object alive.
TEST_F(NcclTest, GraphsThatAreDestroyedDoNotKeepAStepFromBeingDiscarded) {
  expect_well(run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    { const GatherGraph graph(mine, bench); }
    if (mine.rank() == 0) bench.gather();
    EXPECT_FALSE(mine.team->ends_alike());
    mine.team->cut();
    mine.team->renew();
    bench.gather();
    mine.synchronize(*bench.stream);
  }));
}

// An abort also waits for the work on the caller's streams. The job's timeout limits that.
TEST_F(NcclTest, AnAbortHasThreeQuartersOfTheTimeout) {
  control().set(Knob::abort_ms, 6000);
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) {
    Bench bench(mine);
    mine.team->cut();
    mine.team->renew();
  });
  for (const Error &error : problems) {
    EXPECT_EQ(error.status, FSDP_TIMEOUT) << error.message;
    EXPECT_TRUE(has(error, "ncclCommAbort of NCCL communicator 'gather' has not returned within 3000 ms"))
        << error.message;
  }
}

TEST_F(NcclTest, AFailureEndsTheWaitForAnAbort) {
  control().set(Knob::abort_ms, 5000);
  run_ranks({2}, [](NcclRank &mine) {
    Bench bench(mine);
    mine.team->cut();
    mine.fail_with_all();
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(has(error_of([&] { mine.team->renew(); }), "the test aborts"));
    EXPECT_LT(seconds_since(start), 3.5);
  });
}

// The abort has found nothing to end. Without further care, a communicator that is made later would not be watched.
TEST_F(NcclTest, WhatIsAbortedBeforeItIsMadeIsNotMade) {
  expect_well(run_ranks({1}, [](NcclRank &mine) {
    nccl::Connection connection(nccl::load_library(), {"late", 1, 0}, *mine.device, mine.waiter);
    nccl::Handle::abort(connection.handle());
    ASSERT_TRUE(connection.handle()->await_end(5s));
    const Error error = error_of([&] { connection.join({}, 1000); });
    EXPECT_EQ(error.status, FSDP_INVALID_STATE) << error.message;
    EXPECT_TRUE(has(error, "NCCL communicator 'late' has ended") || has(error, "'late' has ended")) << error.message;
  }));
  EXPECT_EQ(control().count(Count::communicators), 0);
}

// A window's error has spoilt the first communicator. The second one, made in its place, never forms, and its threads
// belong to NCCL.
TEST_F(NcclTest, ACommunicatorThatCannotBeMadeAnewIsAborted) {
  ::setenv("FSDP_NCCL_BLOCKING", "0", 1);  // its error stays
  control().set(Knob::window_error, 1);
  control().set(Knob::hang_init_rank, 2);
  control().set(Knob::spared_inits, 2);
  const auto problems = run_ranks({2, 4000}, [](NcclRank &mine) { Bench bench(mine); });
  for (const Error &error : problems) EXPECT_EQ(error.status, FSDP_TIMEOUT) << error.message;
  EXPECT_EQ(control().count(Count::aborts), 4);
}

}  // namespace
}  // namespace fsdp::transport::test
