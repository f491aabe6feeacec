// SPDX-License-Identifier: Apache-2.0
// Sums in 16 bits: what NCCL makes of them, and what this library does.
#include <bit>

#include "comm/nccl/connection.h"
#include "nccl_ranks.h"

namespace fsdp::comm::test {
namespace {

// Exact in bfloat16, as their sum is. What adds the first two of them alone loses 1.
constexpr float probe[] = {256, 1, 1};
constexpr uint32_t ranks = 3;

uint16_t bfloat16_of(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }
float value_of(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// NCCL's own reduce-scatter of one number a rank.
float reduce_by_nccl(NcclRank &mine) {
  const auto library = nccl::load_library();
  nccl::UniqueId id{};
  EXPECT_EQ(library->ncclGetUniqueId(&id), nccl::success);
  std::vector<nccl::UniqueId> ids(mine.size());
  mine.host->all_gather(&id, sizeof id, ids.data(), "id");
  nccl::ConnectionPlan plan;
  plan.name = "probe";
  plan.ranks = static_cast<int>(mine.size());
  plan.rank = static_cast<int>(mine.rank());
  nccl::Connection connection(library, plan, *mine.device, mine.waiter);
  connection.join(ids.front(), 10'000);
  const auto stream = mine.device->create_stream("probe");
  const auto memory = mine.device->allocate(512, "probe");
  auto *values = reinterpret_cast<uint16_t *>(memory->data());
  for (uint32_t r = 0; r < mine.size(); ++r) values[r] = bfloat16_of(probe[mine.rank()]);
  connection.launch("probe", [&](nccl::Comm *comm) {
    EXPECT_EQ(
        library->ncclReduceScatter(values, values + mine.rank(), 1, nccl::bfloat16, nccl::sum, comm, stream->handle()),
        nccl::success);
  });
  mine.synchronize(*stream);
  EXPECT_TRUE(connection.finish(10'000));
  return value_of(mine.read<uint16_t>(values + mine.rank(), 1)[0]);
}

// The ring of a rank begins behind it, so what is lost depends on whose sum it is.
TEST_F(NcclTest, ARingRoundsAtEachHop) {
  float seen[ranks];
  expect_well(run_ranks({ranks}, [&](NcclRank &mine) { seen[mine.rank()] = reduce_by_nccl(mine); }));
  EXPECT_EQ(seen[0], 258);  // 1 + 1, + 256
  EXPECT_EQ(seen[1], 256);  // 1 + 256, + 1
  EXPECT_EQ(seen[2], 256);  // 256 + 1, + 1
  control().set(Knob::round_sums_once, 1);
  expect_well(run_ranks({ranks}, [&](NcclRank &mine) { EXPECT_EQ(reduce_by_nccl(mine), 258); }));
}

}  // namespace
}  // namespace fsdp::comm::test
