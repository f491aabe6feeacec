// SPDX-License-Identifier: Apache-2.0
// Ranks over simulated GPUs make different calls, or end. Errors name both calls or the rank, the GPU's streams go on,
// and everything that is still usable is used again.
#include <gtest/gtest.h>

#include "simulated_cuda/simulated.h"
#include "staging_bodies.h"

namespace fsdp::transport::test {
namespace {

struct StagingFailureTest : testing::Test {
  void SetUp() override { simulated::set_device_count(simulated::max_devices); }
  static void run(uint32_t size, const Body &body, const device::Options &device = {}) {
    for (const std::string &problem : run_threads(size, body, on_gpu(device))) EXPECT_EQ(problem, "");
  }
};

// Returns whether the stream ends its work, whether the context has failed or not.
void require_end(TwoWays &ways) {
  auto event = ways.rank.device->create_event();
  ways.stream->record(*event);
  const auto start = std::chrono::steady_clock::now();
  while (!event->done()) {
    require(seconds_since(start) < patience_seconds, "a stream of the GPU waits for ever");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Error await_failure(Rank &rank) {
  const auto start = std::chrono::steady_clock::now();
  while (!rank.failure.failed()) {
    require(seconds_since(start) < patience_seconds, "no failure");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return *rank.failure.get();
}

void reduce(TwoWays &ways, uint64_t count, const char *name) {
  const uint64_t from = ways.take(count * ways.size() * 4), to = ways.take(count * 4);
  const Sum span = slice_sum(ways.at(from), count, ways.size(), ways.part() + to);
  ways.communicator->sum({&span, 1}, false, {1, name}, *ways.stream);
}

void require_text(const Error &error, const std::string &text) {
  require(error.message.find(text) != std::string::npos, fmt::format("'{}' lacks '{}'", error.message, text));
}

// Calls of several chunks are named as one call, by their own number and length.
TEST_F(StagingFailureTest, DifferentLengthsAreAMismatchThatNamesBothCalls) {
  run(3, [](Rank &rank) {
    TwoWays ways(rank);
    reduce(ways, 9000, "same");
    reduce(ways, rank.rank() == 2 ? 9001 : 9000, "other");
    const Error error = await_failure(rank);
    require(error.status == FSDP_MISMATCH && error.rank == 2, error.message);
    require_text(error, "called reduce_scatter of 'other' (#1, float32, 27000 elements)");
    require_text(error, "rank 2 called reduce_scatter of 'other' (#1, float32, 27003 elements)");
    require_end(ways);
  });
}

TEST_F(StagingFailureTest, DifferentOperationsAreAMismatchThatNamesBothCalls) {
  run(2, [](Rank &rank) {
    TwoWays ways(rank);
    if (rank.rank() == 0)
      reduce(ways, 100, "a");
    else
      ways.communicator->barrier({7, "b"}, *ways.stream);
    const Error error = await_failure(rank);
    require(error.status == FSDP_MISMATCH && error.rank == 1, error.message);
    require_text(error, "reduce_scatter of 'a' (#0");
    require_text(error, "barrier of 'b' (#0)");
    require_end(ways);
  });
}

TEST_F(StagingFailureTest, ARankThatAbortsEndsTheOthers) {
  run(3, [](Rank &rank) {
    TwoWays ways(rank);
    rank.meet();
    if (rank.rank() == 1) {
      rank.world->abort("it gave up");
    } else {
      reduce(ways, 20'000, "alone");
      require_text(await_failure(rank), "it gave up");
    }
    require_end(ways);
  });
}

// The context fails on one rank, for example in another stream. Its own calls end, and those of its peers end when it
// leaves.
TEST_F(StagingFailureTest, AContextThatFailsEndsItsStreamsAndThenThoseOfItsPeers) {
  run(2, [](Rank &rank) {
    TwoWays ways(rank);
    rank.meet();
    if (rank.rank() == 0) {
      rank.failure.set(Error(FSDP_SYSTEM, "something else broke"));
      const Error error = error_of([&] { reduce(ways, 200'000, "alone"); });
      require(error.status == FSDP_OK || error.status == FSDP_SYSTEM, error.message);
    } else {
      reduce(ways, 20'000, "alone");
    }
    require_end(ways);
    if (rank.rank() == 1) require(rank.failure.failed() || ways.communicator->broken(), "an end without a reason");
  });
}

TEST_F(StagingFailureTest, AnAbandonedRoundEndsAndTheNextOneWorks) {
  run(3, [](Rank &rank) {
    {
      TwoWays ways(rank);
      if (rank.rank() != 1) reduce(ways, 20'000, "unfinished");
      if (rank.rank() == 1) ways.communicator->abandon();
      require_end(ways);
      if (rank.rank() != 1) {
        require(ways.communicator->broken()->status == FSDP_INVALID_STATE, "the round is broken");
        require_text(*ways.communicator->broken(), "rank 1 discarded the step");
      }
      rank.failure.check();
      rank.meet();  // a rank that abandons the round after it broke must not be named by one that looks later
      ways.communicator->abandon();
      rank.meet();
      ways.communicator->next_round();
      rank.meet();
      ways.used = 0;
      for (uint64_t seed = 1; seed < 3; ++seed) every_collective(ways, seed);
    }
    rank.leave();
  });
}

TEST_F(StagingFailureTest, ARankThatFinishedEarlyIsNamed) {
  run(2, [](Rank &rank) {
    {
      TwoWays ways(rank);
      if (rank.rank() == 0) reduce(ways, 20'000, "one too many");
      ways.communicator->quiesce();
      require_end(ways);
      if (rank.rank() == 0) {
        require(ways.communicator->broken()->status == FSDP_MISMATCH, "the round is broken");
        require_text(*ways.communicator->broken(),
                     "rank 1 finished the step without reduce_scatter of 'one too many' (#0");
      }
      rank.failure.check();
      rank.meet();
    }
    rank.leave();
  });
}

// A peer's gather cannot end when this rank has none: no later call asks whether a gather broke, so the context fails.
TEST_F(StagingFailureTest, AGatherThatAPeerLeavesFailsTheContext) {
  run(2, [](Rank &rank) {
    auto ways = std::make_unique<TwoWays>(rank);
    rank.meet();
    if (rank.rank() == 1) {
      ways->communicator.reset();
    } else {
      const Gather span{ways->at(0), ways->part() + 1024, 512};
      ways->communicator->gather_stable({&span, 1}, {1, "left alone"}, *ways->stream);
      const Error error = await_failure(rank);
      require_text(error, "all_gather of 'left alone'");
      require_text(error, "rank 1");
    }
    require_end(*ways);
  });
}

// Every allocation of a creation fails in turn. The creation fails on all ranks, and the next attempt works.
TEST_F(StagingFailureTest, AFailedAllocationFailsTheCreationOnAllRanks) {
  for (uint64_t nth = 1; nth <= 4; ++nth)
    run(2,
        [](Rank &rank) {
          {
            auto host = std::shared_ptr<Team>(std::shared_ptr<void>(), rank.team.get());
            staging::StagedTeam team(host, *rank.device, small_sizes);
            uint32_t failures = 0;
            const auto attempt = [&](auto &&create) {
              const Error error = error_of(create);
              if (error.status == FSDP_OK) return;
              require(error.status == FSDP_OUT_OF_MEMORY && ++failures == 1, error.message);
              create();
            };
            std::unique_ptr<Arena> arena;
            std::unique_ptr<Collectives> communicator;
            std::unique_ptr<Collectives> messages;
            attempt([&] { arena = team.create_parts(4096, "parts", View::read_only); });
            attempt([&] { communicator = team.create_collectives("collectives", {}); });
            attempt([&] { messages = team.create_collectives("messages", Shape::messages()); });
            require(failures == 1, "no allocation failed");
            auto stream = rank.device->create_stream("test");
            const Gather span{Part::in(*arena, 0, 4096, rank.rank()), arena->writable() + rank.rank() * 4096 + 1024,
                              512};
            communicator->gather({&span, 1}, {1, "after a failure"}, *stream);
            rank.synchronize(*stream);
            rank.meet();
          }
          rank.leave();
        },
        {.failed_allocation = nth});
}

TEST_F(StagingFailureTest, MemoryThatCannotBePinnedFailsTheCreationOnAllRanks) {
  simulated::fail_call("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  run(2, [](Rank &rank) {
    {
      auto host = std::shared_ptr<Team>(std::shared_ptr<void>(), rank.team.get());
      staging::StagedTeam team(host, *rank.device, small_sizes);
      const Error error = error_of([&] { team.create_collectives("collectives", {}); });
      require(error.status == FSDP_OUT_OF_MEMORY, error.message);
      require(error.origin == FSDP_ORIGIN_CUDA, "the origin is CUDA");
      require_text(error, "cudaHostRegister");
      require(team.create_collectives("collectives", {}) != nullptr, "the next attempt");
      rank.meet();
    }
    rank.leave();
  });
}

TEST_F(StagingFailureTest, MemoryThatRanksWouldShareIsUnsupported) {
  run(2, [](Rank &rank) {
    auto host = std::shared_ptr<Team>(std::shared_ptr<void>(), rank.team.get());
    staging::StagedTeam team(host, *rank.device, small_sizes);
    require(error_of([&] { team.create_arena(4096, {}, "whole", View::read_only); }).status == FSDP_UNSUPPORTED,
            "an arena that is shared");
    require(!team.create_versions("messages"), "where gathers meet nobody waits for a version");
    rank.leave();
  });
}

}  // namespace
}  // namespace fsdp::transport::test
