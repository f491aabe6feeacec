// SPDX-License-Identifier: Apache-2.0
// Training through the C ABI against a reference that knows nothing of the library, and against itself in every mode that
// must not change a bit.
#include <gtest/gtest.h>

#include "element.h"
#include "harness.h"

using namespace harness;

namespace {

constexpr fsdp_strategy strategies[] = {FSDP_NO_SHARD, FSDP_OPTIM, FSDP_OPTIM_GRADS, FSDP_OPTIM_GRADS_PARAMS};

Scenario make_setup(fsdp_strategy strategy, uint32_t ranks, uint32_t microbatches = 1) {
  Scenario setup;
  setup.ranks = ranks;
  setup.microbatches = microbatches;
  setup.model.strategy = strategy;
  setup.groups = odd_groups();
  return setup;
}

void expect_matches(const Scenario &setup, const std::vector<Outcome> &outcomes, double tolerance) {
  const Outcome expected = reference(setup);
  for (size_t r = 0; r < outcomes.size(); ++r) {
    const Outcome &outcome = outcomes[r];
    EXPECT_TRUE(same_bits(outcome.weights, outcomes[0].weights)) << "rank " << r << " gathered other weights than rank 0";
    EXPECT_EQ(outcome.norms, outcomes[0].norms);
    ASSERT_EQ(outcome.weights.size(), expected.weights.size());
    for (size_t p = 0; p < expected.weights.size(); ++p)
      EXPECT_LE(relative_l2(outcome.weights[p], expected.weights[p]), tolerance) << "rank " << r << " parameter " << p;
    for (size_t s = 0; s < expected.norms.size(); ++s) EXPECT_NEAR(outcome.norms[s], expected.norms[s], 1e-5 * expected.norms[s]);
  }
}

// The main grads of all ranks together, where no rank owns the same elements.
std::vector<std::vector<float>> whole_grads(const std::vector<Outcome> &outcomes, fsdp_strategy strategy) {
  auto grads = outcomes[0].grads;
  if (strategy == FSDP_NO_SHARD) return grads;
  for (size_t r = 1; r < outcomes.size(); ++r)
    for (size_t p = 0; p < grads.size(); ++p)
      for (size_t i = 0; i < grads[p].size(); ++i)
        if (outcomes[r].grads[p][i] != 0) grads[p][i] = outcomes[r].grads[p][i];
  return grads;
}

class Strategies : public testing::TestWithParam<std::tuple<int, uint32_t, uint32_t>> {};

TEST_P(Strategies, TenStepsMatchTheReference) {
  const auto [strategy, ranks, microbatches] = GetParam();
  Scenario setup = make_setup(strategy, ranks, microbatches);
  setup.steps = 10;
  setup.scale = 1.0 / microbatches;
  expect_matches(setup, train_threads(setup), 1e-5);
}

// From identical weights the first step's gradients equal the documented additions bit for bit.
TEST_P(Strategies, GradientsHaveTheReferencesBits) {
  const auto [strategy, ranks, microbatches] = GetParam();
  Scenario setup = make_setup(strategy, ranks, microbatches);
  setup.steps = 1;
  const auto outcomes = train_threads(setup);
  EXPECT_TRUE(same_bits(whole_grads(outcomes, strategy), reference(setup).grads));
}

TEST_P(Strategies, ProcessesHaveTheBitsOfThreads) {
  const auto [strategy, ranks, microbatches] = GetParam();
  const Scenario setup = make_setup(strategy, ranks, microbatches);
  const auto threads = train_threads(setup);
  const auto processes = train_processes(setup);
  for (uint32_t r = 0; r < setup.ranks; ++r) {
    EXPECT_TRUE(same_bits(threads[0].weights, processes[r].weights)) << "rank " << r;
    EXPECT_EQ(threads[0].norms, processes[r].norms);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Strategies,
                         testing::Combine(testing::ValuesIn({1, 2, 3, 4}), testing::Values(1u, 2u, 3u, 4u, 8u), testing::Values(1u, 3u)));

TEST(Training, AllStrategiesHaveTheSameBitsAtOneMicrobatch) {
  for (const uint32_t ranks : {1u, 2u, 3u, 8u}) {
    std::vector<Outcome> first;
    for (const fsdp_strategy strategy : strategies) {
      Scenario setup = make_setup(strategy, ranks);
      setup.steps = 4;
      setup.clip = 3;
      const auto outcomes = train_threads(setup);
      if (first.empty()) first = outcomes;
      EXPECT_TRUE(same_bits(outcomes[0].weights, first[0].weights)) << "strategy " << strategy << ", " << ranks << " ranks";
      EXPECT_EQ(outcomes[0].norms, first[0].norms) << "strategy " << strategy << ", " << ranks << " ranks";
    }
  }
}

TEST(Training, NothingChangesABit) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario base = make_setup(strategy, 4, 2);
    base.steps = 3;
    const auto expected = train_threads(base);
    const auto expect_same = [&](const Scenario &setup, const std::string &what) {
      const auto outcomes = train_threads(setup);
      EXPECT_TRUE(same_bits(outcomes[3].weights, expected[0].weights)) << what << ", strategy " << strategy;
      EXPECT_EQ(outcomes[3].norms, expected[0].norms) << what << ", strategy " << strategy;
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
      const auto expected = train_threads(setup);
      for (const uint32_t delay_us : {1000u, 10000u}) {
        setup.context.debug_delay_us = delay_us;
        setup.context.debug_delay_seed = delay_us + static_cast<uint64_t>(strategy);
        const auto outcomes = train_threads(setup);
        for (const Outcome &outcome : outcomes) EXPECT_TRUE(same_bits(outcome.weights, expected[0].weights)) << delay_us;
      }
    }
}

TEST(Training, AnInjectedDelayOf100MillisecondsChangesNoBit) {
  Scenario setup = make_setup(FSDP_OPTIM_GRADS_PARAMS, 2);
  setup.steps = 1;
  setup.model.unshard_mode = FSDP_UNSHARD_COPIED;
  const auto expected = train_threads(setup);
  setup.context.debug_delay_us = 100000;
  EXPECT_TRUE(same_bits(train_threads(setup)[1].weights, expected[0].weights));
}

TEST(Training, LowPrecisionComputeAndReduceTypes) {
  struct Case {
    fsdp_dtype compute, grad, reduce;
  };
  for (const Case c : {Case{FSDP_BFLOAT16, 0, 0}, Case{FSDP_BFLOAT16, FSDP_FLOAT32, 0}, Case{FSDP_BFLOAT16, FSDP_FLOAT32, FSDP_BFLOAT16},
                       Case{FSDP_FLOAT32, FSDP_FLOAT32, FSDP_BFLOAT16}, Case{FSDP_FLOAT32, FSDP_BFLOAT16, 0}})
    for (const fsdp_strategy strategy : strategies)
      for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
        Scenario setup = make_setup(strategy, 3, 2);
        setup.model.grad_dtype = c.grad;
        setup.model.reduce_dtype = c.reduce;
        setup.model.unshard_mode = mode;
        for (GroupDef &group : setup.groups)
          for (ParamDef &param : group.params) param.dtype = c.compute;
        setup.steps = 1;
        const auto outcomes = train_threads(setup);
        EXPECT_TRUE(same_bits(whole_grads(outcomes, strategy), reference(setup).grads))
            << "compute " << c.compute << " grad " << c.grad << " reduce " << c.reduce << " strategy " << strategy;
        expect_matches(setup, outcomes, 1e-5);
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
      const auto outcomes = train_threads(setup);
      Outcome expected = reference(setup);
      // A frozen bf16 parameter is read back as it is kept.
      for (float &value : expected.weights[6]) value = round_to(value, FSDP_BFLOAT16);
      for (size_t p = 0; p < expected.weights.size(); ++p)
        EXPECT_LE(relative_l2(outcomes[2].weights[p], expected.weights[p]), 1e-5) << "parameter " << p << " strategy " << strategy;
    }
}

TEST(Training, GroupsOfDifferentStrategies) {
  Scenario setup = make_setup(FSDP_OPTIM_GRADS_PARAMS, 3, 2);
  for (size_t g = 0; g < 4; ++g) setup.groups[g].options.strategy = strategies[g];
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    setup.model.unshard_mode = mode;
    expect_matches(setup, train_threads(setup), 1e-5);
  }
}

TEST(Training, SumAndCustomFactor) {
  for (const uint32_t ranks : {1u, 2u, 4u})
    for (const fsdp_strategy strategy : strategies)
      for (const fsdp_grad_op op : {FSDP_GRAD_MEAN, FSDP_GRAD_SUM, FSDP_GRAD_FACTOR}) {
        Scenario setup = make_setup(strategy, ranks, 2);
        setup.model.grad_op = op;
        setup.model.grad_factor = op == FSDP_GRAD_FACTOR ? 0.3 : 0;
        setup.steps = 1;
        EXPECT_TRUE(same_bits(whole_grads(train_threads(setup), strategy), reference(setup).grads)) << ranks << " " << op;
      }
}

TEST(Training, ReduceOnTheLastMicrobatchOnly) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = make_setup(strategy, 3, 3);
    setup.model.reduce_policy = FSDP_REDUCE_LAST;
    setup.steps = 1;
    EXPECT_TRUE(same_bits(whole_grads(train_threads(setup), strategy), reference(setup).grads));
    setup.steps = 3;
    expect_matches(setup, train_threads(setup), 1e-5);
  }
}

TEST(Training, ForcedCommunicationInAWorldOfOneHasTheSameBits) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario setup = make_setup(strategy, 1, 2);
      const auto expected = train_threads(setup);
      EXPECT_EQ(expected[0].stats.gathers + expected[0].stats.reduces + expected[0].stats.all_gathers, 0u);
      setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
      setup.model.unshard_mode = mode;
      const auto outcomes = train_threads(setup);
      EXPECT_TRUE(same_bits(outcomes[0].weights, expected[0].weights));
      EXPECT_GT(outcomes[0].stats.reduces, 0u);
    }
}

}  // namespace
