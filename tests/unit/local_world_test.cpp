// SPDX-License-Identifier: Apache-2.0
// Ranks as threads: collectives, gates, exchanges, arenas, the end of rounds, and failures.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "shm_bodies.h"

namespace fsdp::comm::test {
namespace {

using namespace std::chrono_literals;

void expect_well(const std::vector<std::string> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

void run_round(Bench &bench, bool whole) {
  bench.communicator->barrier({1, "first"}, *bench.stream);
  if (whole) bench.communicator->barrier({2, "second"}, *bench.stream);
  bench.communicator->quiesce();
}

class Sizes : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(LocalWorld, Sizes, testing::Values(1, 2, 3, 4, 8));

TEST_P(Sizes, Collectives) { expect_well(run_threads(GetParam(), collectives_body)); }
TEST_P(Sizes, Exchanges) { expect_well(run_threads(GetParam(), exchange_body)); }
TEST_P(Sizes, Gates) { expect_well(run_threads(GetParam(), gate_body)); }
TEST_P(Sizes, CollectivesOnTheCallingThread) {
  RankOptions options;
  options.device.overlap = false;
  expect_well(run_threads(GetParam(), collectives_body, options));
}

TEST_P(Sizes, ManyInFlight) {
  expect_well(run_threads(GetParam(), [](Rank &rank) {
    Bench bench(rank);
    for (int step = 0; step < 5; ++step) {
      Ticket last;
      for (int i = 0; i < 200; ++i) last = bench.communicator->barrier({1, "many"}, *bench.stream);
      bench.communicator->await_release(last, *bench.stream);
      rank.synchronize(*bench.stream);
      require(bench.communicator->released(last), "awaited, but not released");
    }
    rank.leave();
  }));
}

TEST(LocalWorld, DelaysDoNotMatter) {
  RankOptions options;
  options.device.delay_us = 300;
  expect_well(run_threads(3, collectives_body, options));
}

TEST(LocalWorld, TeamsOfSomeRanks) {
  expect_well(run_threads(4, [](Rank &rank) {
    const std::vector<uint32_t> mine = rank.rank() % 2 ? std::vector<uint32_t>{3, 1} : std::vector<uint32_t>{0, 2};
    rank.team = rank.world->create_team(mine, "half");
    require(rank.team->size() == 2 && mine[rank.team->rank()] == rank.rank(), "rank in the team");
    require(rank.team->world_rank(1) == mine[1], "rank of the job");
    const uint32_t self = rank.rank();
    uint32_t all[2];
    rank.team->exchange_fixed(&self, sizeof self, all, "ranks");
    require(all[0] == mine[0] && all[1] == mine[1], "order of the team");
    auto gate = rank.team->create_gate("half gate");
    gate->arrive(1);
    gate->await(1, "half gate");
    rank.make_team();
    rank.leave();
  }));
}

TEST(Arena, ShowsAndProtects) {
  expect_well(run_threads(2, [](Rank &rank) {
    const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint32_t me = rank.rank();
    // Ranges that share a page, are out of order and empty.
    const std::vector<Range> ranges = {{3 * page + me * 100, 100}, {me * page / 2, page / 2}, {5 * page, 0}};
    auto arena = rank.team->create_arena(6 * page + 5, ranges, "pages");
    require(arena->size_bytes() == 6 * page + 5, "size as asked for");
    std::memset(arena->writable() + me * page / 2, static_cast<int>(me + 1), page / 2);
    std::memset(arena->writable() + 3 * page + me * 100, static_cast<int>(me + 11), 100);
    rank.meet();
    require(arena->data()[page / 4] == std::byte{1} && arena->data()[page - 1] == std::byte{2}, "the shared page");
    require(arena->data()[3 * page] == std::byte{11} && arena->data()[3 * page + 199] == std::byte{12},
            "the fourth page");
    require(arena->data()[6 * page + 4] == std::byte{0}, "zero at first");
    const auto readable = [&](uint64_t offset) {  // a system call answers EFAULT where a read would end the process
      int pipe[2];
      require(::pipe(pipe) == 0, "pipe");
      const bool yes = ::write(pipe[1], arena->data() + offset, 1) == 1;
      ::close(pipe[0]);
      ::close(pipe[1]);
      return yes;
    };
    arena->protect(page - 1, 2 * page + 2, false);
    require(readable(page - 1) && !readable(page) && !readable(3 * page - 1) && readable(3 * page),
            "whole pages inside");
    arena->protect(page - 1, 2 * page + 2, true);
    require(readable(page), "given back");
    rank.leave();
  }));
}

TEST(Arena, FailedAllocationIsAnErrorOnAllRanks) {
  expect_well(run_threads(3, [](Rank &rank) {
    const Range own{0, 4096};
    const Error huge = error_of([&] { rank.team->create_arena(uint64_t{1} << 50, std::span(&own, 1), "huge"); });
    require(huge.status == FSDP_OUT_OF_MEMORY && huge.rank == 0, huge.message);
    Bench bench(rank);
    check_everything(bench, 3);
    rank.leave();
  }));
}

TEST(Arena, CountedAllocationFailsOnAllRanks) {
  std::atomic<uint32_t> next{0};
  auto job = create_local_job(3);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      RankOptions options;
      options.device.failed_allocation = r == 1 ? 2 : 0;
      Rank rank(options);
      rank.world = create_local_world(job, r, rank.waiter, rank.failure, *rank.device);
      rank.make_team();
      Stripes first(rank, 4096, "first");
      const Error error = error_of([&] { Stripes(rank, 4096, "second"); });
      EXPECT_EQ(error.status, FSDP_OUT_OF_MEMORY) << error.message;
      EXPECT_EQ(error.rank, 1);
      Stripes third(rank, 4096, "third");
      EXPECT_FALSE(rank.failure.failed());
      rank.leave();
      ++next;
    });
  for (auto &thread : threads) thread.join();
  EXPECT_EQ(next, 3U);
}

size_t entries(const char *path) {
  size_t count = 0;
  for ([[maybe_unused]] const auto &entry : std::filesystem::directory_iterator(path)) ++count;
  return count;
}

size_t shared_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:fsdp") != std::string::npos;
  return count;
}

TEST(LocalWorld, GivesEverythingBack) {
  expect_well(run_threads(2, collectives_body));  // what the C library keeps
  const size_t files = entries("/proc/self/fd"), tasks = entries("/proc/self/task"), shm = entries("/dev/shm");
  EXPECT_EQ(shared_mappings(), 0U);
  for (int i = 0; i < 3; ++i) expect_well(run_threads(4, collectives_body));
  run_threads(3, [](Rank &rank) {
    Bench bench(rank);
    if (rank.rank() == 1) throw std::runtime_error("gives up");
    rank.meet();
  });
  EXPECT_EQ(shared_mappings(), 0U);
  EXPECT_EQ(entries("/proc/self/fd"), files);
  EXPECT_EQ(entries("/proc/self/task"), tasks);
  EXPECT_EQ(entries("/dev/shm"), shm);
}

// ---- rounds ----

TEST(Rounds, AnEarlyEndIsAMismatchThatNamesTheRank) {
  expect_well(run_threads(3, [](Rank &rank) {
    Bench bench(rank);
    run_round(bench, rank.rank() != 1);
    rank.synchronize(*bench.stream);
    const auto broken = bench.communicator->broken();
    if (rank.rank() == 1) {
      require(!broken, "the early rank did all that it began");
    } else {
      require(broken && broken->status == FSDP_MISMATCH && broken->rank == 1, broken ? broken->message : "not broken");
      require(broken->message ==
                  "rank 1 finished the step without barrier of 'second' (#1): it made 1 of the 2 calls made here",
              broken->message);
    }
    require(!rank.failure.failed(), "the context has not failed");
    rank.meet();
    bench.communicator->next_round();
    rank.meet();
    check_everything(bench, 4);
    require(!bench.communicator->broken(), "a new round is not broken");
    rank.leave();
  }));
}

TEST(Rounds, AbandonSkipsWhatCannotComplete) {
  expect_well(run_threads(4, [](Rank &rank) {
    Bench bench(rank);
    for (int round = 0; round < 20; ++round) {
      const bool quitter = rank.rank() == static_cast<uint32_t>(round) % 4;
      Ticket last;
      for (int i = 0; i < (quitter ? 3 : 40); ++i) {
        std::vector<GatherSpan> spans;
        last = bench.communicator->all_gather(spans, {7, "gathered"}, *bench.stream);
      }
      bench.communicator->await_release(last, *bench.stream);
      if (quitter)
        bench.communicator->abandon();
      else
        bench.communicator->quiesce();
      rank.synchronize(*bench.stream);
      const auto broken = bench.communicator->broken();
      if (!quitter) {
        require(broken && broken->status == FSDP_INVALID_STATE, broken ? broken->message : "not broken");
        require(broken->rank == round % 4, broken->message);
      }
      require(bench.communicator->released(last), "a skipped round releases");
      rank.meet();
      bench.communicator->next_round();
      rank.meet();
      check_reduce_scatter(bench, static_cast<uint64_t>(round), FSDP_FLOAT32);
      require(!bench.communicator->broken(), "a new round is not broken");
      bench.communicator->quiesce();
      rank.meet();
      bench.communicator->next_round();
      rank.meet();
    }
    rank.leave();
  }));
}

// ---- failures ----

struct Seen {
  Error error{FSDP_OK, ""};
  double seconds = 0;
};

// The error of each rank's body.
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

TEST(Failure, AbortWakesEverybody) {
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

TEST(Failure, WhoDestroysItsWorldIsNamed) {
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

TEST(Failure, WhoLeftInGoodOrderIsNamedByWhoWaitsForIt) {
  const auto seen = failing_threads(2, [](Rank &rank) {
    auto gate = rank.team->create_gate("gate");
    rank.meet();
    if (rank.rank() == 1)
      rank.world->leave();
    else
      gate->await(1, "await of version 1");
  });
  EXPECT_EQ(seen[0].error.status, FSDP_PEER_FAILED);
  EXPECT_EQ(seen[0].error.message, "await of version 1: rank 1 has closed its context");
  EXPECT_EQ(seen[1].error.status, FSDP_OK);
}

TEST(Failure, TimeoutNamesWhoHasNotCome) {
  RankOptions options;
  options.timeout_ms = 300;
  const auto seen = failing_threads(
      4,
      [](Rank &rank) {
        Bench bench(rank);
        rank.meet();
        if (rank.rank() == 0 || rank.rank() == 3)
          bench.finish(bench.communicator->barrier({17, "layer.3"}, *bench.stream));
        else
          std::this_thread::sleep_for(700ms);
        rank.meet();
      },
      options);
  for (uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(seen[r].error.status, FSDP_TIMEOUT);
    EXPECT_EQ(seen[r].error.rank, 1);
    EXPECT_EQ(seen[r].error.message, "barrier of 'layer.3' (#0): ranks 1, 2 have not come within 300 ms");
    EXPECT_LT(seen[r].seconds, 3);
  }
}

TEST(Failure, DifferentCollectivesAreNamed) {
  const auto seen = failing_threads(3, [](Rank &rank) {
    Bench bench(rank);
    float result[8];
    const ReduceSpan span{bench.in.at(0), FSDP_FLOAT32, FSDP_FLOAT32, rank.rank() == 1 ? 4U : 8U, result, 1.0F, false};
    bench.finish(bench.communicator->reduce_scatter(std::span(&span, 1), {3, "a"}, *bench.stream));
    rank.meet();
  });
  for (uint32_t r = 0; r < 3; ++r) {
    EXPECT_EQ(seen[r].error.status, FSDP_MISMATCH) << seen[r].error.message;
    EXPECT_NE(seen[r].error.message.find("rank 1 called reduce_scatter of 'a' (#0, float32, 12 elements)"),
              std::string::npos)
        << seen[r].error.message;
    EXPECT_NE(seen[r].error.message.find("called reduce_scatter of 'a' (#0, float32, 24 elements)"), std::string::npos);
    EXPECT_LT(seen[r].seconds, 2);
  }
}

TEST(Failure, DifferentExchangesAreNamed) {
  const auto seen = failing_threads(2, [](Rank &rank) {
    uint64_t value = 0, all[2];
    rank.team->exchange_fixed(&value, sizeof value, all, rank.rank() ? "norm" : "seal");
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
        auto gate = rank.team->create_gate("gate");
        Bench bench(rank);
        rank.meet();
        if (rank.rank() == 1) {
          std::this_thread::sleep_for(100ms);
          stop = true;
          while (stop) std::this_thread::sleep_for(1ms);
          bench.finish(bench.communicator->barrier({1, "b"}, *bench.stream));
          gate->arrive(1);
        } else {
          const Ticket ticket = bench.communicator->barrier({1, "b"}, *bench.stream);
          const Error error = error_of([&] { gate->await(1, "gate"); });
          stop = false;
          require(error.status == FSDP_INTERRUPTED, error.message);
          gate->arrive(1);
          gate->await(1, "gate");
          bench.finish(ticket);
        }
        rank.leave();
      },
      options);
  for (const Seen &of : seen) EXPECT_EQ(of.error.status, FSDP_OK) << of.error.message;
  EXPECT_EQ(wrong_thread, 0);
}

TEST(LocalWorld, RefusesNonsense) {
  EXPECT_EQ(error_of([] { create_local_job(0); }).status, FSDP_INVALID_ARGUMENT);
  EXPECT_EQ(error_of([] { create_local_job(100'000); }).status, FSDP_UNSUPPORTED);
  auto job = create_local_job(2);
  Rank rank;
  EXPECT_EQ(error_of([&] { create_local_world(job, 2, rank.waiter, rank.failure, *rank.device); }).status,
            FSDP_INVALID_ARGUMENT);
  rank.world = create_local_world(job, 0, rank.waiter, rank.failure, *rank.device);
  EXPECT_EQ(error_of([&] { create_local_world(job, 0, rank.waiter, rank.failure, *rank.device); }).status,
            FSDP_INVALID_ARGUMENT);
  for (const std::vector<uint32_t> &ranks : {std::vector<uint32_t>{0, 0}, {1}, {0, 5}, {}})
    EXPECT_EQ(error_of([&] { rank.world->create_team(ranks, "t"); }).status, FSDP_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace fsdp::comm::test
