// SPDX-License-Identifier: Apache-2.0
// Models with FP8_BLOCK and FP8 parameters train to the bits of the reference, whatever the ranks, their mesh and the
// way of the gathers.
#include <gtest/gtest.h>

#include "device.h"
#include "harness.h"
#include "train_as_planned.h"

using namespace harness;

namespace {

ParamDef in_blocks(ParamDef param) { return quantized(std::move(param), FSDP_QUANTIZE_FP8_BLOCK); }

// One scale for all of it.
ParamDef scaled(ParamDef param) { return quantized(std::move(param), FSDP_QUANTIZE_FP8); }

// Parameters with blocks that are cut at either edge, with less than a block, with several matrices, with granules, and
// unquantized ones. One scale each for parameters of which all ranks, some ranks or one rank have parts, in buckets of
// one, two and three parameters.
std::vector<GroupDef> quantized_groups() {
  return {{"first",
           {in_blocks({"edges", {200, 150}, FSDP_BFLOAT16}),
            {"bias", {24}, FSDP_BFLOAT16},
            scaled({"all", {37, 24}, FSDP_BFLOAT16})}},
          {"second",
           {in_blocks({"small", {3, 5}}),
            in_blocks({"tall", {300, 7}}),
            in_blocks({"stack", {2, 128, 20}}),
            {"usual", {24, 24}, FSDP_BFLOAT16},
            {"frozen", {24}, FSDP_FLOAT32, FSDP_PARAM_FROZEN},
            scaled({"some", {2, 200}}),
            scaled({"one", {1, 77}})}},
          {"third",
           {in_blocks({"whole", {130, 40}, FSDP_FLOAT32, FSDP_PARAM_NO_DECAY, FSDP_GRANULE_TENSOR}),
            in_blocks({"blocks", {400, 6}, FSDP_FLOAT32, 0, FSDP_GRANULE_BLOCK, 256, 0.5}), scaled({"scalar", {}}),
            scaled({"vector", {301}}), scaled({"cube", {3, 4, 5}, FSDP_FLOAT32, 0, FSDP_GRANULE_TENSOR})}}};
}

Scenario make_setup(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  setup.groups = quantized_groups();
  return setup;
}

class Quantized : public testing::TestWithParam<std::tuple<uint32_t, fsdp_strategy>> {};

TEST_P(Quantized, HasTheReferencesBits) {
  const auto [ranks, strategy] = GetParam();
  if ((is_sanitized() || on_gpu()) && ranks != 3) GTEST_SKIP() << "sanitizers and GPUs have one number of ranks";
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario setup = make_setup(strategy, ranks, mode);
    setup.microbatches = 2;
    setup.eval = setup.recompute = mode == FSDP_UNSHARD_COPIED;
    setup.clip = 0.5;
    EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode;
  }
}

INSTANTIATE_TEST_SUITE_P(OnOneToFourRanks, Quantized,
                         testing::Combine(testing::Values(1u, 2u, 3u, 4u), testing::ValuesIn(strategies)));

TEST(QuantizedModels, AreTheSameInProcesses) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    EXPECT_EQ(train_as_planned(make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode), true), "") << "mode " << mode;
}

// Replicas, states divided over replicas, and hosts: the outer axis gathers codes and scales, too.
TEST(QuantizedModels, TrainAlikeOverTwoAxes) {
  Sample sample(5);
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const bool hosts : {false, true})
        for (const bool hybrid : {false, true}) {
          if ((hosts && hybrid) || !sample.takes_next()) continue;
          Scenario setup = make_setup(strategy, 4, mode);
          if (hosts) {
            setup.context.ranks_per_host = 2;
          } else {
            setup.mesh.replicate_size = setup.mesh.shard_size = 2;
            if (hybrid) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
          }
          EXPECT_EQ(train_as_planned(setup), "") << "strategy " << strategy << ", mode " << mode << hosts << hybrid;
        }
}

TEST(QuantizedModels, TrainAlikeWithForwardAndBackwardApart) {
  Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.schedule = FSDP_SCHEDULE_INTERLEAVED;
  setup.microbatches = 2;
  EXPECT_EQ(train_as_planned(setup), "");
}

// More amaxes than travel at once.
TEST(QuantizedModels, TrainAlikeWithManyScalesOfWholeParameters) {
  for (const uint32_t ranks : {1u, 3u}) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = {{"many", {}}};
    for (int i = 0; i < 515; ++i) setup.groups[0].params.push_back(scaled({"w" + std::to_string(i), {5}}));
    setup.steps = 1;
    EXPECT_EQ(train_as_planned(setup), "") << ranks << " ranks";
  }
}

TEST(QuantizedModels, TrainAlikeInDebugMode) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
    setup.context.flags = FSDP_CONTEXT_DEBUG;
    EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode;
  }
}

// Each option gives different bits, and all of them are those of the reference.
TEST(QuantizedModels, OptionsAreObeyed) {
  std::vector<std::vector<std::vector<float>>> weights;
  for (const fsdp_scale_rounding rounding : {FSDP_SCALE_EXACT, FSDP_SCALE_POWER_OF_TWO})
    for (const fsdp_dtype from : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
      Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
      setup.model.scale_rounding = rounding;
      setup.model.quantize_from = from;
      const Outcome expected = reference(setup);
      EXPECT_EQ(difference(setup, train_threads(setup), expected), "") << "rounding " << rounding << ", from " << from;
      for (const auto &others : weights) EXPECT_FALSE(same_bits(expected.weights, others));
      weights.push_back(expected.weights);
    }
  Scenario usual = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  EXPECT_TRUE(same_bits(reference(usual).weights, weights.front())) << "exact, and from fp32";
}

// A rank reads while others publish late, and publishes while others still read, and always sees one version. Views are
// compared by version, and each element's code changes with its weight.
TEST(QuantizedModels, NoReaderSeesAnotherVersion) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (uint64_t seed = 1; seed <= (is_sanitized() ? 1 : 3); ++seed) {
      Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, mode);
      setup.context.debug_delay_us = 300;
      setup.context.debug_delay_seed = seed;
      setup.steps = 4;
      EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode << ", seed " << seed;
    }
}

TEST(QuantizedModels, KeepThePlanesOfAStepThatIsDiscarded) {
  Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.steps = 2;
  const auto expected = reference(setup).weights;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (uint32_t step = 0; step < setup.steps; ++step) {
      finish_step(rank, step);
      FSDP(fsdp_discard_step(rank.model, nullptr));
      clean_step(rank, step);
    }
    EXPECT_TRUE(same_bits(rank.read_all(), expected));
  });
}

}  // namespace
