// SPDX-License-Identifier: Apache-2.0
// Tests launches on the calling thread over a communicator that blocks. A caller that waits in NCCL for peers is freed
// like one whose GPU waits for them.
#include <atomic>

#include "nccl_bench.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

void wait_for_failure(NcclRank &mine, double max_seconds) {
  const auto start = std::chrono::steady_clock::now();
  while (!mine.failure.failed() && seconds_since(start) < max_seconds) std::this_thread::sleep_for(1ms);
}

// NCCL starts a thread for each launch of a communicator that does not block. NCCL's variables override configurations,
// and a value that is no number counts as 0. Before 2.26.2 an abort would destroy a launch of the calling thread while
// it runs.
TEST_F(NcclTest, LaunchesStartNoThread) {
  struct Case {
    const char *variable, *value;
    int64_t version;
    bool threads;
  };
  for (const Case &of :
       {Case{nullptr, nullptr, 0, false}, Case{nullptr, nullptr, 22602, false}, Case{nullptr, nullptr, 22501, true},
        Case{"FSDP_NCCL_BLOCKING", "0", 0, true}, Case{"NCCL_COMM_BLOCKING", "0", 0, true},
        Case{"NCCL_COMM_BLOCKING", "true", 0, true}, Case{"NCCL_COMM_BLOCKING", "2", 0, false},
        Case{"NCCL_COMM_SPLIT_SHARE_RESOURCES", "0", 0, true}, Case{"NCCL_COMM_SPLIT_SHARE_RESOURCES", "2", 0, true},
        Case{"NCCL_COMM_SPLIT_SHARE_RESOURCES", "1", 0, false}}) {
    SetUp();
    control().set(Knob::version, of.version);
    if (of.variable) ::setenv(of.variable, of.value, 1);
    expect_well(run_ranks({2}, [](NcclRank &mine) {
      Bench bench(mine);
      for (int i = 0; i < 3; ++i) bench.gather();
      mine.synchronize(*bench.stream);
    }));
    EXPECT_EQ(control().count(Count::launches), 6);
    EXPECT_EQ(control().count(Count::launch_threads), of.threads ? 6 : 0)
        << (of.variable ? of.variable : "") << of.version;
    EXPECT_EQ(control().count(Count::finished), 2);
  }
}

TEST_F(NcclTest, CommunicatorsThatBlockWhileTheyAreMadeAreRefused) {
  for (const char *value : {"1", "0x1"}) {
    ::setenv("NCCL_COMM_BLOCKING", value, 1);
    for (const Error &error : run_ranks({2}, [](NcclRank &) {})) {
      EXPECT_EQ(error.status, FSDP_UNSUPPORTED) << error.message;
      EXPECT_TRUE(has(error, "rank 0 has NCCL_COMM_BLOCKING=1")) << error.message;
    }
  }
}

// Only its caller aborts it.
TEST_F(NcclTest, ALaunchThatWaitsForPeersInNcclIsATimeout) {
  const auto problems = run_ranks({2, 3000}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 0) {
      control().set(Knob::hang_launch, 1);
      const auto start = std::chrono::steady_clock::now();
      const Error error = error_of([&] { bench.gather(); });
      EXPECT_GT(seconds_since(start), 2.9);
      EXPECT_LT(seconds_since(start), 6);
      throw error;
    }
    wait_for_failure(mine, 10);
  });
  EXPECT_EQ(problems[0].status, FSDP_TIMEOUT) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "all_gather of 'layer.3' (#0, 4096 bytes)")) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "in NCCL, which connects them")) << problems[0].message;
}

// ... and sooner if it is known that the peer does not come.
TEST_F(NcclTest, APeerThatHasLeftIsNamedWhileTheCallerIsInNccl) {
  const auto problems = run_ranks({2, 20'000}, [](NcclRank &mine) {
    {
      Bench bench(mine);
      mine.meet();
      if (mine.rank() == 0) {
        control().set(Knob::hang_launch, 1);
        const auto start = std::chrono::steady_clock::now();
        const Error error = error_of([&] { bench.gather(); });
        EXPECT_LT(seconds_since(start), 8);
        throw error;
      }
    }
    mine.world->leave();
  });
  EXPECT_EQ(problems[0].status, FSDP_PEER_FAILED) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "rank 1 has closed its context")) << problems[0].message;
}

// The GPU waits for the peer, its stream fills up, and CUDA blocks the caller in a launch until there is room.
TEST_F(NcclTest, ACallerWhoseStreamIsFullIsFreed) {
  const auto problems = run_ranks({2, 3000}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      const Error error = error_of([&] {
        for (int i = 0; i < 3000; ++i) bench.gather();
      });
      EXPECT_LT(seconds_since(start), 8);
      expect_freed(mine, *bench.stream, 1);
      throw error;
    }
    wait_for_failure(mine, 10);
  });
  EXPECT_EQ(problems[0].status, FSDP_TIMEOUT) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "all_gather of 'layer.3' (#0, 4096 bytes)")) << problems[0].message;
}

// The caller's own slow work may keep a stream full. The wait for room is then longer than a wait for peers.
TEST_F(NcclTest, AFullStreamThatIsSlowIsNotStuck) {
  constexpr uint32_t pieces_before = 1;
  expect_well(run_ranks({2, 3000}, [](NcclRank &mine) {
    Bench bench(mine);
    const auto own = mine.device->create_stream("slow");
    const auto event = mine.device->create_event();
    mine.meet();
    simulated::set_stream_delay(static_cast<cudaStream_t>(own->handle()), 1'500'000);  // each consists of three pieces
    own->fill(bench.pool->data(), 1, 16);
    own->record(*event);
    bench.stream->wait(*event);
    // A gather is four pieces of work, and the piece that finds no room must be its launch.
    for (uint32_t i = 0; i < pieces_before; ++i) bench.stream->fill(bench.pool->data(), 1, 16);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 400; ++i) bench.gather();
    EXPECT_GT(seconds_since(start), 4) << "nothing was full";
    mine.synchronize(*bench.stream);
  }));
}

// The calls are many steps ahead of the GPU. The call that the GPU executes is still known, and is named.
TEST_F(NcclTest, AGpuThatIsFarBehindIsSeenToBeStuck) {
  const auto problems = run_ranks({2, 3000}, [](NcclRank &mine) {
    Bench bench(mine);
    if (mine.rank() == 0)
      for (int i = 0; i < 200; ++i) bench.gather();
    const auto start = std::chrono::steady_clock::now();
    wait_for_failure(mine, 10);
    EXPECT_LT(seconds_since(start), 8);
    mine.failure.check();
  });
  EXPECT_EQ(problems[0].status, FSDP_TIMEOUT) << problems[0].message;
  EXPECT_TRUE(has(problems[0], "all_gather of 'layer.3' (#0, 4096 bytes)")) << problems[0].message;
}

// The caller gets the error that failed the context, and not NCCL's error from the abort.
TEST_F(NcclTest, ACallerInNcclHearsTheCause) {
  for (const bool blocking : {true, false}) {
    if (!blocking) ::setenv("FSDP_NCCL_BLOCKING", "0", 1);
    const auto problems = run_ranks({2}, [](NcclRank &mine) {
      Bench bench(mine);
      mine.meet();
      if (mine.rank() == 0) control().set(Knob::hang_launch, 1);
      mine.meet();
      std::thread fails([&] {
        std::this_thread::sleep_for(200ms);
        mine.failure.set(Error(FSDP_ABORTED, "the test aborts"));
      });
      const auto start = std::chrono::steady_clock::now();
      const Error error = error_of([&] {
        bench.gather();
        mine.synchronize(*bench.stream);
      });
      EXPECT_LT(seconds_since(start), 5);
      fails.join();
      throw error;
    });
    for (const Error &error : problems) EXPECT_TRUE(has(error, "the test aborts")) << error.message;
  }
}

TEST_F(NcclTest, ASplitThatARankDoesNotComeToIsATimeout) {
  control().set(Knob::hang_split_rank, 2);
  const auto start = std::chrono::steady_clock::now();
  for (const Error &error : run_ranks({2, 4000}, [](NcclRank &mine) { Bench bench(mine); }))
    EXPECT_TRUE(has(error, "ncclCommSplit of NCCL")) << error.message;
  EXPECT_LT(seconds_since(start), 8);
  EXPECT_EQ(control().count(Count::aborts), 2);
}

TEST_F(NcclTest, ACommunicatorThatIsBeingSplitIsAborted) {
  control().set(Knob::hang_split_rank, 2);
  std::atomic<bool> all = false;  // these exist; some of them may have ended since
  for (const Error &error : run_ranks({2}, [&](NcclRank &mine) {
         std::thread fails([&] {
           const auto start = std::chrono::steady_clock::now();
           while (!all && seconds_since(start) < 10) {
             std::this_thread::sleep_for(1ms);
             if (control().count(Count::communicators) == 4) all = true;
           }
           mine.failure.set(Error(FSDP_ABORTED, "the test aborts"));
         });
         const Error error = error_of([&] { Bench bench(mine); });
         fails.join();
         throw error;
       }))
    EXPECT_TRUE(has(error, "the test aborts")) << error.message;
}

}  // namespace
}  // namespace fsdp::transport::test
