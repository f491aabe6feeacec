// SPDX-License-Identifier: Apache-2.0
// What fsdp_get_stats reports about bytes, waits, allocations and pools: exact numbers, or the counter that must show a
// slow peer.
#include <gtest/gtest.h>

#include <atomic>

#include "harness.h"

using namespace harness;

namespace {

Scenario scenario_with(fsdp_strategy strategy, fsdp_unshard_mode mode) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.steps = 3;
  scenario.microbatches = 2;
  scenario.model.strategy = strategy;
  scenario.model.unshard_mode = mode;
  scenario.groups = equal_groups(5, 64, 32);
  return scenario;
}

TEST(Stats, BytesAreCountedByKindOfCollective) {
  for (const Outcome &outcome : train_threads(scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_COPIED))) {
    EXPECT_EQ(outcome.stats.gathered_bytes, outcome.stats.all_gathers * group_bytes);
    EXPECT_EQ(outcome.stats.reduce_scatters, 3u * 5 * 2);
    EXPECT_EQ(outcome.stats.reduce_scatter_bytes, 3 * 5 * 2 * group_bytes);  // half a gradient of each of two ranks
    EXPECT_EQ(outcome.stats.all_reduce_bytes, 0u);
  }
  for (const Outcome &outcome : train_threads(scenario_with(FSDP_STRATEGY_NO_SHARD, FSDP_UNSHARD_MAPPED))) {
    EXPECT_EQ(outcome.stats.all_reduces, 3u * 5);
    EXPECT_EQ(outcome.stats.reduced_bytes, 3 * 5 * group_bytes);
    EXPECT_EQ(outcome.stats.all_reduce_bytes,
              3 * 5 * (group_bytes + group_bytes / 2));  // and the peer's half of the sum
    EXPECT_EQ(outcome.stats.reduce_scatter_bytes, 0u);
  }
}

TEST(Stats, PoolsStandBesideTheirLowerBounds) {
  const Outcome outcome = train_threads(scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_COPIED))[1];
  const Memory &copied = outcome.memory;
  EXPECT_EQ(copied.gather_lower_bound_bytes, 2 * group_bytes);  // a group and the one gathered ahead
  EXPECT_EQ(copied.gather_pool_bytes, 2 * group_bytes);
  EXPECT_EQ(copied.gather_pool_bytes, outcome.stats.allocated_bytes[FSDP_ROLE_GATHER]);
  EXPECT_EQ(copied.reduce_lower_bound_bytes, 2 * group_bytes);
  EXPECT_EQ(copied.reduce_pool_bytes, 2 * group_bytes);
  const Outcome mapped = train_threads(scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_MAPPED))[1];
  EXPECT_EQ(mapped.memory.gather_pool_bytes + mapped.memory.gather_lower_bound_bytes, 0u);
  EXPECT_EQ(mapped.stats.all_gathers, 0u);
  EXPECT_GT(mapped.stats.gathers, 0u);
}

TEST(Stats, UnequalGroupsNeedAtLeastTheirLowerBound) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    const Outcome outcome = train_threads(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode))[0];
    EXPECT_GE(outcome.memory.gather_pool_bytes, outcome.memory.gather_lower_bound_bytes);
    EXPECT_GE(outcome.memory.reduce_pool_bytes, outcome.memory.reduce_lower_bound_bytes);
    EXPECT_GT(outcome.memory.reduce_lower_bound_bytes, 0u);
  }
}

// Grads, optimizer state, gather pool, scratch; shared: compute weights, full gradients, staging.
TEST(Stats, AllocationsGrowAtTheSealAndNowhereElse) {
  Scenario scenario = scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_COPIED);
  scenario.microbatches = 1;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank first(context, scenario);
    REQUIRE(first.stats().allocations == 7);
    first.load();
    for (uint32_t step = 0; step < 3; ++step) clean_step(first, step);
    REQUIRE(first.stats().allocations == 7);
    const Rank second(context, scenario);
    REQUIRE(second.stats().allocations == 14);
    FSDP(fsdp_close_context(context));
  });
}

// What rank 0 waited for if rank 1 is late with something.
struct Waits {
  uint64_t gather, reduce, peer;
};

template <class Body>
Waits waits_of(const Scenario &scenario, Body body) {
  Waits waits{};
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    body(rank, r == 1);
    const fsdp_stats stats = rank.stats();
    REQUIRE(stats.wait_ns == stats.gather_wait_ns + stats.reduce_wait_ns + stats.peer_wait_ns);
    if (r == 0) waits = {stats.gather_wait_ns, stats.reduce_wait_ns, stats.peer_wait_ns};
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
  return waits;
}

// Rank 1 comes so much later to a place than rank 0, whenever that has come there.
constexpr int late_ms = 1500;
constexpr uint64_t long_ns = 1'000'000'000;
void come(bool late) {
  static std::atomic<int> here{0};
  if (!late) {
    ++here;
    return;
  }
  while (here == 0) pause_ms(1);
  --here;
  pause_ms(late_ms);
}

TEST(Stats, APeerThatReducesLateIsWaitedForByReduces) {
  const Waits waits =
      waits_of(scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_MAPPED), [](Rank &rank, bool late) {
        forward(rank, nullptr);
        come(late);
        backward(rank, 0, 1, nullptr);
      });
  EXPECT_GT(waits.reduce, long_ns);
  EXPECT_LT(waits.peer, waits.reduce);
}

TEST(Stats, APeerThatEndsItsStepLateIsWaitedForAsAPeer) {
  const Waits waits =
      waits_of(scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_MAPPED), [](Rank &rank, bool late) {
        forward(rank, nullptr);
        backward(rank, 0, 1, nullptr);
        come(late);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      });
  EXPECT_GT(waits.peer, long_ns);
  EXPECT_LT(waits.reduce, waits.peer);
}

TEST(Stats, NormsAndParametersAreExchangedWithPeers) {
  const Waits waits =
      waits_of(scenario_with(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_MAPPED), [](Rank &rank, bool late) {
        forward(rank, nullptr);
        backward(rank, 0, 1, nullptr);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        double norm = 0;
        come(late);
        FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
        come(late);
        rank.read(0, 0);
      });
  EXPECT_GT(waits.peer, 2 * long_ns);
}

}  // namespace
