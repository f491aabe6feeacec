// SPDX-License-Identifier: Apache-2.0
// Weights, gradients and sums in other dtypes than fp32, of a model and of single groups: the bits of the reference,
// which rounds where docs/contracts/numerics.md says so.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "device.h"
#include "element.h"
#include "harness.h"

using namespace harness;

namespace {

constexpr fsdp_dtype dtypes[] = {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16};

Scenario make_setup(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  setup.steps = 3;
  setup.microbatches = 2;
  setup.scale = 0.5;
  return setup;
}

void expect_reference(const Scenario &setup, const std::string &what) {
  EXPECT_EQ(difference(setup, train_threads(setup)), "")
      << what << ", strategy " << setup.model.strategy << ", mode " << setup.model.unshard_mode;
}

std::string text_of(fsdp_dtype compute, fsdp_dtype grad, fsdp_dtype reduce) {
  return "compute " + std::to_string(compute) + ", grad " + std::to_string(grad) + ", reduce " + std::to_string(reduce);
}

// The conversions that the tests below use. Values between two neighbours are rounded to the nearest, ties to even.
TEST(Rounding, IsThatOfTheFormats) {
  EXPECT_EQ(round_to(1.0f + 0x1p-11f, FSDP_FLOAT16), 1.0f);
  EXPECT_EQ(round_to(1.0f + 0x1.004p-11f, FSDP_FLOAT16), 1.0f + 0x1p-10f);
  EXPECT_EQ(round_to(1.0f + 0x3p-11f, FSDP_FLOAT16), 1.0f + 0x2p-10f);
  EXPECT_EQ(round_to(-65519.0f, FSDP_FLOAT16), -65504.0f);
  EXPECT_EQ(round_to(65520.0f, FSDP_FLOAT16), HUGE_VALF);
  EXPECT_EQ(round_to(0x1.8p-24f, FSDP_FLOAT16), 0x1p-23f);
  EXPECT_EQ(round_to(0x1p-25f, FSDP_FLOAT16), 0.0f);
  EXPECT_EQ(round_to(0x1.ffep-15f, FSDP_FLOAT16),
            0x1p-14f);  // from the largest subnormal's neighbour to a normal number
  EXPECT_EQ(round_to(1.0f + 0x1p-8f, FSDP_BFLOAT16), 1.0f);
  EXPECT_EQ(round_to(1.0f + 0x3p-8f, FSDP_BFLOAT16), 1.0f + 0x2p-7f);
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = load_element(&half, FSDP_FLOAT16, 0);
    uint16_t again = 0xFFFF;
    store_element(&again, FSDP_FLOAT16, 0, value);
    ASSERT_EQ(again, half);
    if (bits) {
      const auto below = static_cast<uint16_t>(bits - 1);
      const float middle = (value + load_element(&below, FSDP_FLOAT16, 0)) / 2;
      ASSERT_EQ(round_to(middle, FSDP_FLOAT16), load_element(bits % 2 ? &below : &half, FSDP_FLOAT16, 0)) << bits;
    }
  }
}

class Dtypes : public testing::TestWithParam<std::tuple<fsdp_dtype, fsdp_dtype, fsdp_dtype>> {};

TEST_P(Dtypes, HaveTheReferencesBits) {
  const auto [compute, grad, reduce] = GetParam();
  Sample sample(5, static_cast<unsigned>(compute + 2 * grad + 3 * reduce));
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      if (!sample.takes_next()) continue;
      Scenario setup = make_setup(strategy, 3, mode);
      setup.set_dtype(compute);
      setup.model.grad_dtype = grad;
      setup.model.reduce_dtype = reduce;
      setup.eval = true;
      setup.put = mode == FSDP_UNSHARD_COPIED;
      expect_reference(setup, text_of(compute, grad, reduce));
    }
}

// 0: what follows from the parameter, and from the gradient.
INSTANTIATE_TEST_SUITE_P(Training, Dtypes,
                         testing::Combine(testing::ValuesIn(dtypes), testing::Values(0, 1, 2, 3),
                                          testing::Values(0, 1, 2, 3)));

// Each group has its own, and so do parameters of one group.
TEST(Training, GroupsHaveDtypesOfTheirOwn) {
  const fsdp_dtype own[][2] = {
      {FSDP_FLOAT16, 0}, {FSDP_FLOAT32, FSDP_FLOAT16}, {0, FSDP_BFLOAT16}, {FSDP_BFLOAT16, FSDP_FLOAT32}};
  Sample sample(3);
  for (const fsdp_dtype of_model : {0, FSDP_FLOAT32 + 0, FSDP_BFLOAT16 + 0, FSDP_FLOAT16 + 0})
    for (const fsdp_strategy strategy : strategies)
      for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
        for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST}) {
          if (strategy == FSDP_STRATEGY_OPTIM && policy == FSDP_REDUCE_POLICY_EACH) continue;
          if (!sample.takes_next()) continue;
          Scenario setup = make_setup(strategy, 3, mode);
          setup.model.grad_dtype = of_model;
          setup.model.reduce_dtype = of_model == FSDP_FLOAT16 ? FSDP_BFLOAT16 : 0;
          setup.model.reduce_policy = policy;
          setup.groups.push_back({"as the model", {{"plain.w", {31, 5}}, {"plain.half", {7, 9}, FSDP_FLOAT16}}});
          for (size_t g = 0; g < std::size(own); ++g) {
            setup.groups[g].options.grad_dtype = own[g][0];
            setup.groups[g].options.reduce_dtype = own[g][1];
          }
          setup.groups[1].params[0].dtype = FSDP_BFLOAT16;
          setup.groups[1].params[2].dtype = FSDP_FLOAT16;
          setup.groups[2].params[1].dtype = FSDP_FLOAT16;
          expect_reference(setup, "of the model " + std::to_string(of_model) + ", policy " + std::to_string(policy));
        }
}

// Replicas, and a shard axis over acted hosts: what travels between them is fp32 whatever the gradients are.
TEST(Training, MeshesHaveTheReferencesBitsInEveryDtype) {
  Sample sample(5);
  for (const fsdp_dtype compute : {FSDP_BFLOAT16, FSDP_FLOAT16})
    for (const fsdp_dtype grad : {0, FSDP_FLOAT32 + 0})
      for (const fsdp_strategy strategy : strategies)
        for (const int kind : {0, 1, 2}) {
          if (!sample.takes_next()) continue;
          Scenario setup = make_setup(strategy, 4, FSDP_UNSHARD_MAPPED);
          setup.set_dtype(compute);
          setup.model.grad_dtype = grad;
          setup.groups[1].options.reduce_dtype = FSDP_BFLOAT16;
          setup.groups[2].options.grad_dtype = FSDP_FLOAT16;
          if (kind == 2)
            setup.context.ranks_per_host = 2;
          else
            setup.mesh.replicate_size = setup.mesh.shard_size = 2;
          if (kind == 1) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
          expect_reference(setup, text_of(compute, grad, 0) + ", kind " + std::to_string(kind));
        }
}

// Gradients that fp16 cannot hold become infinite in fp16 only; sums are in fp32 and stay finite.
TEST(Training, WhatFloat16CannotHoldIsInfinite) {
  for (const bool narrow : {false, true}) {
    Scenario setup = make_setup(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, FSDP_UNSHARD_MAPPED);
    setup.model.grad_op = FSDP_GRAD_OP_SUM;
    setup.groups[1].options.grad_dtype = FSDP_FLOAT16;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      reduce_all(rank, narrow ? 70'000.0f : 60'000.0f);
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      int32_t found = -1;
      const char *name = nullptr;
      FSDP(fsdp_check_grads(rank.model, stream(), &found, &name));
      REQUIRE(found == narrow && (!narrow || std::string(name) == "l0.wq"));
      for (const fsdp_shard &shard : rank.shards()) {
        const bool infinite = narrow && shard.group == rank.groups[1];
        std::vector<float> grads(shard.element_count);
        copy_out(grads.data(), shard.main_grad, grads.size() * sizeof(float));
        for (const float grad : grads) REQUIRE(grad == (infinite ? HUGE_VALF : narrow ? 210'000.0f : 180'000.0f));
      }
      FSDP(fsdp_discard_step(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

// Three contributions of 256, 1 and -256 to each element. What the main gradient then is, and what was logged at
// WARNING.
struct Summed {
  float grad = 0;
  std::vector<std::string> warnings;
};
Summed sum_of_three(const fsdp_model_options &model, const fsdp_group_options &group, fsdp_dtype dtype,
                    uint32_t microbatches = 3) {
  static std::mutex mutex;
  Summed summed;
  Scenario setup;
  setup.ranks = 2;
  setup.model = model;
  setup.model.grad_op = FSDP_GRAD_OP_MEAN;
  setup.groups = {{"first", {{"first.w", {6, 2}, dtype}}, group}, {"second", {{"second.w", {6, 2}, dtype}}, group}};
  setup.context.log = [](void *data, fsdp_log_level level, const char *line) {
    const std::lock_guard lock(mutex);
    if (level == FSDP_LOG_WARNING) static_cast<Summed *>(data)->warnings.push_back(line);
  };
  setup.context.log_data = &summed;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const float values[] = {256, 1, -256};
    for (int step = 0; step < 2; ++step) {
      for (uint32_t m = 0; m < microbatches; ++m)
        for (size_t g = rank.groups.size(); g-- > 0;) {
          put_all(rank, g, values[m]);
          FSDP(fsdp_reduce_grad(rank.groups[g], m + 1 == microbatches ? FSDP_LAST + 0u : 0u, stream()));
        }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      float found = 0;
      copy_out(&found, rank.shards().at(0).main_grad, sizeof found);
      FSDP(fsdp_discard_step(rank.model, stream()));
      const std::lock_guard lock(mutex);
      summed.grad = found;
    }
    FSDP(fsdp_close_context(context));
  });
  return summed;
}

fsdp_model_options options_of(fsdp_strategy strategy, fsdp_reduce_policy policy, fsdp_dtype grad_dtype = 0) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.strategy = strategy;
  options.reduce_policy = policy;
  options.grad_dtype = grad_dtype;
  return options;
}

// Wherever the full gradients of a model stay for several contributions.
const std::pair<fsdp_strategy, fsdp_reduce_policy> adding_locally[] = {
    {FSDP_STRATEGY_OPTIM, 0},
    {FSDP_STRATEGY_NO_SHARD, 0},
    {FSDP_STRATEGY_OPTIM_GRADS, FSDP_REDUCE_POLICY_LAST},
    {FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_REDUCE_POLICY_LAST}};

TEST(NarrowSums, AreWarnedOfOnceAndTheWarningSaysWhatToSet) {
  for (const auto &[strategy, policy] : adding_locally)
    for (const fsdp_dtype dtype : {FSDP_BFLOAT16, FSDP_FLOAT16}) {
      const Summed summed = sum_of_three(options_of(strategy, policy), FSDP_GROUP_OPTIONS_INIT, dtype);
      EXPECT_EQ(summed.grad, dtype == FSDP_BFLOAT16 ? 0.0f : 1.0f);
      ASSERT_EQ(summed.warnings.size(), 1u) << "strategy " << strategy;
      for (const char *word : {"rank 0", "'second'", "'second.w'", "grad_dtype", "FSDP_FLOAT32",
                               dtype == FSDP_BFLOAT16 ? "bfloat16" : "float16"})
        EXPECT_NE(summed.warnings[0].find(word), std::string::npos) << word << ": " << summed.warnings[0];
    }
}

TEST(NarrowSums, AreNotWarnedOfWhereTheProgramGaveADtype) {
  for (const auto &[strategy, policy] : adding_locally)
    for (const fsdp_dtype given : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
      fsdp_group_options group = FSDP_GROUP_OPTIONS_INIT;
      const Summed of_model = sum_of_three(options_of(strategy, policy, given), group, FSDP_BFLOAT16);
      group.grad_dtype = given;
      const Summed of_group = sum_of_three(options_of(strategy, policy), group, FSDP_BFLOAT16);
      for (const Summed &summed : {of_model, of_group}) {
        EXPECT_EQ(summed.grad, given == FSDP_FLOAT32 ? 1.0f : 0.0f);
        EXPECT_EQ(summed.warnings, std::vector<std::string>()) << "strategy " << strategy;
      }
    }
}

TEST(NarrowSums, AreNotWarnedOfWhereNothingIsLost) {
  const fsdp_group_options group = FSDP_GROUP_OPTIONS_INIT;
  const auto each = options_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_REDUCE_POLICY_EACH);
  const Summed reduced_each = sum_of_three(each, group, FSDP_BFLOAT16);
  EXPECT_EQ(reduced_each.grad, 1.0f);
  EXPECT_EQ(reduced_each.warnings, std::vector<std::string>());
  for (const auto &[strategy, policy] : adding_locally) {
    const Summed wide = sum_of_three(options_of(strategy, policy), group, FSDP_FLOAT32);
    EXPECT_EQ(wide.grad, 1.0f);
    EXPECT_EQ(wide.warnings, std::vector<std::string>());
    const Summed alone = sum_of_three(options_of(strategy, policy), group, FSDP_BFLOAT16, 1);
    EXPECT_EQ(alone.grad, 256.0f);
    EXPECT_EQ(alone.warnings, std::vector<std::string>());
  }
}

}  // namespace
