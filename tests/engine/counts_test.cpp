// SPDX-License-Identifier: Apache-2.0
// How often things happen, how much memory there is, and where: the numbers that the documents promise.
#include <gtest/gtest.h>

#include <map>

#include "harness.h"

using namespace harness;

namespace {

Scenario equal_scenario(fsdp_strategy strategy, uint32_t groups, uint32_t microbatches, fsdp_unshard_mode mode) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.steps = 3;
  scenario.microbatches = microbatches;
  scenario.model.strategy = strategy;
  scenario.model.unshard_mode = mode;
  scenario.groups = equal_groups(groups, 64, 32);
  return scenario;
}

struct Counts {
  uint64_t gathers, reduces, all_gathers, reduce_scatters, all_reduces;
};

// n groups, k micro-batches, per step; the first publish happens before the first step.
Counts expected_counts(const Scenario &scenario, bool prefetches) {
  const uint64_t n = scenario.groups.size(), k = scenario.microbatches, steps = scenario.steps;
  const bool copied = scenario.model.unshard_mode == FSDP_UNSHARD_COPIED;
  switch (scenario.model.strategy) {
    case FSDP_NO_SHARD: return {0, steps * n, 0, 0, steps * n};
    case FSDP_OPTIM: return {(steps + 1) * n, steps * n, copied ? (steps + 1) * n : 0, steps * n, 0};
    case FSDP_OPTIM_GRADS: return {(steps + 1) * n, steps * n * k, copied ? (steps + 1) * n : 0, steps * n * k, 0};
    default: {
      // The last group stays gathered between its forward and its backward visit where prefetch would gather it anyway.
      const uint64_t gathers = steps * k * (2 * n - (prefetches ? 1 : 0));
      return {gathers, steps * n * k, copied ? gathers : 0, steps * n * k, 0};
    }
  }
}

class CountTable : public testing::TestWithParam<std::tuple<int, uint32_t, int, bool, bool>> {};

TEST_P(CountTable, HoldsInEveryStep) {
  const auto [strategy, microbatches, mode, prefetches, recompute] = GetParam();
  Scenario scenario = equal_scenario(strategy, 5, microbatches, mode);
  scenario.recompute = recompute;
  if (!prefetches) scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
  const Counts expected = expected_counts(scenario, prefetches);
  for (const Outcome &outcome : train_threads(scenario)) {
    EXPECT_EQ(outcome.stats.gathers, expected.gathers);
    EXPECT_EQ(outcome.stats.reduces, expected.reduces);
    EXPECT_EQ(outcome.stats.all_gathers, expected.all_gathers);
    EXPECT_EQ(outcome.stats.reduce_scatters, expected.reduce_scatters);
    EXPECT_EQ(outcome.stats.all_reduces, expected.all_reduces);
    EXPECT_EQ(outcome.stats.gathered_groups, 0u);
    EXPECT_EQ(outcome.stats.dropped_prefetches, 0u);
    EXPECT_EQ(outcome.stats.gathered_bytes > 0, mode == FSDP_UNSHARD_COPIED && strategy != FSDP_NO_SHARD);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CountTable,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(1u, 3u),
                                          testing::Values(FSDP_UNSHARD_MAPPED + 0, FSDP_UNSHARD_COPIED + 0), testing::Bool(),
                                          testing::Bool()));

TEST(Counts, NoShardReducesEveryMicrobatchIfAsked) {
  Scenario scenario = equal_scenario(FSDP_NO_SHARD, 4, 3, FSDP_UNSHARD_MAPPED);
  scenario.model.reduce_policy = FSDP_REDUCE_EACH;
  EXPECT_EQ(train_threads(scenario)[0].stats.all_reduces, 3u * 4 * 3);
}

TEST(Counts, AWorldOfOneCommunicatesNothing) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = equal_scenario(strategy, 3, 2, mode);
      scenario.ranks = 1;
      const fsdp_stats stats = train_threads(scenario)[0].stats;
      EXPECT_EQ(stats.gathers + stats.reduces + stats.all_gathers + stats.reduce_scatters + stats.all_reduces + stats.gathered_bytes +
                    stats.reduced_bytes, 0u);
    }
}

TEST(Counts, AtMostPrefetchDepthPlusOneGroupsAndTwoGradientBuffers) {
  for (const uint32_t depth : {0u, 1u, 2u, 3u})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = equal_scenario(FSDP_OPTIM_GRADS_PARAMS, 9, 2, mode);
      if (depth) scenario.model.prefetch_depth = depth;
      else scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
      const fsdp_stats stats = train_threads(scenario)[1].stats;
      EXPECT_EQ(stats.peak_gathered_groups, depth + 1) << depth;
      EXPECT_EQ(stats.peak_pending_grad_groups, 2u);
      EXPECT_EQ(stats.pending_grad_groups, 0u);
    }
}

TEST(Counts, MoreGradientBuffersIfAsked) {
  Scenario scenario = equal_scenario(FSDP_OPTIM_GRADS, 8, 1, FSDP_UNSHARD_MAPPED);
  scenario.model.max_pending_groups = 4;
  EXPECT_LE(train_threads(scenario)[0].stats.peak_pending_grad_groups, 4u);
  scenario.model.max_pending_groups = 1;
  EXPECT_EQ(train_threads(scenario)[0].stats.peak_pending_grad_groups, 1u);
}

TEST(Counts, PrefetchBytesLimitWhatIsAhead) {
  Scenario scenario = equal_scenario(FSDP_OPTIM_GRADS_PARAMS, 8, 1, FSDP_UNSHARD_COPIED);
  scenario.model.prefetch_depth = 4;
  scenario.model.prefetch_bytes = 2 * 64 * 32 * sizeof(float);
  EXPECT_EQ(train_threads(scenario)[0].stats.peak_gathered_groups, 3u);
}

TEST(Memory, PlannedEqualsAllocatedPerRole) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const uint32_t ranks : {1u, 2u, 3u, 8u})
        for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
          Scenario scenario = scenario_of(strategy, ranks, mode);
          scenario.steps = 1;
          scenario.set_dtype(dtype);
          for (const Outcome &outcome : train_threads(scenario))
            for (int role = 0; role <= FSDP_ROLE_COUNT; ++role)
              EXPECT_EQ(outcome.memory.role_bytes[role], outcome.stats.allocated_bytes[role])
                  << "role " << role << " strategy " << strategy << " ranks " << ranks;
        }
}

fsdp_memory plan(const Scenario &scenario, uint32_t rank) {
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(scenario.ranks, rank, nullptr, &context));
  fsdp_memory memory = FSDP_MEMORY_INIT;
  {
    Rank planned(context, scenario);
    FSDP(fsdp_get_memory(planned.model, rank, &memory));
  }
  fsdp_destroy_context(context);
  return memory;
}

TEST(Memory, APlanningContextSaysTheSame) {
  const Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 3);
  const auto outcomes = train_threads(scenario);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const fsdp_memory planned = plan(scenario, rank);
    for (int role = 0; role <= FSDP_ROLE_COUNT; ++role) EXPECT_EQ(planned.role_bytes[role], outcomes[rank].stats.allocated_bytes[role]);
    EXPECT_EQ(planned.padding_count, outcomes[rank].memory.padding_count);
  }
}

TEST(Memory, SixteenThousandRanksArePlannedOnOneMachine) {
  Scenario scenario = equal_scenario(FSDP_OPTIM_GRADS_PARAMS, 12, 1, FSDP_UNSHARD_COPIED);
  scenario.groups = equal_groups(12, 16384, 8192);
  scenario.ranks = 16384;
  const fsdp_memory memory = plan(scenario, 16383);
  const uint64_t elements = 12ull * 16384 * 8192;
  EXPECT_EQ(memory.parameter_count, elements);
  EXPECT_EQ(memory.role_bytes[FSDP_ROLE_OPTIMIZER], elements / 16384 * 8);
  EXPECT_EQ(memory.role_bytes[FSDP_ROLE_GATHER], 2ull * 16384 * 8192 * 4);
}

TEST(Memory, ShardingMoreNeedsLess) {
  std::map<fsdp_strategy, uint64_t> peak;
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    peak[strategy] = plan(equal_scenario(strategy, 6, 1, FSDP_UNSHARD_COPIED), 0).role_bytes[0];
  EXPECT_LE(peak[FSDP_OPTIM_GRADS_PARAMS], peak[FSDP_OPTIM_GRADS]);
  EXPECT_LE(peak[FSDP_OPTIM_GRADS], peak[FSDP_OPTIM]);
  EXPECT_LE(peak[FSDP_OPTIM], peak[FSDP_NO_SHARD]);
}

TEST(Memory, PoolsMeetTheirLowerBoundForEqualGroupsOfAnyDepth) {
  for (const uint32_t depth : {2u, 5u, 40u}) {
    const fsdp_memory memory = plan(equal_scenario(FSDP_OPTIM_GRADS_PARAMS, depth, 1, FSDP_UNSHARD_COPIED), 0);
    EXPECT_EQ(memory.role_bytes[FSDP_ROLE_GATHER], memory.gather_lower_bound_bytes);
    EXPECT_EQ(memory.role_bytes[FSDP_ROLE_GATHER], 2ull * 64 * 32 * 4);
    EXPECT_EQ(memory.reduce_lower_bound_bytes, 2ull * 64 * 32 * 4);
  }
}

TEST(Addresses, AreFixedInEveryStepAndPhase) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = equal_scenario(strategy, 5, 2, mode);
      scenario.steps = 4;
      const auto addresses = train_threads(scenario)[1].addresses;
      // Five forward visits, then five backward ones in reverse, in every micro-batch of every step.
      ASSERT_EQ(addresses.size(), 4u * 2 * 10);
      for (size_t i = 0; i < addresses.size(); ++i) {
        const size_t visit = i % 10;
        EXPECT_EQ(addresses[i], addresses[visit < 5 ? visit : 9 - visit]);
      }
    }
}

// Weights of 1, gradients of rank + 1, two micro-batches: sums that every arithmetic has exactly.
TEST(Exact, IntegerValuedDataGivesExactSums) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const uint32_t ranks : {1u, 2u, 3u, 4u, 8u}) {
      Scenario scenario = scenario_of(strategy, ranks, FSDP_UNSHARD_MAPPED);
      scenario.model.grad_op = FSDP_GRAD_SUM;
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        for (uint32_t m = 0; m < 2; ++m)
          for (size_t g = rank.groups.size(); g-- > 0;) {
            put_all(rank, g, static_cast<float>(r + 1));
            FSDP(fsdp_reduce_grad(rank.groups[g], m ? FSDP_LAST : 0, nullptr));
          }
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        for (const fsdp_shard &shard : rank.shards())
          for (uint64_t i = 0; i < shard.element_count; ++i)
            if (shard.main_grad[i] != static_cast<float>(ranks * (ranks + 1)))
              throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(shard.main_grad[i]));
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

}  // namespace
