// SPDX-License-Identifier: Apache-2.0
// Tests exchanges by NCCL. They make as few launches as NCCL allows, and none for a rank without a part in the moves.
#include <array>
#include <atomic>

#include "nccl_ranks.h"

namespace fsdp::transport::test {
namespace {

TEST_F(NcclTest, AnExchangeLaunchesOnlyOnTheRanksOfItsMoves) {
  std::atomic<int64_t> launched{0};
  const auto problems = run_ranks({.size = 3}, [&](NcclRank &rank) {
    const auto stream = rank.device->create_stream("test");
    const auto collectives = rank.team->create_collectives("exchanges", Shape::messages());
    const auto from = rank.device->allocate(3000, "from"), to = rank.device->allocate(9000, "to");
    std::memset(from->data(), static_cast<int>(rank.rank() + 1), 3000);
    std::memset(to->data(), 77, 9000);
    rank.meet();
    if (rank.rank() == 0) launched = control().count(Count::launches);
    rank.meet();
    const Move moves[] = {{0, 2, 0, 1000, to->data()},
                          {1, 1, 0, 500, to->data()},
                          {2, 0, 20, 3, to->data()},
                          {1, 0, 0, 0, to->data()},
                          {0, 2, 8, 2, to->data() + 2000}};
    collectives->exchange(Part::alone(from->data()), moves, {1, "moved"}, *stream);
    rank.synchronize(*stream);
    const auto found = rank.read<uint8_t>(to->data(), 9000);
    std::vector<uint8_t> wanted(9000, 77);
    const auto fill = [&](size_t begin, size_t bytes, uint8_t value) { std::fill_n(&wanted[begin], bytes, value); };
    if (rank.rank() == 0) fill(0, 3, 3);
    if (rank.rank() == 1) fill(0, 500, 2);
    if (rank.rank() == 2) fill(0, 1000, 1), fill(2000, 2, 1);
    EXPECT_EQ(found, wanted) << "rank " << rank.rank();
    EXPECT_EQ(collectives->sent_bytes(), (std::array<uint64_t, 3>{1002, 0, 3})[rank.rank()]);
    rank.meet();
  });
  expect_well(problems);
  EXPECT_EQ(control().count(Count::launches) - launched, 2);
  EXPECT_EQ(control().count(Count::messages), 3);
}

}  // namespace
}  // namespace fsdp::transport::test
