// SPDX-License-Identifier: Apache-2.0
// fsdp_get_failed_ranks: what it says of each kind of failure, and its arguments. Ranks that die: death_test.cpp.
#include <gtest/gtest.h>

#include <atomic>

#include "harness.h"

using namespace harness;

namespace {

using Ranks = std::vector<uint32_t>;

Ranks failed_ranks(fsdp_context *context) {
  uint64_t count = 0;
  FSDP(fsdp_get_failed_ranks(context, nullptr, &count));
  Ranks ranks(count);
  FSDP(fsdp_get_failed_ranks(context, ranks.data(), &count));
  REQUIRE(count == ranks.size());
  return ranks;
}

fsdp_status meet(fsdp_context *context) {
  double one = 1;
  return fsdp_all_reduce_values(context, nullptr, &one, 1, FSDP_VALUE_SUM);
}

TEST(FailedRanks, AreNoneWithoutAFailureAndAllThatDidNotComeAfterATimeout) {
  Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 3);
  setup.context.timeout_ms = 1500;
  run_threads(setup, [](uint32_t r, fsdp_context *context) {
    EXPECT_EQ(failed_ranks(context), Ranks());
    FSDP(meet(context));
    if (r != 1) return;
    require_error(meet(context), FSDP_TIMEOUT, {"ranks 0, 2 have not come"});
    EXPECT_EQ(failed_ranks(context), (Ranks{0, 2}));
    uint32_t room[1] = {7};
    uint64_t count = 1;
    require_error(fsdp_get_failed_ranks(context, room, &count), FSDP_INVALID_ARGUMENT,
                  {"room for 1 ranks", "2 have failed"});
    EXPECT_EQ(count, 2u);
    EXPECT_EQ(room[0], 7u);
    require_error(fsdp_get_failed_ranks(context, room, nullptr), FSDP_INVALID_ARGUMENT, {"rank_count is NULL"});
  });
}

TEST(FailedRanks, AreTheOneThatAborted) {
  run_threads(scenario_of(FSDP_STRATEGY_NO_SHARD, 2), [](uint32_t r, fsdp_context *context) {
    if (r == 1) {
      FSDP(fsdp_abort_context(context, "test"));
    } else {
      REQUIRE(meet(context) == FSDP_PEER_FAILED);
    }
    EXPECT_EQ(failed_ranks(context), Ranks{1});
  });
}

TEST(FailedRanks, AreNoneOfAnInterruptedWait) {
  static const int32_t flag = 1;
  Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 2);
  setup.context.interrupted_flag = &flag;
  run_threads(setup, [](uint32_t r, fsdp_context *context) {
    if (r == 1) return;
    require_error(meet(context), FSDP_INTERRUPTED, {"flag"});
    EXPECT_EQ(failed_ranks(context), Ranks());
  });
}

}  // namespace
