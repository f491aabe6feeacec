// SPDX-License-Identifier: Apache-2.0
// How often things happen, how much memory there is, and where: the numbers that the documents promise.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

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
  scenario.prefetch_small_groups();
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
    case FSDP_STRATEGY_NO_SHARD: return {0, steps * n, 0, 0, steps * n};
    case FSDP_STRATEGY_OPTIM: return {(steps + 1) * n, steps * n, copied ? (steps + 1) * n : 0, steps * n, 0};
    case FSDP_STRATEGY_OPTIM_GRADS:
      return {(steps + 1) * n, steps * n * k, copied ? (steps + 1) * n : 0, steps * n * k, 0};
    default: {
      // The last group stays gathered between its forward and its backward visit if prefetch would gather it anyway.
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
    // A rank that fills a buffer copies the whole group; a rank that has the whole weights copies only its peer's half.
    const uint64_t copied = 64 * 32 * sizeof(float) / (strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS ? 1 : 2);
    EXPECT_EQ(outcome.stats.gathered_bytes, expected.all_gathers * copied);
    EXPECT_EQ(outcome.stats.prefetches > 0, prefetches && strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CountTable,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(1u, 3u),
                                          testing::Values(FSDP_UNSHARD_MAPPED + 0, FSDP_UNSHARD_COPIED + 0),
                                          testing::Bool(), testing::Bool()));

// Holds the weights of all groups over the micro-batches of each step, if it keeps them; counts the gathers of a step.
uint64_t gathers_of_a_step(const Scenario &setup, bool keeps) {
  uint64_t gathers = 0;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (uint32_t step = 0; step < setup.steps; ++step) {
      const uint64_t before = rank.stats().gathers;
      for (fsdp_group *group : rank.groups)
        if (keeps) FSDP(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
      for (uint32_t m = 0; m < setup.microbatches; ++m) {
        forward(rank, nullptr);
        backward(rank, step, m, nullptr);
      }
      for (fsdp_group *group : rank.groups)
        if (keeps) FSDP(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
      FSDP(fsdp_finish_grads(rank.model, setup.scale, 0, nullptr));
      update(rank);
      if (r == 0) gathers = rank.stats().gathers - before;
    }
    FSDP(fsdp_close_context(context));
  });
  return gathers;
}

TEST(Counts, WeightsKeptOverMicrobatchesAreGatheredOnceAStep) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario setup = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, 3, mode);
    EXPECT_EQ(gathers_of_a_step(setup, false), 15u);  // (2 n - 1) k
    for (GroupDef &group : setup.groups) group.options.flags = FSDP_GROUP_RESIDENT;
    EXPECT_EQ(gathers_of_a_step(setup, false), 9u);  // n k: each is kept from its forward to its backward visit
    EXPECT_EQ(gathers_of_a_step(setup, true), 3u);   // n
    EXPECT_EQ(difference(setup, train_threads(setup)), "");
  }
}

TEST(Counts, NoShardReducesEveryMicrobatchIfAsked) {
  Scenario scenario = equal_scenario(FSDP_STRATEGY_NO_SHARD, 4, 3, FSDP_UNSHARD_MAPPED);
  scenario.model.reduce_policy = FSDP_REDUCE_POLICY_EACH;
  EXPECT_EQ(train_threads(scenario)[0].stats.all_reduces, 3u * 4 * 3);
}

TEST(Counts, AWorldOfOneCommunicatesNothing) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = equal_scenario(strategy, 3, 2, mode);
      scenario.ranks = 1;
      const fsdp_stats stats = train_threads(scenario)[0].stats;
      EXPECT_EQ(stats.gathers + stats.reduces + stats.all_gathers + stats.reduce_scatters + stats.all_reduces +
                    stats.gathered_bytes + stats.reduced_bytes,
                0u);
    }
}

TEST(Counts, AtMostPrefetchDepthPlusOneGroupsAndTwoGradientBuffers) {
  for (const uint32_t depth : {0u, 1u, 2u, 3u})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 9, 2, mode);
      if (depth)
        scenario.model.prefetch_depth = depth;
      else
        scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
      const fsdp_stats stats = train_threads(scenario)[1].stats;
      EXPECT_EQ(stats.peak_gathered_groups, depth + 1) << depth;
      EXPECT_EQ(stats.peak_pending_grad_groups, 2u);
      EXPECT_EQ(stats.pending_grad_groups, 0u);
    }
}

// A caller copies a small group sooner than it can wake a worker. A group that it prefetches is copied at once.
TEST(Counts, SmallGroupsAreCopiedInTheUnshard) {
  for (const uint64_t rows : {64u, 65'536u}) {
    Scenario scenario = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 1, FSDP_UNSHARD_COPIED);
    scenario.context.debug_delay_us = 0;
    scenario.groups = equal_groups(4, rows, 32);
    const bool small = rows * 32 * sizeof(float) < 1 << 20;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      // When this call returns, all ranks have published.
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      const uint64_t before = rank.stats().prefetches;
      forward(rank, nullptr);
      const uint64_t ahead = rank.stats().prefetches - before;
      if (small)
        EXPECT_EQ(ahead, 0u);
      else
        EXPECT_GE(ahead, 2u);
      FSDP(fsdp_prefetch(rank.groups[2], FSDP_FORWARD, 0, nullptr));  // the last group keeps the other buffer
      EXPECT_EQ(rank.stats().prefetches, before + ahead + 1);
      FSDP(fsdp_discard_step(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

// NO_PREFETCH stops the library's own prefetches, not the caller's. The caller's prefetch uses the buffers that
// prefetch_depth has planned; if there are none, it needs a free buffer.
TEST(Counts, NoPrefetchLeavesExplicitOnesAlone) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const uint32_t depth : {0u, 1u, 2u}) {
      Scenario scenario = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 6, 1, mode);
      scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
      scenario.model.prefetch_depth = depth;
      const bool mapped = mode == FSDP_UNSHARD_MAPPED;
      run_threads(scenario, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        uint64_t asked = 0, gathers = 0;
        const auto expect = [&](uint32_t line) {
          const fsdp_stats stats = rank.stats();
          EXPECT_EQ(stats.prefetches, asked) << "line " << line << ", depth " << depth << ", mode " << mode;
          EXPECT_EQ(stats.gathers, gathers) << "line " << line << ", depth " << depth << ", mode " << mode;
          EXPECT_EQ(stats.dropped_prefetches, 0u);
        };
        FSDP(fsdp_prefetch(rank.groups[0], FSDP_FORWARD, 0, nullptr));  // no buffer is in use
        expect((++asked, ++gathers, __LINE__));
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        expect(__LINE__);
        for (uint32_t ahead = 1; ahead <= 3; ++ahead) {
          FSDP(fsdp_prefetch(rank.groups[ahead], FSDP_FORWARD, 0, nullptr));
          if (mapped || ahead <= depth) ++asked, ++gathers;
          expect(__LINE__);
        }
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
        for (uint32_t g = 1; g < 6; ++g) {
          FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
          if (g > (mapped ? 3 : depth)) ++gathers;
          expect(__LINE__);
          FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        }
        FSDP(fsdp_discard_step(rank.model, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(Counts, MoreGradientBuffersIfAsked) {
  Scenario scenario = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS, 8, 1, FSDP_UNSHARD_MAPPED);
  scenario.model.max_pending_groups = 4;
  EXPECT_EQ(train_threads(scenario)[0].stats.peak_pending_grad_groups, 4u);
  scenario.model.max_pending_groups = 1;
  EXPECT_EQ(train_threads(scenario)[0].stats.peak_pending_grad_groups, 1u);
}

TEST(Counts, PrefetchBytesLimitWhatIsAhead) {
  Scenario scenario = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 8, 1, FSDP_UNSHARD_COPIED);
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
            for (int role = 0; role <= last_role; ++role)
              EXPECT_EQ(outcome.memory.role_bytes[role], outcome.stats.allocated_bytes[role])
                  << "role " << role << " strategy " << strategy << " ranks " << ranks;
        }
}

Memory plan(const Scenario &scenario, uint32_t rank) {
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(scenario.ranks, rank, nullptr, &context));
  Memory memory;
  {
    Rank planned(context, scenario);
    memory = memory_of(planned.model, rank);
  }
  fsdp_destroy_context(context);
  return memory;
}

TEST(Memory, APlanningContextSaysTheSame) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  const auto outcomes = train_threads(scenario);
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const Memory planned = plan(scenario, rank);
    for (int role = 0; role <= last_role; ++role)
      EXPECT_EQ(planned.role_bytes[role], outcomes[rank].stats.allocated_bytes[role]);
    EXPECT_EQ(planned.padding_count, outcomes[rank].memory.padding_count);
    EXPECT_EQ(planned.layout_hash, outcomes[rank].memory.layout_hash);
    EXPECT_EQ(planned.element_count, outcomes[rank].memory.element_count);
  }
}

// Both calls that report padding count what the full buffers have beyond the elements.
TEST(Memory, PaddingIsWhatFullBuffersHaveBeyondTheElements) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, FSDP_UNSHARD_COPIED);
  scenario.steps = 1;
  scenario.groups.resize(1);
  scenario.groups[0].params.push_back({"embed.odd", {5}});
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    const Memory memory = memory_of(rank.model, r);
    REQUIRE(memory.element_count == 37 * 24 + 5);
    // Tensors start at multiples of 128 elements, and neither these tensors nor three equal shards fill that up.
    REQUIRE(memory.padding_count > 0);
    const uint64_t whole = (memory.element_count + memory.padding_count) * sizeof(float), page = 4096;
    REQUIRE(memory.role_bytes[FSDP_ROLE_GATHER] >= whole && memory.role_bytes[FSDP_ROLE_GATHER] < whole + page);
    uint64_t size = 0;
    FSDP(fsdp_describe_model(rank.model, nullptr, &size));
    std::string text(size, '\0');
    FSDP(fsdp_describe_model(rank.model, text.data(), &size));
    const auto layout = nlohmann::json::parse(text.c_str());
    REQUIRE(layout["padding"].get<uint64_t>() == memory.padding_count);
    uint64_t padding = 0, full = 0;
    for (const auto &group : layout["groups"])
      for (const auto &bucket : group["buckets"]) {
        padding += bucket["padding_count"].get<uint64_t>();
        full += bucket["full_count"].get<uint64_t>();
      }
    REQUIRE(padding == memory.padding_count);
    REQUIRE(full == memory.element_count + memory.padding_count);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Memory, SixteenThousandRanksArePlannedOnOneMachine) {
  Scenario scenario = equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 12, 1, FSDP_UNSHARD_COPIED);
  scenario.groups = equal_groups(12, 16384, 8192);
  scenario.ranks = 16384;
  const Memory memory = plan(scenario, 16383);
  const uint64_t elements = 12ull * 16384 * 8192;
  EXPECT_EQ(memory.element_count, elements);
  EXPECT_EQ(memory.role_bytes[FSDP_ROLE_OPTIMIZER], elements / 16384 * 8);
  EXPECT_EQ(memory.role_bytes[FSDP_ROLE_GATHER], 2ull * 16384 * 8192 * 4);
}

TEST(Memory, ShardingMoreNeedsLess) {
  std::map<fsdp_strategy, uint64_t> peak;
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    peak[strategy] = plan(equal_scenario(strategy, 6, 1, FSDP_UNSHARD_COPIED), 0).role_bytes[0];
  EXPECT_LT(peak[FSDP_STRATEGY_OPTIM_GRADS_PARAMS], peak[FSDP_STRATEGY_OPTIM_GRADS]);
  EXPECT_LT(peak[FSDP_STRATEGY_OPTIM_GRADS], peak[FSDP_STRATEGY_OPTIM]);
  EXPECT_LT(peak[FSDP_STRATEGY_OPTIM], peak[FSDP_STRATEGY_NO_SHARD]);
}

TEST(Memory, PoolsMeetTheirLowerBoundForEqualGroupsOfAnyDepth) {
  for (const uint32_t depth : {2u, 5u, 40u}) {
    const Memory memory = plan(equal_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, depth, 1, FSDP_UNSHARD_COPIED), 0);
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
      ASSERT_EQ(std::count(addresses.begin(), addresses.end(), 0u), 0);
      // Without gather buffers each group has its own address. A pool has two buffers that take turns.
      const std::set<uint64_t> different(addresses.begin(), addresses.begin() + 5);
      EXPECT_EQ(different.size(),
                strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS && mode == FSDP_UNSHARD_COPIED ? 2u : 5u);
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
      scenario.model.grad_op = FSDP_GRAD_OP_SUM;
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        for (uint32_t m = 0; m < 2; ++m)
          for (size_t g = rank.groups.size(); g-- > 0;) {
            put_all(rank, g, static_cast<float>(r + 1));
            FSDP(fsdp_reduce_grad(rank.groups[g], m ? FSDP_LAST : 0, nullptr));
          }
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        for (const fsdp_shard &shard : rank.shards())
          for (uint64_t i = 0; i < shard.element_count; ++i)
            if (main_grad(shard)[i] != static_cast<float>(ranks * (ranks + 1)))
              throw std::runtime_error("element " + std::to_string(i) + " is " + std::to_string(main_grad(shard)[i]));
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

}  // namespace
