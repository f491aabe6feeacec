// SPDX-License-Identifier: Apache-2.0
// Training through the C ABI against a reference that knows nothing of the library, and against itself in every mode
// that must not change a bit.
#include <gtest/gtest.h>

#include "element.h"
#include "harness.h"

using namespace harness;

namespace {

Scenario make_setup(fsdp_strategy strategy, uint32_t ranks, uint32_t microbatches = 1) {
  Scenario setup;
  setup.ranks = ranks;
  setup.microbatches = microbatches;
  setup.model.strategy = strategy;
  setup.groups = odd_groups();
  return setup;
}

// Weights, gradients, norms and all that was read, on every rank.
void expect_reference(const Scenario &setup, const std::vector<Outcome> &outcomes, const std::string &what = "") {
  EXPECT_EQ(difference(setup, outcomes), "")
      << what << " strategy " << setup.model.strategy << ", ranks " << setup.ranks;
}

using StrategyParam = std::tuple<int, uint32_t, uint32_t>;
class Strategies : public testing::TestWithParam<StrategyParam> {};

TEST_P(Strategies, TenStepsHaveTheReferencesBits) {
  const auto [strategy, ranks, microbatches] = GetParam();
  Scenario setup = make_setup(strategy, ranks, microbatches);
  setup.steps = 10;
  setup.scale = 1.0 / microbatches;
  setup.recompute = setup.eval = microbatches > 1;
  expect_reference(setup, train_threads(setup));
}

TEST_P(Strategies, ProcessesHaveTheBitsOfThreads) {
  const auto [strategy, ranks, microbatches] = GetParam();
  const Scenario setup = make_setup(strategy, ranks, microbatches);
  const auto threads = train_threads(setup);
  const auto processes = train_processes(setup);
  expect_reference(setup, processes);
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    EXPECT_TRUE(same_bits(threads[0].weights, processes[r].weights)) << "rank " << r;
    EXPECT_EQ(threads[0].norms, processes[r].norms);
  }
}

std::vector<StrategyParam> strategy_params() {
  std::vector<StrategyParam> params;
  Sample sample(3);
  for (const int strategy : {1, 2, 3, 4})
    for (const uint32_t ranks : {1u, 2u, 3u, 4u, 8u})
      for (const uint32_t microbatches : {1u, 3u})
        if (sample.takes_next()) params.emplace_back(strategy, ranks, microbatches);
  return params;
}

INSTANTIATE_TEST_SUITE_P(All, Strategies, testing::ValuesIn(strategy_params()));

TEST(Training, AllStrategiesHaveTheSameBitsAtOneMicrobatch) {
  for (const uint32_t ranks : {1u, 2u, 3u, 8u}) {
    std::vector<Outcome> first;
    for (const fsdp_strategy strategy : strategies) {
      Scenario setup = make_setup(strategy, ranks);
      setup.steps = 4;
      setup.clip = 3;
      const auto outcomes = train_threads(setup);
      expect_reference(setup, outcomes);
      if (first.empty()) first = outcomes;
      EXPECT_TRUE(same_bits(outcomes[0].weights, first[0].weights))
          << "strategy " << strategy << ", " << ranks << " ranks";
      EXPECT_EQ(outcomes[0].norms, first[0].norms) << "strategy " << strategy << ", " << ranks << " ranks";
    }
  }
}

TEST(Training, NothingChangesABit) {
  Sample sample(2);
  for (const fsdp_strategy strategy : strategies) {
    Scenario base = make_setup(strategy, 4, 2);
    base.steps = 3;
    const auto expected = train_threads(base);
    const Outcome computed = reference(base);
    const auto expect_same = [&](const Scenario &setup, const std::string &what) {
      if (!sample.takes_next()) return;
      const auto outcomes = train_threads(setup);
      EXPECT_EQ(difference(setup, outcomes, computed), "") << what << ", strategy " << strategy;
      for (const Outcome &outcome : outcomes)
        EXPECT_EQ(outcome.norms, expected[0].norms) << what << ", strategy " << strategy;
    };
    expect_same(base, "the same again");
    Scenario setup = base;
    setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
    expect_same(setup, "copied");
    setup.model.flags = FSDP_MODEL_NO_PREFETCH;
    expect_same(setup, "copied, no prefetch");
    setup.model.flags = 0;
    setup.model.prefetch_depth = 2;
    expect_same(setup, "copied, prefetch 2");
    setup.context.flags = FSDP_CONTEXT_NO_OVERLAP;
    expect_same(setup, "copied, no overlap");
    setup.context.flags = FSDP_CONTEXT_DEBUG;
    expect_same(setup, "copied, debug");
    setup = base;
    setup.context.flags = FSDP_CONTEXT_NO_OVERLAP;
    expect_same(setup, "no overlap");
    setup.context.flags = FSDP_CONTEXT_DEBUG;
    expect_same(setup, "debug");
    setup = base;
    setup.recompute = true;
    expect_same(setup, "recompute");
    setup = base;
    setup.eval = true;
    expect_same(setup, "eval between steps");
    setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
    expect_same(setup, "copied, eval between steps");
    setup = base;
    setup.put = true;
    expect_same(setup, "put_grad");
    setup = base;
    setup.flush_to_zero = true;
    expect_same(setup, "flush to zero");
  }
}

TEST(Training, DelaysAtEveryEdgeChangeNoBit) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario setup = make_setup(strategy, 3, 2);
      setup.model.unshard_mode = mode;
      for (const uint32_t delay_us : {1000u, 10000u}) {
        setup.context.debug_delay_us = delay_us;
        setup.context.debug_delay_seed = delay_us + static_cast<uint64_t>(strategy);
        expect_reference(setup, train_threads(setup), "delays of " + std::to_string(delay_us) + " us,");
      }
    }
}

TEST(Training, AnInjectedDelayOf100MillisecondsChangesNoBit) {
  Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.steps = 1;
  setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
  setup.context.debug_delay_us = 100000;
  expect_reference(setup, train_threads(setup));
}

// A group with its own reduce_dtype uses it, whatever the model's is; the other groups use the model's.
TEST(Training, AGroupHasAReduceTypeOfItsOwn) {
  constexpr float fine = 1.0f + 1.0f / 1024;  // has no bf16; the nearest one is 1
  for (const fsdp_strategy strategy : strategies)
    for (const bool group_is_coarse : {false, true}) {
      Scenario setup = make_setup(strategy, 2);
      setup.model.grad_op = FSDP_GRAD_OP_SUM;
      setup.model.reduce_dtype = group_is_coarse ? FSDP_FLOAT32 : FSDP_BFLOAT16;
      setup.groups[1].options.reduce_dtype = group_is_coarse ? FSDP_BFLOAT16 : FSDP_FLOAT32;
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        reduce_all(rank, fine);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
        for (const fsdp_shard &shard : rank.shards()) {
          const bool coarse = (shard.group == rank.groups[1]) == group_is_coarse;
          for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == (coarse ? 2.0f : 2 * fine));
        }
        FSDP(fsdp_discard_step(rank.model, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(Training, MixedTypesAndFrozenParametersInAGroup) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario setup = make_setup(strategy, 3);
      setup.model.unshard_mode = mode;
      setup.groups[1].params[0].dtype = FSDP_BFLOAT16;
      setup.groups[1].params[2].flags = FSDP_PARAM_FROZEN;
      setup.groups[2].params[1].dtype = FSDP_BFLOAT16;
      setup.groups[2].params[1].flags = FSDP_PARAM_FROZEN;
      setup.groups.push_back({"frozen", {{"frozen.w", {11, 7}, FSDP_FLOAT32, FSDP_PARAM_FROZEN}}});
      setup.groups.push_back({"nothing", {}});
      setup.recompute = setup.eval = true;
      expect_reference(setup, train_threads(setup));
    }
}

TEST(Training, GroupsOfDifferentStrategies) {
  Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, 2);
  for (size_t g = 0; g < 4; ++g) setup.groups[g].options.strategy = strategies[g];
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    setup.model.unshard_mode = mode;
    expect_reference(setup, train_threads(setup));
  }
}

TEST(Training, SumAndCustomFactor) {
  for (const uint32_t ranks : {1u, 2u, 4u})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_grad_op op : {FSDP_GRAD_OP_MEAN, FSDP_GRAD_OP_SUM, FSDP_GRAD_OP_FACTOR}) {
        Scenario setup = make_setup(strategy, ranks, 2);
        setup.model.grad_op = op;
        setup.model.grad_factor = op == FSDP_GRAD_OP_FACTOR ? 0.3 : 0;
        expect_reference(setup, train_threads(setup), "op " + std::to_string(op) + ",");
      }
}

TEST(Training, ReduceOnTheLastMicrobatchOnly) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = make_setup(strategy, 3, 3);
    setup.model.reduce_policy = FSDP_REDUCE_POLICY_LAST;
    setup.steps = 3;
    expect_reference(setup, train_threads(setup));
  }
}

TEST(Training, ForcedCommunicationInAWorldOfOneHasTheSameBits) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario setup = make_setup(strategy, 1, 2);
      const auto expected = train_threads(setup);
      expect_reference(setup, expected, "not forced,");
      EXPECT_EQ(expected[0].stats.gathers + expected[0].stats.reduces + expected[0].stats.all_gathers, 0u);
      setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
      setup.model.unshard_mode = mode;
      const auto outcomes = train_threads(setup);
      expect_reference(setup, outcomes, "forced,");
      EXPECT_EQ(outcomes[0].norms, expected[0].norms);
      const uint64_t groups = setup.groups.size(), contributions = setup.steps * setup.microbatches;
      EXPECT_EQ(outcomes[0].stats.reduces, groups * (strategy <= FSDP_STRATEGY_OPTIM ? setup.steps : contributions));
    }
}

}  // namespace
