// SPDX-License-Identifier: Apache-2.0
// The caller updates some parameters of a model, and AdamW the others (fsdp_param.optimizer).
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "misuse.h"
#include "param_optimizer.h"

using namespace harness;

namespace {

using Combination = std::tuple<Form, Layout>;

class ParamOptimizer : public testing::TestWithParam<Combination> {};
INSTANTIATE_TEST_SUITE_P(All, ParamOptimizer,
                         testing::Combine(testing::ValuesIn(mixed_forms), testing::ValuesIn(layouts)),
                         [](const auto &info) {
                           return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name;
                         });

// Also the norms, by which both kinds of gradients are clipped, and the compute weights in every visit.
TEST_P(ParamOptimizer, HasTheReferencesBits) {
  const auto &[form, layout] = GetParam();
  const Scenario setup = mixed_scenario(form, layout);
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

TEST_P(ParamOptimizer, AllocatesWhatWasPlanned) {
  const auto &[form, layout] = GetParam();
  run(mixed_scenario(form, layout), layout.name, [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    REQUIRE(rank.stats().allocated_bytes == memory_of(rank.model, rank.rank).role_bytes);
  });
}

class ParamOptimizerLayouts : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(All, ParamOptimizerLayouts, testing::ValuesIn(layouts),
                         [](const auto &info) { return std::string(info.param.name); });

// A gradient depends only on its own weights, and nothing is clipped: so the two kinds are trained separately.
TEST_P(ParamOptimizerLayouts, EachKindHasTheBitsOfAModelWithOneOptimizer) {
  Scenario mixed = mixed_scenario(plain_form, GetParam());
  mixed.clip = 0;
  mixed.microbatches = 2;
  Scenario own = mixed, adamw = mixed;
  own.model.optimizer = FSDP_OPTIMIZER_CALLER;
  for (size_t g = 0; g < mixed.groups.size(); ++g)
    for (size_t p = 0; p < mixed.groups[g].params.size(); ++p) {
      own.groups[g].params[p].optimizer = FSDP_OPTIMIZER_CALLER;
      adamw.groups[g].params[p].optimizer = 0;
    }
  const auto of_mixed = train_threads(mixed), of_own = train_threads(own), of_adamw = train_threads(adamw);
  for (uint32_t r = 0; r < mixed.ranks; ++r)
    for (size_t g = 0; g < mixed.groups.size(); ++g)
      for (size_t p = 0; p < mixed.groups[g].params.size(); ++p) {
        const uint32_t ordinal = mixed.ordinal(g, p);
        const Outcome &alone = mixed.groups[g].params[p].by_caller() ? of_own[r] : of_adamw[r];
        const Outcome &other = mixed.groups[g].params[p].by_caller() ? of_adamw[r] : of_own[r];
        EXPECT_TRUE(same_bits({of_mixed[r].weights[ordinal]}, {alone.weights[ordinal]}))
            << of_mixed[r].error << ordinal;
        EXPECT_FALSE(same_bits({of_mixed[r].weights[ordinal]}, {other.weights[ordinal]})) << ordinal;
      }
}

// Quantized compute weights are made of the weights that the caller has written.
TEST(ParamOptimizerQuantized, HasTheReferencesBits) {
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK, FSDP_QUANTIZE_FP8})
    for (const Layout &layout : {layouts[2], layouts[5], layouts[9]}) {
      Scenario setup = scenario_by(plain_form, layout);
      setup.groups = {{"all",
                       {quantized({"own", {96, 160}, FSDP_BFLOAT16}, quantization),
                        quantized({"other", {128, 32}, FSDP_BFLOAT16}, quantization),
                        {"bias", {500}, FSDP_BFLOAT16}}}};
      setup.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
      EXPECT_EQ(difference(setup, train_threads(setup)), "") << quantization << " " << layout.name;
    }
}

// ---- what a step does to the caller's parameters ----

// Two ranks divide the parameters without padding.
Scenario even_scenario() {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"all", {{"w", {64, 32}, FSDP_BFLOAT16}, {"b", {1024}, FSDP_BFLOAT16}}}};
  setup.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  return setup;
}

void look_at(Rank &rank, const std::vector<float> &expected) {
  FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, stream()));
  REQUIRE(same_bits({rank.view(0, 0, FSDP_EVAL)}, {expected}));
  FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, stream()));
}

TEST(ParamOptimizerStep, PublishesWeightsAsTheCallerLeftThem) {
  run(even_scenario(), "step", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const std::vector<float> momentum = read_state(rank, 0, 0, "momentum"), other = rank.read(0, 1);
    finish_step(rank, 1);
    const std::vector<float> values(64 * 32, 0.625f);
    FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
    FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
    REQUIRE(same_bits({rank.read(0, 0), read_state(rank, 0, 0, "momentum")}, {values, momentum}));
    REQUIRE(!same_bits({rank.read(0, 1)}, {other}));
    look_at(rank, values);
  });
}

TEST(ParamOptimizerStep, LeavesAnUntrainedParameterAsItIs) {
  run(even_scenario(), "untrained", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    const std::vector<float> before = rank.read(0, 0), other = rank.read(0, 1);
    const std::vector<float> values(1024, 0.25f);
    const Placed placed(values);
    const fsdp_grad grads[] = {{nullptr, 0, FSDP_FLOAT32, 0}, {placed.data(), 1024, FSDP_FLOAT32, 0}};
    // The caller has no weights to update, so the whole step can be one call.
    FSDP(fsdp_apply_grads(rank.model, grads, 2, sizeof *grads, 0.01, 0, nullptr, stream(), nullptr));
    REQUIRE(same_bits({rank.read(0, 0)}, {before}) && !same_bits({rank.read(0, 1)}, {other}));
    for (const fsdp_shard &shard : rank.shards())
      REQUIRE((shard.flags & FSDP_PARAM_FROZEN ? 1u : 0u) == (shard.param_index == 0));
  });
}

TEST(ParamOptimizerStep, ADiscardedStepChangesNothing) {
  run(mixed_scenario(plain_form, layouts[5]), "discarded", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const auto before = everything_of_two_optimizers(rank);
    finish_step(rank, 1);
    FSDP(fsdp_discard_step(rank.model, stream()));
    REQUIRE(same_bits(everything_of_two_optimizers(rank), before));
    clean_step(rank, 1);
    REQUIRE(!same_bits(everything_of_two_optimizers(rank), before));
  });
}

// Zeros, and numbers that are not finite, are found in the gradients of both kinds.
TEST(ParamOptimizerStep, MeasuresGradientsOfBothKinds) {
  run(even_scenario(), "measured", [](Rank &rank) {
    rank.load();
    reduce_all(rank, 0.5f);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    double norm = 0, norms[2] = {};
    FSDP(fsdp_scale_grads(rank.model, 0.5, stream()));
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
    FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms, 2));
    REQUIRE(norm == std::sqrt(3072 * 0.0625) && norms[0] == std::sqrt(2048 * 0.0625) && norms[1] == 8);
    FSDP(fsdp_scale_grads(rank.model, 0, stream()));
    uint64_t zeros = 0;
    FSDP(fsdp_count_zero_grads(rank.model, stream(), &zeros));
    REQUIRE(zeros == 3072);
    FSDP(fsdp_discard_step(rank.model, stream()));
    reduce_all(rank, std::numeric_limits<float>::infinity());
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    int32_t found = 0;
    const char *name = nullptr;
    FSDP(fsdp_check_grads(rank.model, stream(), &found, &name));
    REQUIRE(found && name == std::string("w"));
    FSDP(fsdp_discard_step(rank.model, stream()));
  });
}

// ---- memory and states ----

// The caller's matrix has 4 bytes an element, the other parameter has AdamW's 8.
TEST(ParamOptimizerMemory, HasNoStatesOfTheOtherOptimizer) {
  run(even_scenario(), "bytes", [](Rank &rank) {
    REQUIRE(memory_of(rank.model, 0).role_bytes[FSDP_ROLE_OPTIMIZER] == 64 * 32 / 2 * 4 + 1024 / 2 * 8);
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
  Scenario coded = even_scenario();
  coded.model.optimizer = FSDP_OPTIMIZER_ADAMW_8BIT;
  coded.groups[0].params[0].shape = {128, 256};
  coded.groups[0].params[1].shape = {128, 512};
  run(coded, "bytes in 8 bits", [](Rank &rank) {
    const uint64_t codes = 2 * (128 * 512 / 2 + 128 * 4);
    REQUIRE(memory_of(rank.model, 0).role_bytes[FSDP_ROLE_OPTIMIZER] == 128 * 256 / 2 * 4 + codes);
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

TEST(ParamOptimizerMemory, EveryParameterOfOneOptimizerHasTheFurtherStates) {
  for (const fsdp_optimizer optimizer : {FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_CALLER}) {
    Scenario setup = even_scenario();
    for (ParamDef &param : setup.groups[0].params) param.optimizer = 0;
    for (ParamDef &param : setup.groups[0].params)
      if (optimizer == FSDP_OPTIMIZER_CALLER) param.optimizer = optimizer;
    const uint64_t own = optimizer == FSDP_OPTIMIZER_CALLER ? 1 : 0;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup, false);
      if (!own) FSDP(fsdp_add_optimizer_state(rank.model, "momentum", FSDP_FLOAT32));
      FSDP(fsdp_seal_model(rank.model));
      for (const fsdp_shard &shard : rank.shards()) REQUIRE(shard.state_count == (own ? 1u : 3u));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(ParamOptimizerMemory, ReadsAndLoadsOnlyTheStatesOfAParameter) {
  run(even_scenario(), "states", [](Rank &rank) {
    std::vector<float> values(64 * 32);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
    const auto load = [&](size_t p, const char *name) {
      return fsdp_load_state(rank.groups[0], p, name, values.data(), FSDP_FLOAT32, rank.def(0).params[p].count(),
                             FSDP_EVERY_RANK, 0);
    };
    FSDP(load(0, "momentum"));
    REQUIRE(read_state(rank, 0, 0, "momentum") == values);
    REQUIRE(read_state(rank, 0, 1, "exp_avg_sq") == std::vector<float>(1024, 0));
    for (const char *name : states)
      require_error(
          load(0, name), FSDP_INVALID_ARGUMENT,
          {"fsdp_load_state", "parameter 'w' of group 'all' has no optimizer state", name, "the caller updates it"});
    require_error(load(1, "momentum"), FSDP_INVALID_ARGUMENT, {"parameter 'b'", "'momentum'", "AdamW updates it"});
    require_error(fsdp_read_state(rank.groups[0], 0, "exp_avg", values.data(), FSDP_FLOAT32, values.size(), -1, 0),
                  FSDP_INVALID_ARGUMENT, {"fsdp_read_state", "'w'", "'exp_avg'"});
    fsdp_tensor state = FSDP_TENSOR_INIT;
    for (uint64_t s = 0; s < 2; ++s) {
      const fsdp_shard shard = rank.shards()[s];
      const bool own = shard.param_index == 0;
      REQUIRE(shard.state_count == (own ? 1u : 2u));
      require_error(fsdp_get_shard_state(rank.model, s, own ? "exp_avg" : "momentum", &state), FSDP_INVALID_ARGUMENT,
                    {own ? "'w' has no optimizer state 'exp_avg'; it has: 'momentum'"
                         : "'b' has no optimizer state 'momentum'; it has: 'exp_avg', 'exp_avg_sq'"});
      FSDP(fsdp_get_shard_state(rank.model, s, own ? "momentum" : "exp_avg_sq", &state));
      REQUIRE(load_elements(state.data, state.dtype, 1)[0] == (own ? values[shard.element_offset] : 0));
    }
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

TEST(ParamOptimizerMemory, TheDescriptorAndTheDescriptionNameTheOptimizer) {
  Scenario setup = even_scenario();
  setup.groups[0].params.push_back({"frozen", {8}, FSDP_FLOAT32, FSDP_PARAM_FROZEN});
  run(setup, "named", [](Rank &rank) {
    const fsdp_optimizer expected[] = {FSDP_OPTIMIZER_CALLER, FSDP_OPTIMIZER_ADAMW, 0};
    for (uint64_t p = 0; p < 3; ++p) {
      fsdp_param param = FSDP_PARAM_INIT;
      FSDP(fsdp_get_param_info(rank.groups[0], p, &param));
      REQUIRE(param.optimizer == expected[p]);
    }
    std::string text(1 << 16, ' ');
    uint64_t size = text.size();
    FSDP(fsdp_describe_model(rank.model, text.data(), &size));
    const auto described = nlohmann::json::parse(text.c_str());
    for (const auto &bucket : described["groups"][0]["buckets"])
      REQUIRE(bucket.contains("optimizer") == (bucket["parameters"][0]["name"] == "w"));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// ---- what is refused ----

class ParamOptimizerRefusals : public testing::Test {
 protected:
  ParamOptimizerRefusals() { FSDP(fsdp_create_plan_context(2, 0, nullptr, &context)); }
  ~ParamOptimizerRefusals() override { fsdp_destroy_context(context); }
  Rank rank_of(const Scenario &setup) { return Rank(context, setup, false); }

  fsdp_context *context = nullptr;
};

TEST_F(ParamOptimizerRefusals, AdamWInAModelOfTheCallersOptimizer) {
  Scenario setup = even_scenario();
  setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
  setup.groups[0].params[1].optimizer = FSDP_OPTIMIZER_ADAMW;
  try {
    rank_of(setup);
    FAIL();
  } catch (const Failure &failure) {
    EXPECT_EQ(failure.status, FSDP_INVALID_ARGUMENT);
    EXPECT_NE(failure.message.find("parameter 'b' of group 'all'"), std::string::npos) << failure.message;
    EXPECT_NE(failure.message.find("create the model with FSDP_OPTIMIZER_ADAMW"), std::string::npos);
  }
}

TEST_F(ParamOptimizerRefusals, AnOptimizerOfAFrozenParameter) {
  for (const fsdp_optimizer optimizer : {FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_CALLER}) {
    Scenario setup = even_scenario();
    setup.groups[0].params[1].optimizer = optimizer;
    setup.groups[0].params[1].flags = FSDP_PARAM_FROZEN;
    try {
      rank_of(setup);
      FAIL();
    } catch (const Failure &failure) {
      EXPECT_EQ(failure.status, FSDP_INVALID_ARGUMENT);
      EXPECT_NE(failure.message.find("params[1] ('b').optimizer is"), std::string::npos) << failure.message;
      EXPECT_NE(failure.message.find("FSDP_PARAM_FROZEN"), std::string::npos);
    }
  }
}

// fsdp_check_model lists what the seal refuses.
TEST_F(ParamOptimizerRefusals, MainWeightsInTwoHalves) {
  Scenario setup = even_scenario();
  setup.model.main_storage = FSDP_MAIN_SPLIT16;
  const Rank rank = rank_of(setup);
  std::string text(4096, ' ');
  uint64_t size = text.size();
  EXPECT_WORKS(fsdp_check_model(rank.model, text.data(), &size));
  EXPECT_NE(text.find("parameter 'w' of group 'all' has FSDP_OPTIMIZER_CALLER"), std::string::npos) << text;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(rank.model), "parameter 'w'", "FSDP_MAIN_SPLIT16");
  setup.groups[0].params[0].dtype = FSDP_FLOAT32;  // such a parameter is its own main weights
  EXPECT_WORKS(fsdp_seal_model(rank_of(setup).model));
}

// A name that a state would have in checkpoints is free if the parameter does not have the state.
TEST_F(ParamOptimizerRefusals, NamesOfStatesThatAParameterHas) {
  for (const char *name : {"state.w.exp_avg", "state.b.momentum", "state.w.momentum", "state.b.exp_avg"}) {
    Scenario setup = even_scenario();
    setup.groups[0].params.push_back({name, {8}});
    const Rank rank = rank_of(setup);
    const std::string text = name;
    if (text == "state.w.exp_avg" || text == "state.b.momentum")
      EXPECT_WORKS(fsdp_seal_model(rank.model));
    else
      EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(rank.model), "would both be '" + text + "'");
  }
}

TEST(ParamOptimizerStep, AWholeStepInOneCallIsRefused) {
  run(even_scenario(), "apply", [](Rank &rank) {
    rank.load();
    const auto before = everything_of_two_optimizers(rank);
    const std::vector<float> values(2048, 0.25f);
    const Placed placed(values);
    const fsdp_grad grads[] = {{placed.data(), 2048, FSDP_FLOAT32, 0}, {placed.data(), 1024, FSDP_FLOAT32, 0}};
    require_error(fsdp_apply_grads(rank.model, grads, 2, sizeof *grads, 0.01, 0, nullptr, stream(), nullptr),
                  FSDP_INVALID_STATE,
                  {"fsdp_apply_grads", "parameter 'w' of group 'all'", "fsdp_finish_grads", "fsdp_step_adamw"});
    REQUIRE(same_bits(everything_of_two_optimizers(rank), before));
    clean_step(rank, 0);
  });
}

TEST(ParamOptimizerSeal, RanksWithOtherOptimizersAreTold) {
  run_threads(even_scenario(), [](uint32_t r, fsdp_context *context) {
    Scenario setup = even_scenario();
    if (r) std::swap(setup.groups[0].params[0].optimizer, setup.groups[0].params[1].optimizer);
    const Rank rank(context, setup, false);
    require_error(fsdp_seal_model(rank.model), FSDP_MISMATCH,
                  {"parameter 'w' of group 'all'", "lr_scale 1, FSDP_OPTIMIZER_CALLER"});
  });
}

// The buckets differ, so a layout of two optimizers is another one. A model that names the model's own keeps its hash.
TEST(ParamOptimizerSeal, OnlyModelsWithBothKindsHaveAnotherLayout) {
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(2, 0, nullptr, &context));
  const auto hash = [&](fsdp_optimizer first, fsdp_optimizer second) {
    Scenario setup = even_scenario();
    setup.groups[0].params[0].optimizer = first, setup.groups[0].params[1].optimizer = second;
    const Rank rank(context, setup);
    return memory_of(rank.model, 0).layout_hash;
  };
  EXPECT_EQ(hash(FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_ADAMW), hash(0, 0));
  EXPECT_EQ(hash(0, FSDP_OPTIMIZER_ADAMW), hash(0, 0));
  EXPECT_EQ(hash(FSDP_OPTIMIZER_CALLER, FSDP_OPTIMIZER_CALLER), hash(0, 0));
  EXPECT_NE(hash(FSDP_OPTIMIZER_CALLER, 0), hash(0, 0));
  fsdp_destroy_context(context);
}

}  // namespace
