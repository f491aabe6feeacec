// SPDX-License-Identifier: Apache-2.0
// Checkpoints of main weights and states in fewer bits: on other ranks and meshes they have the same bits, and a
// checkpoint of one form loads into the others.
#include <gtest/gtest.h>

#include "element.h"
#include "optimizer_memory.h"

using namespace harness;

namespace {

std::vector<std::vector<float>> load_on(const Scenario &setup, const std::string &path, uint32_t flags = 0) {
  std::vector<std::vector<float>> all;
  run(setup, "loaded", [&](Rank &rank) {
    FSDP(load(rank, path, flags));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_check_replicas(rank.model, 0, stream()));
    const auto found = everything(rank);
    if (rank.rank == 0) all = found;
  });
  return all;
}

// If every row of a box consists of whole blocks of the whole tensor, the codes of the box are a part of the whole
// tensor's codes.
TEST_F(Checkpoint, OfCodesOfAWholeTensorIsLoadedByBoxes) {
  constexpr uint64_t rows = 24, columns = 1024;
  struct Cut {
    uint64_t row, column, rows, columns;
    bool has_codes;
  };
  Scenario whole = one_parameter("w", 0, forms[2], 0);
  whole.groups[0].params[0].shape = {rows, columns};
  std::vector<std::vector<float>> saved;
  run(whole, "whole", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  for (const Cut &cut : {Cut{0, 256, 24, 512, true}, Cut{8, 0, 16, 1024, true}, Cut{3, 768, 20, 256, true}}) {
    Scenario box = whole;
    ParamDef &param = box.groups[0].params[0];
    param.shape = {cut.rows, cut.columns}, param.global_shape = {rows, columns};
    param.global_offset = {cut.row, cut.column};
    auto expected = saved;
    for (auto &values : expected) {
      std::vector<float> part;
      for (uint64_t r = cut.row; r < cut.row + cut.rows; ++r)
        part.insert(part.end(), values.begin() + static_cast<long>(r * columns + cut.column),
                    values.begin() + static_cast<long>(r * columns + cut.column + cut.columns));
      values = part;
    }
    EXPECT_TRUE(same_bits(load_on(box, path), expected)) << cut.row << " " << cut.column;
  }
}

// If a box cuts blocks of the whole tensor, its own blocks are not blocks of the tensor. Its states then stay in fp32.
TEST(OptimizerMemoryBoxes, KeepFp32StatesWhereTheyCutBlocks) {
  Scenario setup = one_parameter("w", 0, forms[0], 0);
  ParamDef &param = setup.groups[0].params[0];
  param.shape = {24, 512}, param.global_shape = {24, 1024}, param.global_offset = {0, 128};
  run(setup, "cut", [](Rank &rank) {
    rank.load();
    fsdp_tensor state = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_shard_state(rank.model, 0, "exp_avg", &state));
    REQUIRE(state.dtype == FSDP_FLOAT32);
    require_error(fsdp_get_shard_state(rank.model, 0, "exp_avg.absmax", &state), FSDP_INVALID_ARGUMENT,
                  {"the shard of 'w' has no optimizer state 'exp_avg.absmax'", "'exp_avg', 'exp_avg_sq'"});
  });
}

class OptimizerMemoryCheckpoint : public Checkpoint, public testing::WithParamInterface<Form> {};
INSTANTIATE_TEST_SUITE_P(All, OptimizerMemoryCheckpoint, testing::ValuesIn(forms),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(OptimizerMemoryCheckpoint, HasTheSameBitsOnOtherRanks) {
  for (const Layout &layout : {layouts[8], layouts[9], layouts[5]}) {
    std::vector<std::vector<float>> saved;
    const std::string folder = path + "/" + layout.name;
    run(scenario_by(GetParam(), layout), "saved", [&](Rank &rank) {
      rank.load();
      for (uint32_t step = 0; step < 3; ++step) clean_step(rank, step);
      FSDP(save(rank, folder));
      const auto all = everything(rank);
      if (rank.rank == 0) saved = all;
    });
    for (const size_t other : {0, 1, 3, 6, 8, 9})
      for (const uint32_t flags : {0u, FSDP_LOAD_ONE_REPLICA + 0u})
        EXPECT_TRUE(same_bits(load_on(scenario_by(GetParam(), layouts[other]), folder, flags), saved))
            << layout.name << " on " << layouts[other].name;
  }
}

TEST_P(OptimizerMemoryCheckpoint, GoesOnAsIfItHadNotEnded) {
  const Scenario setup = scenario_by(GetParam(), layouts[9]);
  std::vector<std::vector<float>> straight, resumed;
  const auto keep = [](Rank &rank, std::vector<std::vector<float>> &to) {
    const auto all = everything(rank);
    if (rank.rank == 0) to = all;
  };
  run(setup, "straight", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 3; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    for (uint32_t step = 3; step < 6; ++step) clean_step(rank, step);
    keep(rank, straight);
  });
  run(setup, "resumed", [&](Rank &rank) {
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    for (uint32_t step = 3; step < 6; ++step) clean_step(rank, step);
    keep(rank, resumed);
  });
  EXPECT_TRUE(same_bits(straight, resumed));
}

// Replaces fp32 weights and states by what they become in the form of `setup`.
void store_as(const Scenario &setup, std::vector<std::vector<float>> &all) {
  size_t weight = 0, params = 0;
  for (const GroupDef &group : setup.groups) params += group.params.size();
  size_t state = params;
  for (const GroupDef &group : setup.groups)
    for (const ParamDef &param : group.params) {
      if (storage_of(setup, group, param) == FSDP_MAIN_NONE)
        for (float &value : all[weight]) value = round_to(value, FSDP_BFLOAT16);
      ++weight;
      for (const bool is_first : {true, false}) {
        if (has_codes(setup, param)) encode_and_decode(all[state], is_first);
        ++state;
      }
    }
}

TEST_P(OptimizerMemoryCheckpoint, LoadsCheckpointsOfFp32FromOneReplicaOrAll) {
  std::vector<std::vector<float>> saved;
  run(scenario_by({"", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW}, layouts[5]), "saved", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 3; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  const Scenario setup = scenario_by(GetParam(), layouts[8]);
  store_as(setup, saved);
  for (const uint32_t flags : {0u, FSDP_LOAD_ONE_REPLICA + 0u})
    EXPECT_TRUE(same_bits(load_on(setup, path, flags), saved)) << flags;
}

// The files of main weights in two halves are the same as those of fp32, and files of bf16 weights load into every
// form.
TEST_P(OptimizerMemoryCheckpoint, LoadsIntoTheOtherStorages) {
  std::vector<std::vector<float>> saved;
  run(scenario_by(GetParam(), layouts[5]), "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  for (const fsdp_main_storage storage : {FSDP_MAIN_FLOAT32, FSDP_MAIN_SPLIT16, FSDP_MAIN_NONE}) {
    const Scenario setup = scenario_by({"", storage, GetParam().optimizer}, layouts[6]);
    auto expected = saved;
    if (storage == FSDP_MAIN_NONE) {
      size_t weight = 0;
      for (const GroupDef &group : setup.groups)
        for (const ParamDef &param : group.params) {
          if (storage_of(setup, group, param) == FSDP_MAIN_NONE)
            for (float &value : expected[weight]) value = round_to(value, FSDP_BFLOAT16);
          ++weight;
        }
    }
    EXPECT_TRUE(same_bits(load_on(setup, path), expected)) << storage;
  }
}

}  // namespace
