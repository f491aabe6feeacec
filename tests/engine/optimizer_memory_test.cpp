// SPDX-License-Identifier: Apache-2.0
// Main weights in two halves or in bf16 alone, and AdamW's states in 8 bits. The results have the bits of one process
// for every rank count, strategy and mesh, and memory is as large as planned.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <mutex>

#include "element.h"
#include "misuse.h"
#include "optimizer_memory.h"

using namespace harness;

namespace {

using Combination = std::tuple<Form, Layout>;
std::string name_of(const testing::TestParamInfo<Combination> &info) {
  return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name;
}

class OptimizerMemory : public testing::TestWithParam<Combination> {};
INSTANTIATE_TEST_SUITE_P(All, OptimizerMemory, testing::Combine(testing::ValuesIn(forms), testing::ValuesIn(layouts)),
                         name_of);

TEST_P(OptimizerMemory, HasTheReferencesBits) {
  const auto &[form, layout] = GetParam();
  const Scenario setup = scenario_by(form, layout);
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

class OptimizerMemoryForms : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(All, OptimizerMemoryForms, testing::ValuesIn(forms),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(OptimizerMemoryForms, ProcessesHaveTheReferencesBits) {
  const Scenario setup = scenario_by(GetParam(), layouts[5]);
  EXPECT_EQ(difference(setup, train_processes(setup)), "");
}

TEST_P(OptimizerMemoryForms, OverlapAndDelaysChangeNoBit) {
  Scenario setup = scenario_by(GetParam(), layouts[6]);
  setup.microbatches = 2;
  setup.context.debug_delay_us = 300;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
  setup.context.debug_delay_us = 0;
  setup.context.flags |= FSDP_CONTEXT_NO_OVERLAP;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

TEST_P(OptimizerMemoryForms, TheCallersFloatingPointModesChangeNoBit) {
  Scenario setup = scenario_by(GetParam(), layouts[5]);
  setup.flush_to_zero = true;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

// Quantized weights are made from fp32 main weights, whose states may be in 8 bits. A granule consists of whole blocks
// of the weights and of the states.
TEST(OptimizerMemoryQuantized, HasTheReferencesBits) {
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK, FSDP_QUANTIZE_FP8})
    for (const Layout &layout : {layouts[2], layouts[5], layouts[9]}) {
      Scenario setup = scenario_by(forms[0], layout);
      setup.groups = {{"all",
                       {quantized({"odd", {96, 160}, FSDP_BFLOAT16}, quantization),
                        quantized({"stack", {3, 128, 32}, FSDP_BFLOAT16}, quantization),
                        {"bias", {5000}, FSDP_BFLOAT16}}}};
      EXPECT_EQ(difference(setup, train_threads(setup)), "") << quantization << " " << layout.name;
    }
}

// ---- steps that leave parameters as they are ----

class OptimizerMemoryKept : public testing::TestWithParam<Form> {};
INSTANTIATE_TEST_SUITE_P(All, OptimizerMemoryKept, testing::ValuesIn(forms),
                         [](const auto &info) { return std::string(info.param.name); });

TEST_P(OptimizerMemoryKept, ADiscardedStepChangesNothing) {
  run(scenario_by(GetParam(), layouts[5]), "discarded", [](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const auto before = everything(rank);
    finish_step(rank, 1);
    FSDP(fsdp_discard_step(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), before));
    clean_step(rank, 1);
    REQUIRE(!same_bits(everything(rank), before));
  });
}

TEST_P(OptimizerMemoryKept, AnUntrainedParameterStaysAsItIs) {
  Scenario setup = one_parameter("w", 5000, GetParam(), seed);
  setup.groups[0].params.push_back({"x", {5000}, FSDP_BFLOAT16});
  run(setup, "untrained", [](Rank &rank) {
    rank.load();
    const std::vector<float> values(5000, 0.25F);
    const Placed placed(values);
    const auto step = [&](bool both) {
      const fsdp_grad grads[] = {{both ? placed.data() : nullptr, both ? 5000u : 0u, FSDP_FLOAT32, 0},
                                 {placed.data(), 5000, FSDP_FLOAT32, 0}};
      FSDP(fsdp_apply_grads(rank.model, grads, 2, sizeof *grads, 0.01, 0, nullptr, stream(), nullptr));
    };
    step(true);
    const std::vector<float> before = rank.read(0, 0), other = rank.read(0, 1);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    step(false);
    REQUIRE(same_bits({rank.read(0, 0)}, {before}) && !same_bits({rank.read(0, 1)}, {other}));
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 1));
    step(true);
    REQUIRE(!same_bits({rank.read(0, 0)}, {before}));
  });
}

// A step also publishes weights that it does not update, because they may have been loaded in the window.
TEST_P(OptimizerMemoryKept, WeightsLoadedInTheWindowOfAStepAreItsComputeWeights) {
  Scenario setup = one_parameter("w", 5120, GetParam(), seed);
  setup.groups[0].params.push_back({"x", {5120}, FSDP_BFLOAT16});
  run(setup, "loaded", [](Rank &rank) {
    rank.load();
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));  // with gradients of zeros
    const std::vector<float> values(5120, 0.625F);
    FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 5120, FSDP_EVERY_RANK, 0));
    FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, stream()));
    REQUIRE(same_bits({rank.view(0, 0, FSDP_EVAL)}, {values}));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, stream()));
  });
}

// One rank loads weights for all ranks. Then each rank loads its own rows again.
TEST_P(OptimizerMemoryKept, LoadedWeightsAreReadBack) {
  const Scenario setup = scenario_by(GetParam(), layouts[9]);
  run(setup, "loaded", [&](Rank &rank) {
    std::vector<float> values(40 * 256);
    for (uint64_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i)) * 3e-3F;
    FSDP(fsdp_load_param(rank.groups[1], 0, rank.rank == 1 ? values.data() : nullptr, FSDP_FLOAT32, values.size(), 1,
                         0));
    fsdp_chunk chunk = FSDP_CHUNK_INIT;
    FSDP(fsdp_get_chunk(rank.groups[1], 0, rank.rank, &chunk));
    const float *const rows = values.data() + chunk.row_offset * 256;
    FSDP(fsdp_load_chunk(rank.groups[1], 0, rows, FSDP_FLOAT32, chunk.row_offset, chunk.row_count, 0));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    if (GetParam().storage == FSDP_MAIN_NONE)
      for (float &value : values) value = round_to(value, FSDP_BFLOAT16);
    REQUIRE(same_bits({rank.read(1, 0)}, {values}));
    FSDP(fsdp_unshard(rank.groups[1], FSDP_EVAL, 0, stream()));
    const std::vector<float> computed = rank.view(1, 0, FSDP_EVAL);
    FSDP(fsdp_reshard(rank.groups[1], FSDP_EVAL, 0, stream()));
    for (float &value : values)
      value = GetParam().storage == FSDP_MAIN_SPLIT16 ? upper_half(value) : round_to(value, FSDP_BFLOAT16);
    REQUIRE(same_bits({computed}, {values}));
  });
}

// ---- memory ----

uint64_t bytes_of(const Form &form, fsdp_role role) {
  Scenario setup = scenario_by(form, layouts[0]);
  setup.groups = {{"all", {{"w", {512, 512}, FSDP_BFLOAT16}}}};
  setup.clip = 0;
  setup.steps = 1;
  const std::vector<Outcome> outcomes = train_threads(setup);
  EXPECT_EQ(outcomes[0].error, "");
  EXPECT_EQ(outcomes[0].memory.role_bytes[role], outcomes[0].stats.allocated_bytes[role]);
  return outcomes[0].memory.role_bytes[role];
}

TEST(OptimizerMemoryBytes, AreThoseOfTheForms) {
  constexpr uint64_t count = 512 * 512;
  EXPECT_EQ(bytes_of({"", 0, 0}, FSDP_ROLE_MAIN), 4 * count);
  EXPECT_EQ(bytes_of({"", 0, 0}, FSDP_ROLE_OPTIMIZER), 8 * count);
  for (const Form &form : forms) {
    const uint64_t main = form.storage == FSDP_MAIN_FLOAT32 ? 4 : form.storage == FSDP_MAIN_SPLIT16 ? 2 : 0;
    EXPECT_EQ(bytes_of(form, FSDP_ROLE_MAIN), main * count) << form.name;
    const bool codes = form.optimizer == FSDP_OPTIMIZER_ADAMW_8BIT;
    EXPECT_EQ(bytes_of(form, FSDP_ROLE_OPTIMIZER), codes ? 2 * count + 2 * count / 256 * 4 : 8 * count) << form.name;
  }
}

// ---- results that another program has computed ----

template <class T>
uint32_t crc_of(const std::vector<T> &values) {
  return crc32(values.data(), values.size() * sizeof(T));
}

// Weight i begins as ((3i) % 17 - 8) / 8; its gradient in step s is ((7i + s) % 23 - 11) / 32.
void train_known(Rank &rank, uint64_t count, uint32_t first_gradient, double decay) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = (static_cast<float>((3 * i) % 17) - 8) / 8;
  FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
  FSDP(fsdp_publish_weights(rank.model, stream()));
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.weight_decay = decay;
  for (uint32_t step = 0; step < 10; ++step) {
    for (uint64_t i = 0; i < count; ++i)
      values[i] = (static_cast<float>((7 * i + step + first_gradient) % 23) - 11) / 32;
    const Placed placed(values);
    const fsdp_grad grad = {placed.data(), count, FSDP_FLOAT32, 0};
    FSDP(fsdp_apply_grads(rank.model, &grad, 1, sizeof grad, 1e-3, 0, &options, stream(), nullptr));
  }
}

std::vector<uint16_t> upper_halves(const std::vector<float> &values) {
  std::vector<uint16_t> uppers;
  for (const float value : values) uppers.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
  return uppers;
}

TEST(OptimizerMemoryKnown, MainNoneHasTheBitsOfTheSpecification) {
  run(one_parameter("w", 5000, forms[3], 1234), "none", [](Rank &rank) {
    train_known(rank, 5000, 1, 0);
    const std::vector<uint16_t> weights = upper_halves(rank.read(0, 0));
    REQUIRE(crc_of(weights) == 0xDC685EE3);
    REQUIRE(weights[0] == 0xBF7F && weights[1] == 0xBF1F && weights[2] == 0xBE83 && weights[5] == 0x3F5E);
  });
}

TEST(OptimizerMemoryKnown, MainSplit16HasTheBitsOfFp32) {
  for (const Form &form : {Form{"", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW}, forms[1]})
    run(one_parameter("w", 5000, form, 0), "split16", [](Rank &rank) {
      train_known(rank, 5000, 0, 0.1);
      REQUIRE(crc_of(rank.read(0, 0)) == 0xEE967E8C);
      std::vector<float> state(5000);
      FSDP(fsdp_read_state(rank.groups[0], 0, "exp_avg", state.data(), FSDP_FLOAT32, 5000, FSDP_EVERY_RANK, 0));
      REQUIRE(crc_of(state) == 0x35E4969F);
      FSDP(fsdp_read_state(rank.groups[0], 0, "exp_avg_sq", state.data(), FSDP_FLOAT32, 5000, FSDP_EVERY_RANK, 0));
      REQUIRE(crc_of(state) == 0xDA2E3CF1);
    });
}

// A whole state as it is kept: its codes, or its scales.
template <class T>
std::vector<T> kept_state(const Rank &rank, const char *name, fsdp_dtype dtype) {
  std::vector<T> all;
  for (const fsdp_shard &shard : rank.shards()) {
    (void)shard;
    fsdp_tensor state = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_shard_state(rank.model, 0, name, &state));
    REQUIRE(state.dtype == dtype);
    all.resize(state.element_count);
    copy_out(all.data(), state.data, all.size() * sizeof(T));
  }
  return all;
}

TEST(OptimizerMemoryKnown, CodesAreThoseOfTheSpecification) {
  Scenario setup = one_parameter("w", 5120, forms[0], 0);
  setup.ranks = 1;
  setup.model.grad_factor = 1;
  run(setup, "8-bit", [](Rank &rank) {
    train_known(rank, 5120, 1, 0);
    REQUIRE(crc_of(rank.read(0, 0)) == 0x6B4369FA);
    REQUIRE(crc_of(kept_state<uint8_t>(rank, "exp_avg", FSDP_UINT8)) == 0xB5B37C59);
    REQUIRE(crc_of(kept_state<float>(rank, "exp_avg.absmax", FSDP_FLOAT32)) == 0xE94C2C04);
    REQUIRE(crc_of(kept_state<uint8_t>(rank, "exp_avg_sq", FSDP_UINT8)) == 0x0236E592);
    REQUIRE(crc_of(kept_state<float>(rank, "exp_avg_sq.absmax", FSDP_FLOAT32)) == 0xDB5DEF39);
  });
}

TEST(OptimizerMemoryKnown, CodesBeginAtZero) {
  for (uint32_t ranks : {1u, 2u}) {
    Scenario setup = one_parameter("w", 5120, forms[0], 0);
    setup.ranks = ranks;
    run(setup, "zeros", [](Rank &rank) {
      for (const char *name : states) {
        std::vector<float> state(5120, 1);
        FSDP(fsdp_read_state(rank.groups[0], 0, name, state.data(), FSDP_FLOAT32, 5120, FSDP_EVERY_RANK, 0));
        for (const float number : state) REQUIRE(std::bit_cast<uint32_t>(number) == 0);
      }
      FSDP(fsdp_publish_weights(rank.model, stream()));
    });
  }
}

// ---- an optimizer of the caller's own ----

TEST(OptimizerMemoryCaller, RoundsWithTheBitsOfTheSpecification) {
  Scenario setup = one_parameter("layers.0.attention.wq", 5000, {"", FSDP_MAIN_NONE, FSDP_OPTIMIZER_CALLER}, seed);
  run(setup, "caller", [](Rank &rank) {
    for (const fsdp_shard &shard : rank.shards()) {
      REQUIRE(shard.main_weight_dtype == FSDP_BFLOAT16 && shard.main_weight != nullptr);
      std::vector<float> values(shard.element_count);
      for (uint64_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i + shard.element_offset));
      const Placed placed(values);
      FSDP(fsdp_round_stochastic(shard.group, shard.param_index, shard.element_offset,
                                 static_cast<const float *>(placed.data()), shard.main_weight, values.size(), 7,
                                 stream()));
    }
    FSDP(fsdp_publish_weights(rank.model, stream()));
    const std::vector<float> found = rank.read(0, 0);
    for (uint64_t i = 0; i < found.size(); ++i)
      REQUIRE(found[i] == round_randomly(std::sin(static_cast<float>(i)), seed, "layers.0.attention.wq", i, 7));
  });
}

// ---- shards ----

TEST(OptimizerMemoryShards, HaveNoAddressOfSplitWeights) {
  run(scenario_by(forms[1], layouts[5]), "split16", [](Rank &rank) {
    rank.load();
    for (const fsdp_shard &shard : rank.shards()) {
      const bool is_fp32 = std::string(shard.name) == "gain" || std::string(shard.name) == "head";
      REQUIRE((shard.main_weight != nullptr) == is_fp32);
      REQUIRE(shard.main_weight_dtype == (is_fp32 ? FSDP_FLOAT32 + 0 : 0));
      REQUIRE(shard.main_grad != nullptr && shard.main_grad_dtype == FSDP_FLOAT32);
    }
  });
}

// A group may choose its own storage.
TEST(OptimizerMemoryShards, HaveTheStorageOfTheirGroup) {
  Scenario setup = scenario_by(forms[1], layouts[5]);
  setup.groups[0].options.main_storage = FSDP_MAIN_NONE;
  setup.groups[2].options.main_storage = FSDP_MAIN_FLOAT32;
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

// ---- boxes ----

// If some columns of a matrix are a parameter of their own, they are rounded with the random bits that they have in the
// whole matrix.
TEST(OptimizerMemoryBoxes, AreRoundedAsPartsOfTheWhole) {
  constexpr uint64_t rows = 12, columns = 40, first = 8, some = 24;
  Scenario whole = one_parameter("w", 0, forms[3], seed), box = whole;
  whole.ranks = box.ranks = 1;
  whole.groups[0].params[0].shape = {rows, columns};
  box.groups[0].params[0].shape = {rows, some};
  box.groups[0].params[0].global_shape = {rows, columns};
  box.groups[0].params[0].global_offset = {0, first};
  std::vector<float> of_whole, of_box;
  const auto train_one = [&](const Scenario &setup, uint64_t skipped, std::vector<float> &result) {
    run(setup, "box", [&](Rank &rank) {
      const ParamDef &param = rank.def(0).params[0];
      const auto number = [&](uint64_t i) { return i / param.shape[1] * columns + i % param.shape[1] + skipped; };
      std::vector<float> values(param.count());
      for (uint64_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(number(i)));
      FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      for (uint64_t i = 0; i < values.size(); ++i) values[i] = std::cos(static_cast<float>(number(i)));
      const Placed placed(values);
      const fsdp_grad grad = {placed.data(), values.size(), FSDP_FLOAT32, 0};
      FSDP(fsdp_apply_grads(rank.model, &grad, 1, sizeof grad, 1e-2, 0, nullptr, stream(), nullptr));
      result = rank.read(0, 0);
    });
  };
  train_one(whole, 0, of_whole);
  train_one(box, first, of_box);
  ASSERT_EQ(of_box.size(), rows * some);
  for (uint64_t i = 0; i < of_box.size(); ++i)
    EXPECT_EQ(of_box[i], of_whole[i / some * columns + i % some + first]) << i;
}

// ---- replicas ----

// The difference is in planes that only the new forms have: weights differ only in their lower halves.
std::string find_drift(const Form &form, const char *state, float first, float second) {
  Scenario setup = one_parameter("w", 5120, form, 0);
  setup.model.strategy = FSDP_STRATEGY_NO_SHARD;
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        const Rank rank(context, setup);
        const std::vector<float> values(5120, rank.rank == 0 ? first : second);
        FSDP(state ? fsdp_load_state(rank.groups[0], 0, state, values.data(), FSDP_FLOAT32, 5120, FSDP_EVERY_RANK, 0)
                   : fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 5120, FSDP_EVERY_RANK, 0));
        FSDP(fsdp_publish_weights(rank.model, stream()));
        FSDP(fsdp_check_replicas(rank.model, 0, stream()));
      },
      &errors);
  return errors.at(0);
}

TEST(OptimizerMemoryReplicas, DriftIsFoundInEachPlane) {
  EXPECT_EQ(find_drift(forms[1], nullptr, 1.0F, 1.0F), "");
  EXPECT_NE(find_drift(forms[1], nullptr, 1.0F, 1.001F).find("the rests of main weights of rank"), std::string::npos);
  EXPECT_EQ(find_drift(forms[0], "exp_avg", 0.5F, 0.5F), "");
  EXPECT_NE(find_drift(forms[0], "exp_avg", 0.5F, -0.5F).find("optimizer state 'exp_avg'"), std::string::npos);
  EXPECT_NE(find_drift(forms[0], "exp_avg_sq", 0.5F, 0.25F).find("scales of optimizer state 'exp_avg_sq'"),
            std::string::npos);
}

// ---- what is told ----

struct Told {
  std::mutex mutex;
  std::vector<std::string> lines;
  static void hook(void *data, fsdp_log_level level, const char *line) {
    auto *const told = static_cast<Told *>(data);
    const std::lock_guard lock(told->mutex);
    if (level == FSDP_LOG_INFO) told->lines.emplace_back(line);
  }
  void listen(Scenario &setup) {
    setup.context.log = hook, setup.context.log_data = this, setup.context.log_level = FSDP_LOG_INFO;
  }
  // The part of a line from the word on; empty if no line has it.
  std::string find(const std::string &word) const {
    for (const std::string &line : lines)
      if (line.find(word) != std::string::npos) return line.substr(line.find(word));
    return {};
  }
};

TEST(OptimizerMemoryLog, TellsWhatIsNotKeptAsDeclared) {
  Told told;
  Scenario setup = one_parameter("rows", 0, forms[0], 0);
  const auto box = [](const char *name, uint64_t rows) {
    return ParamDef{name, {rows, 512}, FSDP_BFLOAT16, 0, 0, 0, 0, {rows, 1024}, {0, 128}};
  };
  setup.groups[0].params = {{"rows", {64, 96}, FSDP_BFLOAT16},
                            {"blocks", {64, 96}, FSDP_BFLOAT16, 0, FSDP_GRANULE_BLOCK, 12},
                            {"usual", {64, 256}, FSDP_BFLOAT16},
                            quantized({"mx", {64, 96}, FSDP_BFLOAT16}, FSDP_QUANTIZE_MXFP8),
                            box("cut", 24),
                            box("small", 3),
                            box("own", 24)};
  setup.groups[0].params.back().optimizer = FSDP_OPTIMIZER_CALLER;
  told.listen(setup);
  run(setup, "told", [](Rank &rank) { rank.load(); });
  const auto line = [&](const char *name) { return told.find("parameter '" + std::string(name) + "'"); };
  const std::string by_states = ": a block of 256 elements with states in 8 bits keeps them together";
  EXPECT_EQ(line("rows"), "parameter 'rows' of group 'all': its granule is 8 rows, not 1" + by_states);
  EXPECT_EQ(line("blocks"), "parameter 'blocks' of group 'all': its granule is 24 rows, not 12" + by_states);
  EXPECT_EQ(line("usual"), "");
  EXPECT_EQ(line("mx"), "parameter 'mx' of group 'all': its granule is 32 rows, not 1: mxfp8 keeps them together");
  EXPECT_NE(line("cut").find("its states are fp32, since the blocks of such a box"), std::string::npos) << line("cut");
  EXPECT_EQ(line("small"), "") << "it is too small for codes, whatever its blocks are";
  EXPECT_EQ(line("own"), "") << "the caller updates it, so that it has no states of AdamW";
}

TEST_F(Checkpoint, OfAnotherSeedOrOfNumbersIsLogged) {
  Scenario saved = one_parameter("w", 5120, {"", FSDP_MAIN_NONE, FSDP_OPTIMIZER_ADAMW}, 7);
  run(saved, "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path));
  });
  for (const uint64_t other : {7u, 8u}) {
    Told told;
    Scenario loaded = one_parameter("w", 5120, forms[4], other);
    told.listen(loaded);
    run(loaded, "loaded", [&](Rank &rank) {
      FSDP(load(rank, path));
      FSDP(fsdp_publish_weights(rank.model, stream()));
    });
    EXPECT_EQ(told.find("the model was trained"),
              other == 7 ? "" : "the model was trained with rounding_seed 7 and has 8 here");
    EXPECT_NE(told.find("4 encoded from numbers: \"state.w.exp_avg.code\""), "");
  }
}

// ---- what is refused ----

std::vector<std::string> check_model(const Scenario &setup) {
  std::vector<std::string> problems;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup, false);
    fsdp_status sealed = fsdp_seal_model(rank.model);
    problems.push_back(sealed == FSDP_OK ? "" : last_message());
    FSDP(fsdp_close_context(context));
  });
  return problems;
}

TEST(OptimizerMemoryRefusals, NameTheParameterWhoseWeightsAreNotBf16) {
  for (const fsdp_main_storage storage : {FSDP_MAIN_SPLIT16, FSDP_MAIN_NONE}) {
    Scenario setup = one_parameter("w", 5000, {"", storage, FSDP_OPTIMIZER_ADAMW}, 0);
    setup.ranks = 1;
    setup.groups[0].params[0].dtype = FSDP_FLOAT16;
    for (const std::string &problem : check_model(setup))
      EXPECT_NE(problem.find("parameter 'w' of group 'all' is float16"), std::string::npos) << problem;
    setup.groups[0].params[0] = quantized({"w", {64, 64}, FSDP_BFLOAT16}, FSDP_QUANTIZE_MXFP8);
    for (const std::string &problem : check_model(setup))
      EXPECT_NE(problem.find("parameter 'w' of group 'all' is FSDP_QUANTIZE_MXFP8"), std::string::npos) << problem;
    setup.groups[0].params[0].flags = FSDP_PARAM_FROZEN;
    for (const std::string &problem : check_model(setup)) EXPECT_EQ(problem, "");
  }
}

TEST(OptimizerMemoryRefusals, ShowADifferenceBetweenRanks) {
  Scenario setup = scenario_by(forms[3], layouts[6]);
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t rank, fsdp_context *context) {
        Scenario own = setup;
        if (rank == 1) own.model.rounding_seed = 5;
        const Rank sealed(context, own);
      },
      &errors);
  for (const std::string &error : errors) EXPECT_NE(error.find("rounding seed 5"), std::string::npos) << error;
}

}  // namespace
