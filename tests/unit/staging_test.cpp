// SPDX-License-Identifier: Apache-2.0
// Tests ranks as threads over simulated GPUs. Staging gives the same bits as the host's communicators. The test shows
// order and bits, and nothing about hardware.
#include <gtest/gtest.h>

#include "device/cuda/kernels.h"
#include "simulated_cuda/simulated.h"
#include "staging_bodies.h"
#include "transport/staging/conveyor.h"

namespace fsdp::transport::test {
namespace {

struct StagingTest : testing::TestWithParam<uint32_t> {
  void SetUp() override { simulated::set_device_count(simulated::max_devices); }
  static void run(uint32_t size, const Body &body, const device::Options &device = {},
                  int gpus = simulated::max_devices) {
    for (const std::string &problem : run_threads(size, body, on_gpu(device, gpus))) EXPECT_EQ(problem, "");
  }
};

// A rank's moves to itself need no room. All ranks have as many chunks as the rank that has most.
TEST(MoveChunks, AreAsManyAsOneRankNeeds) {
  constexpr uint64_t room = uint64_t{16} << 10, mib = uint64_t{1} << 20;
  const auto count = [](const std::vector<Move> &moves) { return staging::MoveChunks(moves, room).count(2); };
  EXPECT_EQ(count({}), 0);
  EXPECT_EQ(count({{0, 1, 0, 2 * room + 1, nullptr}, {1, 0, 0, room, nullptr}}), 3);
  EXPECT_EQ(count({{1, 1, 0, 10 * mib, nullptr}, {1, 0, 0, 5, nullptr}}), 1);
  EXPECT_EQ(count(std::vector<Move>(2 * staging::max_pieces + 1, {1, 0, 0, 1, nullptr})), 3);
  EXPECT_EQ(count(std::vector<Move>(2 * staging::max_pieces + 1, {1, 1, 0, 1, nullptr})), 3);
}

TEST_P(StagingTest, EveryCollectiveHasTheBitsOfTheHost) {
  run(GetParam(), [](Rank &rank) { same_bits(rank, 0, 1, 6); });
}

TEST_P(StagingTest, SumsInBlocksHaveTheBitsOfTheHost) {
  run(GetParam(), [](Rank &rank) { same_bits(rank, 2, 100, 3); });
}

TEST_P(StagingTest, DelaysChangeNoBit) {
  simulated::set_delay(200, 7);
  device::Options options;
  options.delay_us = 200;
  options.delay_seed = 3;
  run(
      GetParam(), [](Rank &rank) { same_bits(rank, 0, 200, 2); }, options);
}

TEST_P(StagingTest, WithoutOverlapTheBitsAreTheSame) {
  device::Options options;
  options.overlap = false;
  run(
      GetParam(), [](Rank &rank) { same_bits(rank, 0, 300, 1); }, options);
}

TEST_P(StagingTest, RoundsBeginAgainBeforeTheyAreFull) {
  run(GetParam(), [](Rank &rank) {
    staging::ConveyorSizes sizes = small_sizes;
    sizes.chunks_of_round = 5;
    same_bits(rank, 0, 400, 2, sizes);
  });
}

// Work that waits in a queue blocks work of another rank's stream behind it, and it may be waiting for that rank's
// bytes.
TEST_P(StagingTest, RanksThatShareTheQueuesOfAGpuHaveTheBitsOfTheHost) {
  for (const uint64_t queues : {1, 8}) {
    simulated::set_queues(queues);
    run(
        GetParam(), [](Rank &rank) { same_bits(rank, 0, 500, 2); }, {}, 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, StagingTest, testing::Values(1, 2, 3, 4, 8));

// The calls have more chunks than may be in progress, on streams of different speeds. No slot is filled again before
// all ranks have taken its contents.
TEST_F(StagingTest, LongCallsPaceThemselves) {
  simulated::set_delay(100, 11);
  run(3, [](Rank &rank) {
    {
      TwoWays ways(rank, 0, {4096, 4096}, uint64_t{8} << 20);
      const uint64_t count = 30'000, bytes = 300'000;  // about 90 and 73 chunks
      const uint64_t from = ways.take(count * 3 * 4), to = ways.take(count * 4);
      const uint64_t piece = ways.take(bytes), whole = ways.take(3 * bytes);
      ways.fill(from, FSDP_FLOAT32, 3 * count, 1);
      ways.fill(piece, FSDP_FLOAT32, bytes / 4, 2);
      const Sum host = slice_sum(ways.host_at(from), count, 3, ways.host_part() + to),
                span = slice_sum(ways.at(from), count, 3, ways.part() + to);
      const Gather host_gather{ways.host_at(piece), ways.host_part() + whole, bytes};
      const Gather gather{ways.at(piece), ways.part() + whole, bytes};
      ways.communicator->sum({&span, 1}, false, {1, "long"}, *ways.stream);
      ways.communicator->gather({&gather, 1}, {1, "long"}, *ways.stream);
      ways.host->sum({&host, 1}, false, {1, "long"}, ways.host_stream());
      ways.host->await_release(ways.host->gather({&host_gather, 1}, {1, "long"}, ways.host_stream()),
                               ways.host_stream());
      ways.expect_equal(to, count * 4, "a long reduce_scatter");
      ways.expect_equal(whole, 3 * bytes, "a long all_gather");
      ways.finish();
    }
    rank.leave();
  });
}

// Work on the stream before a call is done before it, and work behind the call is done after it.
TEST_F(StagingTest, ACallKeepsItsPlaceOnTheStream) {
  run(2, [](Rank &rank) {
    {
      TwoWays ways(rank);
      const uint64_t bytes = 100'000, from = ways.take(bytes), to = ways.take(2 * bytes), copy = ways.take(2 * bytes);
      const Gather span{ways.at(from), ways.part() + to, bytes};
      for (uint8_t value = 1; value < 6; ++value) {
        ways.stream->fill(ways.part() + from, static_cast<uint8_t>(value + 10 * rank.rank()), bytes);
        ways.communicator->gather({&span, 1}, {1, "ordered"}, *ways.stream);
        ways.stream->copy(ways.part() + copy, ways.part() + to, 2 * bytes);
        ways.stream->fill(ways.part() + from, 99, bytes);
        ways.stream->fill(ways.part() + to, 98, 2 * bytes);
        std::vector<uint8_t> got(2 * bytes);
        ways.stream->copy(got.data(), ways.part() + copy, got.size());
        rank.synchronize(*ways.stream);
        for (uint64_t i = 0; i < got.size(); ++i)
          require(got[i] == value + 10 * (i / bytes), fmt::format("byte {} of gather {} is {}", i, value, got[i]));
      }
      rank.meet();
    }
    rank.leave();
  });
}

// The memory that a step needs exists from the start.
TEST_F(StagingTest, CallsAllocateNothing) {
  run(2, [](Rank &rank) {
    {
      TwoWays ways(rank);
      const uint64_t before = rank.device->allocations();
      every_collective(ways, 3);
      require(rank.device->allocations() == before, "a call allocated");
      rank.meet();
    }
    rank.leave();
  });
}

TEST_F(StagingTest, WhatIsAllocatedIsWhatIsSaid) {
  run(2, [](Rank &rank) {
    {
      auto host = std::shared_ptr<Team>(std::shared_ptr<void>(), rank.team.get());
      auto team = create_device_team(host, *rank.device, DeviceTransport::staging, rank.waiter, rank.failure);
      const uint64_t before = simulated::allocated_bytes();
      rank.meet();
      auto gather = team->create_collectives("gather"), reduce = team->create_collectives("reduce");
      rank.meet();
      // Two ranks and communicators have memory in which parts are summed, and memory for kernels of each of two
      // streams. The slots are memory of the host.
      const staging::ConveyorSizes sizes;
      require(simulated::allocated_bytes() - before ==
                  2 * 2 * (sizes.part_bytes + 2 * device::cuda::kernels::scratch_bytes),
              fmt::format("{} bytes of two communicators", simulated::allocated_bytes() - before));
      require(device_team_bytes(2, DeviceTransport::staging, UINT64_MAX) == 2 * (4 + 1) * sizes.part_bytes,
              "device_team_bytes");
      rank.meet();
    }
    rank.leave();
  });
}

// 100,000 bytes and 2 x 4 KiB of room are rounded up to whole 64 KiB.
TEST(StagingSizes, SlotsAreNoLargerThanTheLongestCallFills) {
  constexpr uint64_t kib = 1024;
  const staging::ConveyorSizes small = staging::ConveyorSizes().bounded(100'000, 2);
  EXPECT_EQ(small.part_bytes, 128 * kib);
  EXPECT_EQ(small.slot_bytes, 128 * kib);
  EXPECT_EQ(device_team_bytes(2, DeviceTransport::staging, 100'000), 2 * (4 + 1) * 128 * kib);
  EXPECT_EQ(device_message_bytes(2, DeviceTransport::staging, 100'000), 4 * 128 * kib);
  for (const uint64_t longest : {uint64_t{4} << 20, uint64_t{1} << 40, UINT64_MAX})
    EXPECT_EQ(staging::ConveyorSizes().bounded(longest, 2).part_bytes, uint64_t{4} << 20) << longest;
}

TEST(StagingSizes, EveryRankHasRoomInASlotHoweverShortCallsAre) {
  for (const uint64_t ranks : {1, 2, 64, 1024, 16384})
    EXPECT_GE(staging::ConveyorSizes().bounded(0, ranks).part_bytes / ranks, staging::piece_alignment) << ranks;
}

}  // namespace
}  // namespace fsdp::transport::test
