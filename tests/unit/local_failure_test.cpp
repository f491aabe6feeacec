// SPDX-License-Identifier: Apache-2.0
// Ranks fail as threads. All ranks report which rank failed, and how.
#include <gtest/gtest.h>

#include <atomic>
#include <latch>

#include "shm_bodies.h"

namespace fsdp::transport::test {
namespace {

using namespace std::chrono_literals;

struct Seen {
  Error error{FSDP_OK, ""};
  double seconds = 0;
};

// Returns the error of each rank's body.
std::vector<Seen> failing_threads(uint32_t size, const Body &body, const RankOptions &options = {}) {
  std::vector<Seen> seen(size);
  run_threads(
      size,
      [&](Rank &rank) {
        const auto start = std::chrono::steady_clock::now();
        Seen &mine = seen[rank.rank()];
        mine.error = error_of([&] { body(rank); });
        mine.seconds = seconds_since(start);
      },
      options);
  return seen;
}

TEST(Failure, AbortWakesAllRanks) {
  const auto seen = failing_threads(4, [](Rank &rank) {
    Bench bench(rank);
    if (rank.rank() == 2) {
      std::this_thread::sleep_for(50ms);
      rank.world->abort("enough");
    } else if (rank.rank() == 1) {
      bench.finish(bench.communicator->barrier({1, "b"}, *bench.stream));
    } else if (rank.rank() == 0) {
      bench.communicator->barrier({1, "b"}, rank.device->caller_stream(nullptr));
    }
    rank.meet();
  });
  for (uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(seen[r].error.status, r == 2 ? FSDP_ABORTED : FSDP_PEER_FAILED);
    EXPECT_EQ(seen[r].error.rank, 2);
    EXPECT_EQ(seen[r].error.message, "rank 2 aborted: enough");
    EXPECT_LT(seen[r].seconds, 3);
  }
}

TEST(Failure, ARankThatDestroysItsWorldIsNamed) {
  const auto seen = failing_threads(3, [](Rank &rank) {
    if (rank.rank() == 1) {
      rank.team.reset();
      rank.world.reset();
      rank.world = create_local_world(create_local_job(1), 0, rank.waiter, rank.failure, *rank.device);
      return;
    }
    rank.meet();
  });
  for (const uint32_t r : {0, 2}) {
    EXPECT_EQ(seen[r].error.status, FSDP_PEER_FAILED) << seen[r].error.message;
    EXPECT_EQ(seen[r].error.rank, 1);
    EXPECT_LT(seen[r].seconds, 3);
  }
}

TEST(Failure, ARankThatLeftInGoodOrderIsNamedByRanksThatWaitForIt) {
  const auto seen = failing_threads(2, [](Rank &rank) {
    auto versions = rank.team->create_versions("weights");
    rank.meet();
    if (rank.rank() == 1)
      rank.world->leave();
    else
      versions->await(1, rank.device->calling_thread(), "await of version 1");
  });
  EXPECT_EQ(seen[0].error.status, FSDP_PEER_FAILED);
  EXPECT_EQ(seen[0].error.message, "await of version 1: rank 1 has closed its context");
  EXPECT_EQ(seen[1].error.status, FSDP_OK);
}

// The version misses rank 1's caller, not a stream of that rank.
TEST(Failure, ARankThatWaitsElsewhereIsMissedByRanksThatAwaitItsVersion) {
  const auto seen = failing_threads(3, [](Rank &rank) {
    auto versions = rank.team->create_versions("weights");
    const auto writer = rank.device->create_stream("writer");
    rank.meet();
    if (rank.rank() == 1) return rank.meet();
    versions->publish(1, *writer);
    versions->await(1, rank.device->calling_thread(), "await of version 1");
  });
  for (const Seen &of : seen) {
    EXPECT_EQ(of.error.status, FSDP_MISMATCH) << of.error.message;
    EXPECT_NE(of.error.message.find("(await of version 1), rank 1 is in"), of.error.message.npos) << of.error.message;
    EXPECT_NE(of.error.message.find("they wait for each other"), of.error.message.npos) << of.error.message;
    EXPECT_LT(of.seconds, 5);
  }
}

TEST(Failure, TimeoutNamesTheRankThatHasNotCome) {
  RankOptions options;
  options.timeout_ms = 3000;
  std::latch over(2);
  const auto seen = failing_threads(
      4,
      [&over](Rank &rank) {
        Bench bench(rank);
        rank.meet();
        if (rank.rank() == 0 || rank.rank() == 3) {
          const Error error = error_of([&] {
            // One rank waits on its own thread, because if both streams were late, their callers would time out first.
            if (rank.rank() == 0)
              bench.communicator->barrier({17, "layer.3"}, rank.device->caller_stream(nullptr));
            else
              bench.finish(bench.communicator->barrier({17, "layer.3"}, *bench.stream));
          });
          over.count_down();
          throw error;
        }
        over.wait();
        rank.meet();
      },
      options);
  for (uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(seen[r].error.status, FSDP_TIMEOUT);
    EXPECT_EQ(seen[r].error.rank, 1);
    EXPECT_EQ(seen[r].error.message, "barrier of 'layer.3' (#0): ranks 1, 2 have not come within 3000 ms");
    EXPECT_LT(seen[r].seconds, 7);
  }
}

// Rank 0 misses rank 1, which misses rank 2. Hosts that meet in circles usually miss a host that itself waits.
TEST(Failure, TimeoutNamesTheLateRankAndNotTheOneThatWaits) {
  RankOptions options;
  options.timeout_ms = 3000;
  std::latch over(2);
  const auto seen = failing_threads(
      3,
      [&over](Rank &rank) {
        const uint32_t lower[] = {0, 1}, higher[] = {1, 2};
        std::unique_ptr<Team> first, second;
        if (rank.rank() < 2) first = rank.world->create_team(lower, "lower");
        if (rank.rank() > 0) second = rank.world->create_team(higher, "higher");
        rank.meet();
        const Error error = error_of([&] {
          if (rank.rank() == 0) first->barrier("the lower ranks");
          std::this_thread::sleep_for(1s);
          if (rank.rank() == 1) second->barrier("the higher ranks");
        });
        if (rank.rank() < 2) over.count_down();
        over.wait();
        if (error.status != FSDP_OK) throw error;
        rank.meet();
      },
      options);
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(seen[r].error.status, FSDP_TIMEOUT);
    EXPECT_EQ(seen[r].error.rank, 2) << seen[r].error.message;
    EXPECT_EQ(seen[r].error.message, "the lower ranks: rank 1 has not come within 3000 ms: it waits for rank 2");
    EXPECT_LT(seen[r].seconds, 7);
  }
}

TEST(Failure, DifferentCollectivesAreNamed) {
  const auto seen = failing_threads(3, [](Rank &rank) {
    Bench bench(rank);
    float result[8];
    const Sum span = slice_sum(bench.in.at(0), rank.rank() == 1 ? 4U : 8U, rank.size(), result);
    bench.finish(bench.communicator->sum(std::span(&span, 1), false, {3, "a"}, *bench.stream));
    rank.meet();
  });
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(seen[r].error.status, FSDP_MISMATCH) << seen[r].error.message;
    EXPECT_NE(seen[r].error.message.find("rank 1 called reduce_scatter of 'a' (#0, float32, 12 elements)"),
              std::string::npos)
        << seen[r].error.message;
    EXPECT_NE(seen[r].error.message.find("called reduce_scatter of 'a' (#0, float32, 24 elements)"), std::string::npos);
    EXPECT_LT(seen[r].seconds, 5);
  }
}

TEST(Failure, DifferentExchangesAreNamed) {
  const auto seen = failing_threads(2, [](Rank &rank) {
    uint64_t value = 0, all[2];
    rank.team->all_gather(&value, sizeof value, all, rank.rank() ? "norm" : "seal");
  });
  for (const Seen &of : seen) {
    EXPECT_EQ(of.error.status, FSDP_MISMATCH);
    EXPECT_EQ(of.error.message, "rank 0 called 'seal' (8 bytes), rank 1 called 'norm' (8 bytes)");
  }
}

TEST(Failure, AFailedContextIsNamedToItsPeers) {
  const auto seen = failing_threads(3, [](Rank &rank) {
    if (rank.rank() == 0) {
      auto stream = rank.device->create_stream("broken");
      stream->run([] { throw Error(FSDP_SYSTEM, "the disk is gone"); });
      try {
        rank.synchronize(*stream);
      } catch (const Error &) {
      }
    }
    rank.meet();
  });
  EXPECT_EQ(seen[0].error.status, FSDP_SYSTEM);
  for (const uint32_t r : {1, 2}) {
    EXPECT_EQ(seen[r].error.status, FSDP_PEER_FAILED);
    EXPECT_EQ(seen[r].error.rank, 0);
    EXPECT_EQ(seen[r].error.message, "rank 0 failed: the disk is gone");
  }
}

TEST(Failure, TheHookInterruptsAWaitOfTheCallerOnly) {
  static std::atomic<bool> stop;
  static std::atomic<int> wrong_thread;
  stop = false;
  wrong_thread = 0;
  thread_local bool is_caller = false;
  RankOptions options;
  options.hook = [](void *) -> int32_t {
    if (!is_caller) ++wrong_thread;
    return stop;
  };
  const auto seen = failing_threads(
      2,
      [](Rank &rank) {
        is_caller = true;
        auto versions = rank.team->create_versions("weights");
        device::Stream &thread = rank.device->calling_thread();
        Bench bench(rank);
        rank.meet();
        if (rank.rank() == 1) {
          std::this_thread::sleep_for(100ms);
          stop = true;
          while (stop) std::this_thread::sleep_for(1ms);
          bench.finish(bench.communicator->barrier({1, "b"}, *bench.stream));
          versions->publish(1, thread);
        } else {
          const Ticket ticket = bench.communicator->barrier({1, "b"}, *bench.stream);
          const Error error = error_of([&] { versions->await(1, thread, "version 1"); });
          stop = false;
          require(error.status == FSDP_INTERRUPTED, error.message);
          versions->publish(1, thread);
          versions->await(1, thread, "version 1");
          bench.finish(ticket);
        }
        rank.leave();
      },
      options);
  for (const Seen &of : seen) EXPECT_EQ(of.error.status, FSDP_OK) << of.error.message;
  EXPECT_EQ(wrong_thread, 0);
}

}  // namespace
}  // namespace fsdp::transport::test
