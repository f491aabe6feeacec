// SPDX-License-Identifier: Apache-2.0
// Tests the number of thread blocks of NCCL's kernels: how the environment sets a communicator's configuration, and
// which values are refused.
#include "nccl_bench.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::test {
namespace {

using nccl::undefined;

class NcclBlocks : public NcclTest {
 protected:
  void SetUp() override {
    NcclTest::SetUp();
    job.size = 2;
  }
  // A communicator's configuration: the fewest and most blocks, the cluster, and the blocks for switches.
  std::vector<int64_t> configured() {
    expect_well(run_ranks(job, [](NcclRank &mine) { (void)mine.team->create_collectives("gather"); }));
    std::vector<int64_t> seen;
    for (const Count count : {Count::min_ctas, Count::max_ctas, Count::cga_cluster_size, Count::nvls_ctas})
      seen.push_back(control().count(count));
    return seen;
  }
  void expect_refusal(fsdp_status status, const std::string &text) {
    for (const DeviceTransport transport : {DeviceTransport::nccl, DeviceTransport::automatic}) {
      job.transport = transport;
      const auto problems = run_ranks(job, [](NcclRank &) {});
      for (const Error &error : problems) {
        EXPECT_EQ(error.status, status) << error.message;
        EXPECT_NE(error.message.find(text), std::string::npos) << error.message;
      }
    }
  }
  NcclJob job;
};

using Numbers = std::vector<int64_t>;

TEST_F(NcclBlocks, AreNcclsOwnChoice) {
  EXPECT_EQ(configured(), (Numbers{undefined, undefined, undefined, undefined}));
}

TEST_F(NcclBlocks, AreWhatTheEnvironmentSays) {
  ::setenv("FSDP_NCCL_MIN_CTAS", "2", 1);
  ::setenv("FSDP_NCCL_MAX_CTAS", "64", 1);
  ::setenv("FSDP_NCCL_CGA_CLUSTER_SIZE", "0", 1);
  ::setenv("FSDP_NCCL_NVLS_CTAS", "6", 1);
  EXPECT_EQ(configured(), (Numbers{2, 64, 0, 6}));
  expect_well(run_ranks(job, [](NcclRank &mine) {
    const std::string line = mine.team->notes().at(0).text;
    EXPECT_NE(line.find("FSDP_NCCL_MIN_CTAS=2, FSDP_NCCL_MAX_CTAS=64, FSDP_NCCL_CGA_CLUSTER_SIZE=0, "
                        "FSDP_NCCL_NVLS_CTAS=6"),
              std::string::npos)
        << line;
  }));
}

TEST_F(NcclBlocks, OneLimitNeedsNoOther) {
  ::setenv("FSDP_NCCL_MAX_CTAS", "8", 1);
  EXPECT_EQ(configured(), (Numbers{undefined, 8, undefined, undefined}));
  ::unsetenv("FSDP_NCCL_MAX_CTAS");
  ::setenv("FSDP_NCCL_MIN_CTAS", "8", 1);  // NCCL accepts no value above an undefined limit
  EXPECT_EQ(configured(), (Numbers{8, 64, undefined, undefined}));
}

TEST_F(NcclBlocks, WhatIsNoNumberOfBlocksIsRefused) {
  for (const char *value : {"0", "65", "-1", "many", "8 ", "4.5", "99999999999"}) {
    ::setenv("FSDP_NCCL_MAX_CTAS", value, 1);
    expect_refusal(FSDP_INVALID_ARGUMENT,
                   std::string("FSDP_NCCL_MAX_CTAS is '") + value + "': a whole number in [1, 64] is needed");
  }
  ::unsetenv("FSDP_NCCL_MAX_CTAS");
  ::setenv("FSDP_NCCL_CGA_CLUSTER_SIZE", "9", 1);
  expect_refusal(FSDP_INVALID_ARGUMENT, "FSDP_NCCL_CGA_CLUSTER_SIZE is '9': a whole number in [0, 8] is needed");
}

TEST_F(NcclBlocks, TheFewestAreNoMoreThanTheMost) {
  ::setenv("FSDP_NCCL_MIN_CTAS", "9", 1);
  ::setenv("FSDP_NCCL_MAX_CTAS", "8", 1);
  expect_refusal(FSDP_INVALID_ARGUMENT, "FSDP_NCCL_MIN_CTAS is 9 and FSDP_NCCL_MAX_CTAS 8, which is less");
}

TEST_F(NcclBlocks, OfSwitchesAreRefusedToAnOlderNccl) {
  control().set(Knob::version, 22605);
  ::setenv("FSDP_NCCL_NVLS_CTAS", "6", 1);
  expect_refusal(FSDP_UNSUPPORTED, "FSDP_NCCL_NVLS_CTAS is 6, which needs NCCL 2.27.0 or later: ");
  expect_refusal(FSDP_UNSUPPORTED, " is 2.26.5");
  ::unsetenv("FSDP_NCCL_NVLS_CTAS");
  ::setenv("FSDP_NCCL_MAX_CTAS", "8", 1);
  job.transport = DeviceTransport::nccl;
  EXPECT_EQ(configured(), (Numbers{undefined, 8, undefined, undefined}));
}

// Ranks are threads, and all their kernels must be on the GPU at the same time. Fewer blocks fit.
TEST_F(NcclBlocks, OfSixRanksOfAGpuFindNoRoom) {
  simulated::set_queues(0);
  ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
  for (const char *blocks : {"24", "22"}) {
    ::setenv("FSDP_NCCL_MAX_CTAS", blocks, 1);
    const bool fits = std::string(blocks) == "22";  // 6 x 22 are the 132 multiprocessors
    const auto problems = run_ranks({6, 2000, true}, [](NcclRank &mine) {
      Bench bench(mine);
      bench.gather();
      mine.synchronize(*bench.stream);
    });
    for (const Error &error : problems) EXPECT_EQ(error.status, fits ? FSDP_OK : FSDP_TIMEOUT) << error.message;
  }
}

}  // namespace
}  // namespace fsdp::transport::test
