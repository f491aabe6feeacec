// SPDX-License-Identifier: Apache-2.0
// Tests ranks as threads: collectives, versions, exchanges, arenas, and the end of rounds.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/mapping.h"
#include "shm_bodies.h"

namespace fsdp::transport::test {
namespace {

void expect_well(const std::vector<std::string> &problems) {
  for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
}

void run_round(Bench &bench, bool whole) {
  bench.communicator->barrier({1, "first"}, *bench.stream);
  if (whole) bench.communicator->barrier({2, "second"}, *bench.stream);
  bench.communicator->quiesce();
}

class LocalSizes : public testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(LocalWorld, LocalSizes, testing::Values(1, 2, 3, 4, 8));

TEST_P(LocalSizes, CollectivesOfThreadsHaveTheRightBytes) { expect_well(run_threads(GetParam(), collectives_body)); }
TEST_P(LocalSizes, ExchangesOfThreadsHaveTheRightBytes) { expect_well(run_threads(GetParam(), exchange_body)); }
TEST_P(LocalSizes, VersionsOfThreadsAreAwaited) { expect_well(run_threads(GetParam(), versions_body)); }
TEST_P(LocalSizes, CollectivesOnTheCallingThread) {
  RankOptions options;
  options.device.overlap = false;
  expect_well(run_threads(GetParam(), collectives_body, options));
}

TEST_P(LocalSizes, ManyCollectivesMayBeInFlight) {
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
    rank.team->all_gather(&self, sizeof self, all, "ranks");
    require(all[0] == mine[0] && all[1] == mine[1], "order of the team");
    auto versions = rank.team->create_versions("of a half");
    versions->publish(1, rank.device->calling_thread());
    versions->await(1, rank.device->calling_thread(), "version 1 of a half");
    rank.make_team();
    rank.leave();
  }));
}

// Callers that have published wait for each other's writers, but not for each other. No rank passes before every writer
// has done its earlier work.
TEST_P(LocalSizes, WritersMayBeLateWithAVersion) {
  std::vector<uint64_t> done(GetParam(), 0);  // it is not atomic, because the version makes it visible
  expect_well(run_threads(GetParam(), [&done](Rank &rank) {
    auto versions = rank.team->create_versions("late");
    const auto writer = rank.device->create_stream("late");
    for (uint64_t version = 1; version <= 2; ++version) {
      writer->run([&mine = done[rank.rank()], version] {
        std::this_thread::sleep_for(std::chrono::milliseconds(700));
        mine = version;
      });
      versions->publish(version, *writer);
      versions->await(version, rank.device->calling_thread(), "a late version");
      for (uint64_t r = 0; r < done.size(); ++r)
        require(done[r] == version, fmt::format("at {} rank {}'s writer is at {}", version, r, done[r]));
      rank.meet();  // so that no rank goes on while others still read
    }
    rank.leave();
  }));
}

TEST(Arena, ShowsAndProtects) {
  expect_well(run_threads(2, [](Rank &rank) {
    const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    const uint32_t me = rank.rank();
    // The ranges share a page, are out of order, and some are empty.
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
    if (!views_are_protected) return rank.leave();
    const auto readable = [&](uint64_t offset) {  // a system call returns EFAULT where a read would end the process
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

TEST(LocalWorld, GivesEverythingBack) {
  // Makes the C library allocate the memory that it keeps.
  expect_well(run_threads(2, collectives_body));
  const Holdings before = Holdings::without_threads();
  EXPECT_EQ(before.mappings, 0U);
  for (int i = 0; i < 3; ++i) expect_well(run_threads(4, collectives_body));
  run_threads(3, [](Rank &rank) {
    Bench bench(rank);
    if (rank.rank() == 1) throw std::runtime_error("gives up");
    rank.meet();
  });
  EXPECT_EQ(Holdings::await(before).text(), before.text());
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
        std::vector<Gather> spans;
        last = bench.communicator->gather(spans, {7, "gathered"}, *bench.stream);
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

TEST(LocalWorld, RefusesInvalidArguments) {
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
}  // namespace fsdp::transport::test
