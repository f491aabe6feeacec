// SPDX-License-Identifier: Apache-2.0
// Misuse of the forms of main weights and states (fsdp_main_storage, FSDP_OPTIMIZER_ADAMW_8BIT), and what a caller sees
// of a shard in each form.
#include "misuse.h"

using namespace harness;
using namespace misuse;

namespace {

// One group of a bf16 matrix and an fp32 vector.
Scenario narrow_setup(fsdp_main_storage storage, fsdp_optimizer optimizer = FSDP_OPTIMIZER_ADAMW) {
  Scenario setup;
  setup.ranks = 1;
  setup.groups = {{"alpha", {{"alpha.w", {16, 24}, FSDP_BFLOAT16}, {"alpha.b", {16}}}}};
  setup.model.main_storage = storage;
  setup.model.optimizer = optimizer;
  return setup;
}

fsdp_shard shard_of(const Solo &solo, uint64_t index) {
  fsdp_shard shard = FSDP_SHARD_INIT;
  FSDP(fsdp_get_shard(solo.model, index, &shard));
  return shard;
}

class MisusedStorage : public Declared {
 protected:
  // Another model in the place of the empty one.
  void declare(fsdp_main_storage storage, fsdp_optimizer optimizer = FSDP_OPTIMIZER_ADAMW) {
    fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
    options.main_storage = storage;
    options.optimizer = optimizer;
    fsdp_destroy_model(model);
    FSDP(fsdp_create_model(context, &options, &model));
  }
  std::string check() {
    uint64_t size = 0;
    FSDP(fsdp_check_model(model, nullptr, &size));
    std::string text(size, '\0');
    FSDP(fsdp_check_model(model, text.data(), &size));
    return text;
  }
};

TEST_F(MisusedStorage, TwoHalvesAreForAdamWAlone) {
  fsdp_model_options options = FSDP_MODEL_OPTIONS_INIT;
  options.main_storage = FSDP_MAIN_SPLIT16;
  options.optimizer = FSDP_OPTIMIZER_CALLER;
  fsdp_model *made = nullptr;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_model(context, &options, &made), "fsdp_create_model",
               "FSDP_MAIN_SPLIT16", "FSDP_OPTIMIZER_CALLER");
  EXPECT_EQ(made, nullptr);
  declare(0, FSDP_OPTIMIZER_CALLER);
  fsdp_group_options group = FSDP_GROUP_OPTIONS_INIT;
  group.main_storage = FSDP_MAIN_SPLIT16;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param()}, &group), "fsdp_create_group", "FSDP_MAIN_SPLIT16",
               "FSDP_OPTIMIZER_CALLER");
  group.main_storage = FSDP_MAIN_NONE;
  EXPECT_WORKS(add_group("g", {param()}, &group));
}

// fsdp_check_model reports before the seal what the seal refuses, and a group may have its own storage.
TEST_F(MisusedStorage, ParametersThatFitNoneAreNamed) {
  for (const fsdp_main_storage storage : {FSDP_MAIN_SPLIT16, FSDP_MAIN_NONE})
    for (const bool quantized : {false, true}) {
      declare(storage);
      fsdp_param wrong = param("wrong");
      wrong.dtype = FSDP_BFLOAT16;
      (quantized ? wrong.quantization : wrong.dtype) = quantized ? FSDP_QUANTIZE_FP8 + 0 : FSDP_FLOAT16 + 0;
      FSDP(add_group("g", {param("right"), wrong}));
      const std::string told = check();
      for (const char *word : {"'wrong'", "'g'", "main_storage"}) EXPECT_NE(told.find(word), std::string::npos) << told;
      EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "parameter 'wrong' of group 'g'", "main_storage");
      declare(storage);
      fsdp_group_options plain = FSDP_GROUP_OPTIONS_INIT;
      plain.main_storage = FSDP_MAIN_FLOAT32;
      FSDP(add_group("g", {param("right"), wrong}, &plain));
      EXPECT_EQ(check(), std::string(1, '\0'));
      EXPECT_WORKS(fsdp_seal_model(model));
    }
}

TEST_F(MisusedStorage, FrozenParametersAreOfAnyDtype) {
  declare(FSDP_MAIN_NONE);
  fsdp_param half = param("half"), codes = param("codes"), bytes = param("bytes");
  for (fsdp_param *one : {&half, &codes, &bytes}) one->flags = FSDP_PARAM_FROZEN;
  half.dtype = FSDP_FLOAT16;
  codes.quantization = FSDP_QUANTIZE_FP8;
  bytes.dtype = FSDP_UINT8;
  FSDP(add_group("g", {param("w"), half, codes, bytes}));
  EXPECT_WORKS(fsdp_seal_model(model));
}

TEST(StoredShard, SaysWhatItsMainWeightsAre) {
  for (const fsdp_main_storage storage : {FSDP_MAIN_FLOAT32, FSDP_MAIN_SPLIT16, FSDP_MAIN_NONE}) {
    Solo solo(State::sealed, narrow_setup(storage));
    const fsdp_shard matrix = shard_of(solo, 0), vector = shard_of(solo, 1);
    EXPECT_EQ(matrix.main_weight == nullptr, storage == FSDP_MAIN_SPLIT16);
    EXPECT_EQ(matrix.main_weight_dtype, storage == FSDP_MAIN_FLOAT32 ? FSDP_FLOAT32 + 0
                                        : storage == FSDP_MAIN_NONE  ? FSDP_BFLOAT16 + 0
                                                                     : 0);
    EXPECT_EQ(matrix.main_grad_dtype, FSDP_FLOAT32);
    EXPECT_NE(vector.main_weight, nullptr);
    EXPECT_EQ(vector.main_weight_dtype, FSDP_FLOAT32);
  }
}

// A parameter of fewer than 4,096 elements has fp32 states, and no scales.
TEST(StoredShard, HasCodesAndTheirScales) {
  Scenario setup;
  setup.ranks = 1;
  setup.groups = {{"alpha", {{"large", {33, 128}}, {"exact", {4096}}, {"small", {4095}}}}};
  setup.model.optimizer = FSDP_OPTIMIZER_ADAMW_8BIT;
  Solo solo(State::sealed, setup);
  for (const char *name : {"exp_avg", "exp_avg_sq"})
    for (uint64_t s = 0; s < 3; ++s) {
      fsdp_tensor state = FSDP_TENSOR_INIT, scales = FSDP_TENSOR_INIT;
      const uint64_t count = shard_of(solo, s).element_count;
      const std::string of_scales = std::string(name) + ".absmax";
      FSDP(fsdp_get_shard_state(solo.model, s, name, &state));
      EXPECT_EQ(state.element_count, count);
      EXPECT_EQ(state.dtype, s == 2 ? FSDP_FLOAT32 + 0 : FSDP_UINT8 + 0);
      if (s == 2) {
        EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_shard_state(solo.model, s, of_scales.c_str(), &scales), of_scales);
        continue;
      }
      FSDP(fsdp_get_shard_state(solo.model, s, of_scales.c_str(), &scales));
      EXPECT_EQ(scales.dtype, FSDP_FLOAT32);
      EXPECT_EQ(scales.element_count, (count + 255) / 256);
      EXPECT_EQ(state.shape[0], count);  // the addresses of sizes outlive the calls that gave them
      EXPECT_EQ(scales.shape[0], scales.element_count);
      // Zeros at first: the code of 0 is in the middle of the map that has a sign.
      EXPECT_EQ(static_cast<const uint8_t *>(state.data)[0], name == std::string("exp_avg") ? 127 : 0);
      EXPECT_EQ(static_cast<const float *>(scales.data)[0], 0.0f);
    }
}

fsdp_status round_into(const Solo &solo, uint64_t param, uint64_t offset, uint64_t count, const float *from, void *to) {
  return fsdp_round_stochastic(solo.group(0), param, offset, from, to, count, 1, nullptr);
}

TEST(MisusedRounding, InvalidArgumentsAreRefused) {
  Solo solo(State::sealed, narrow_setup(FSDP_MAIN_NONE, FSDP_OPTIMIZER_CALLER));
  const std::vector<float> from(400, 1.001953125f);
  std::vector<uint16_t> to(400, 7);
  const auto round = [&](uint64_t param, uint64_t offset, uint64_t count) {
    return round_into(solo, param, offset, count, from.data(), to.data());
  };
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, round_into(solo, 0, 0, 4, nullptr, to.data()), "fsdp_round_stochastic",
               "from is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, round_into(solo, 0, 0, 4, from.data(), nullptr), "to is NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, round(2, 0, 4), "param_index 2", "[0, 2)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, round(0, 0, 385), "384");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, round(0, 384, 1), "384");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, round(0, 1, UINT64_MAX), "384");
  EXPECT_EQ(to, std::vector<uint16_t>(400, 7));
  EXPECT_WORKS(round(0, 0, 384));
  EXPECT_TRUE(
      std::all_of(to.begin(), to.begin() + 384, [](uint16_t bits) { return bits == 0x3f80 || bits == 0x3f81; }));
  EXPECT_EQ(to[384], 7);
}

TEST(MisusedRounding, IsForTheWindowAndForWhatHasNoMainWeights) {
  const float from[4] = {};
  uint16_t to[4] = {7, 7, 7, 7};
  Solo open(State::sealed, narrow_setup(FSDP_MAIN_NONE, FSDP_OPTIMIZER_CALLER));
  EXPECT_FAILS(FSDP_INVALID_STATE, round_into(open, 1, 0, 4, from, to), "'alpha.b'", "FSDP_MAIN_NONE");
  for (const fsdp_main_storage storage : {FSDP_MAIN_FLOAT32, FSDP_MAIN_SPLIT16}) {
    Solo other(State::sealed, narrow_setup(storage));
    EXPECT_FAILS(FSDP_INVALID_STATE, round_into(other, 0, 0, 4, from, to), "'alpha.w'", "FSDP_MAIN_NONE");
  }
  Solo closed(State::published, narrow_setup(FSDP_MAIN_NONE));
  EXPECT_FAILS(FSDP_INVALID_STATE, round_into(closed, 0, 0, 4, from, to), "window is closed");
  Solo declared(State::declared, narrow_setup(FSDP_MAIN_NONE));
  EXPECT_FAILS(FSDP_INVALID_STATE, round_into(declared, 0, 0, 4, from, to), "not sealed");
  EXPECT_EQ(to[0], 7);
}

}  // namespace
