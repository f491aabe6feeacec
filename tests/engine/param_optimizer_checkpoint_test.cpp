// SPDX-License-Identifier: Apache-2.0
// Checkpoints of models with two optimizers: they have only the states that a parameter has.
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "param_optimizer.h"

using namespace harness;

namespace {

class ParamOptimizerCheckpoint : public Checkpoint, public testing::WithParamInterface<Form> {};
INSTANTIATE_TEST_SUITE_P(All, ParamOptimizerCheckpoint, testing::ValuesIn(mixed_forms),
                         [](const auto &info) { return std::string(info.param.name); });

// Two ranks save after two steps. Two ranks go on, and three ranks load and go on: the results have the same bits,
// since only rank 0 has gradients that are not 0.
TEST_P(ParamOptimizerCheckpoint, GoesOnOnOtherRanks) {
  Scenario saving = mixed_scenario(GetParam(), layouts[6]), loading = mixed_scenario(GetParam(), layouts[5]);
  saving.model.grad_op = loading.model.grad_op = FSDP_GRAD_OP_SUM;
  const auto step = [](Rank &rank, float value) {
    reduce_all(rank, rank.rank == 0 ? value : 0);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    update(rank);
  };
  std::vector<std::vector<float>> saved, expected;
  run(saving, "saving", [&](Rank &rank) {
    rank.load();
    step(rank, 0.3f), step(rank, -0.7f);
    FSDP(save(rank, path));
    const auto before = everything_of_two_optimizers(rank);
    step(rank, 0.9f);
    const auto after = everything_of_two_optimizers(rank);
    if (rank.rank == 0) saved = before, expected = after;
  });
  run(loading, "loading", [&](Rank &rank) {
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, 0, &loaded));
    REQUIRE(loaded.missing_tensors == 0 && loaded.unexpected_tensors == 0);
    REQUIRE(same_bits(everything_of_two_optimizers(rank), saved));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(rank.stats().step == 2);
    step(rank, 0.9f);
    REQUIRE(same_bits(everything_of_two_optimizers(rank), expected));
    FSDP(fsdp_check_replicas(rank.model, 0, stream()));
  });
}

// Groups may have meshes of their own, whose parameters have other names on other ranks.
TEST_F(Checkpoint, OfExpertsOfTwoOptimizersIsReadBack) {
  for (const fsdp_optimizer optimizer : {FSDP_OPTIMIZER_ADAMW, FSDP_OPTIMIZER_ADAMW_8BIT}) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
    setup.model.optimizer = optimizer;
    setup.groups = {{"dense", {{"w", {64, 96}}, {"b", {24}}}}, {"experts", {{"e", {64, 96}}, {"f", {64, 96}}}}};
    setup.groups[0].params[0].optimizer = setup.groups[1].params[1].optimizer = FSDP_OPTIMIZER_CALLER;
    setup.groups[1].meshes = 2;
    const std::string folder = path + "/" + std::to_string(optimizer);
    std::mutex mutex;
    std::map<uint32_t, std::vector<std::vector<float>>> saved;
    run(setup, "saved", [&](Rank &rank) {
      rank.load();
      reduce_all(rank, 0.3f * static_cast<float>(rank.rank + 1));
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      update(rank);
      FSDP(save(rank, folder));
      const auto all = everything_of_two_optimizers(rank);
      const std::lock_guard lock(mutex);
      saved[rank.rank] = all;
    });
    run(setup, "loaded", [&](Rank &rank) {
      FSDP(load(rank, folder));
      REQUIRE(same_bits(everything_of_two_optimizers(rank), saved[rank.rank]));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      FSDP(fsdp_check_replicas(rank.model, 0, stream()));
    });
  }
}

// The names of the states in a checkpoint.
std::vector<std::string> names_of_states(const std::string &manifest) {
  std::vector<std::string> names;
  for (size_t at = 0; (at = manifest.find("\"state.", at)) != std::string::npos; ++at)
    names.push_back(manifest.substr(at + 1, manifest.find('"', at + 1) - at - 1));
  std::ranges::sort(names);
  names.erase(std::ranges::unique(names).begin(), names.end());
  return names;
}

TEST_F(Checkpoint, OfTwoOptimizersHasNoOtherStates) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"all", {{"w", {64, 32}}, {"b", {1024}}, {"frozen", {8}, FSDP_FLOAT32, FSDP_PARAM_FROZEN}}}};
  setup.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path, 1));
  });
  std::string all;
  for (const auto &[name, text] : files(names()[0]))
    if (name.ends_with(".json")) all += text;
  const std::vector<std::string> expected = {"state.b.exp_avg", "state.b.exp_avg_sq", "state.b.step",
                                             "state.w.momentum"};
  EXPECT_EQ(names_of_states(all), expected);
}

// A parameter that changes its optimizer lacks states in the checkpoint, which then has others of it.
TEST_F(Checkpoint, OfOneOptimizerNamesTheStatesThatDoNotFit) {
  Scenario mixed = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), adamw = mixed;
  mixed.groups = adamw.groups = {{"all", {{"w", {64, 32}}, {"b", {1024}}}}};
  mixed.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  std::vector<float> weights, average;
  run(adamw, "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path, 1));
    const auto all = everything(rank);
    if (rank.rank == 0) weights = all[0], average = all[4];
  });
  run(mixed, "loaded", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const std::vector<float> momentum = read_state(rank, 0, 0, "momentum");
    FSDP(fsdp_begin_update(rank.model, stream()));
    require_error(load(rank, path), FSDP_INVALID_ARGUMENT, {"state.w.momentum", "FSDP_LOAD_ALLOW_MISSING"});
    require_error(load(rank, path, FSDP_LOAD_ALLOW_MISSING), FSDP_INVALID_ARGUMENT,
                  {"state.w.exp_avg", "FSDP_LOAD_ALLOW_UNEXPECTED"});
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED, &loaded));
    REQUIRE(loaded.missing_tensors == 1 && loaded.unexpected_tensors == 3);
    REQUIRE(same_bits({rank.read(0, 0), read_state(rank, 0, 0, "momentum"), read_state(rank, 0, 1, "exp_avg")},
                      {weights, momentum, average}));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// Published versions are the steps of a model without a parameter that AdamW updates. AdamW's number of steps is not
// in its checkpoints.
TEST_F(Checkpoint, OfAModelWithoutAParameterOfAdamWCountsVersions) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"all", {{"w", {64, 32}}}}};
  setup.groups[0].params[0].optimizer = FSDP_OPTIMIZER_CALLER;
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    for (uint32_t number = 0; number < 3; ++number) clean_step(rank, number);
    FSDP(save(rank, path));
  });
  run(setup, "loaded", [&](Rank &rank) {
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    clean_step(rank, 3);
    FSDP(save(rank, path));
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"step-0000000003", "step-0000000004"}));
}

}  // namespace
