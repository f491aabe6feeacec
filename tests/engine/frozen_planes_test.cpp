// SPDX-License-Identifier: Apache-2.0
// FROZEN parameters that are codes and scales alone: loaded as numbers or as planes, read, and trained beside.
#include "../float_modes.h"
#include "element.h"
#include "frozen.h"
#include "train_as_planned.h"

using namespace harness;
using namespace misuse;

namespace {

ParamDef trained(ParamDef param, fsdp_quantization quantization) {
  param.quantization = quantization;
  return param;
}

// Adapters beside a base of each kind, trained codes among them, and a group that is frozen altogether.
Scenario adapted(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  setup.groups = {{"first",
                   {frozen({"base", {96, 64}, FSDP_BFLOAT16}, FSDP_QUANTIZE_MXFP8),
                    {"down", {8, 64}, FSDP_BFLOAT16},
                    {"up", {96, 8}, FSDP_BFLOAT16},
                    trained({"own", {64, 32}}, FSDP_QUANTIZE_MXFP8)}},
                  {"second",
                   {frozen({"blocks", {300, 70}}, FSDP_QUANTIZE_FP8_BLOCK),
                    frozen({"scaled", {37, 24}}, FSDP_QUANTIZE_FP8),
                    trained({"trained", {13, 9}}, FSDP_QUANTIZE_FP8),
                    {"plain", {24}, FSDP_BFLOAT16, FSDP_PARAM_FROZEN},
                    frozen({"one", {1, 77}}, FSDP_QUANTIZE_FP8)}},
                  {"third",
                   {frozen({"stack", {3, 32, 64}}, FSDP_QUANTIZE_MXFP8),
                    frozen({"cubes", {2, 128, 20}, FSDP_FLOAT32, 0, FSDP_GRANULE_TENSOR}, FSDP_QUANTIZE_FP8_BLOCK),
                    frozen({"scalar", {}}, FSDP_QUANTIZE_FP8)}}};
  return setup;
}

class FrozenBase : public testing::TestWithParam<std::tuple<uint32_t, fsdp_strategy>> {};

// In all views of all versions, and when it is read at the end, the base has the bits that were loaded.
TEST_P(FrozenBase, StaysWhatItIsWhileAdaptersTrain) {
  const auto [ranks, strategy] = GetParam();
  if ((is_sanitized() || on_gpu()) && ranks != 3) GTEST_SKIP() << "sanitizers and GPUs have one number of ranks";
  for (const auto mode : unshard_modes) {
    Scenario setup = adapted(strategy, ranks, mode);
    setup.microbatches = 2;
    setup.eval = true;
    EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode;
  }
}

INSTANTIATE_TEST_SUITE_P(OnOneToThreeRanks, FrozenBase,
                         testing::Combine(testing::Values(1u, 2u, 3u), testing::ValuesIn(strategies)));

// Replicas, states over replicas, hosts; processes; debug mode; options of scales.
TEST(FrozenBases, TrainAlikeOverTwoAxesInProcessesAndInDebugMode) {
  for (const auto mode : unshard_modes)
    for (const int kind : {0, 1, 2}) {
      if (on_gpu() && mode == FSDP_UNSHARD_MAPPED) continue;
      Scenario setup = adapted(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, mode);
      if (kind == 2)
        setup.context.ranks_per_host = 2;
      else
        setup.mesh.replicate_size = setup.mesh.shard_size = 2;
      if (kind == 1) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
      EXPECT_EQ(train_as_planned(setup), "") << "mode " << mode << ", kind " << kind;
    }
  if (!on_gpu()) {
    EXPECT_EQ(train_as_planned(adapted(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_MAPPED), true), "");
  }
  Scenario debug = adapted(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  debug.context.flags = FSDP_CONTEXT_DEBUG;
  debug.model.scale_rounding = FSDP_SCALE_POWER_OF_TWO;
  debug.model.quantize_from = FSDP_BFLOAT16;
  debug.model.scale_rule = FSDP_SCALE_FLOOR;
  EXPECT_EQ(train_as_planned(debug), "");
}

// A frozen base keeps its codes and scales once, and has no main weights and no states.
TEST(FrozenBases, KeepOnlyCodesAndScales) {
  Scenario setup = frozen_setup(frozen({"w", {256, 256}}, FSDP_QUANTIZE_FP8_BLOCK), 2);
  setup.steps = 0;
  const auto outcomes = train_threads(setup);
  ASSERT_EQ(outcomes[1].error, "");
  EXPECT_EQ(outcomes[1].memory.role_bytes[FSDP_ROLE_COMPUTE], (65536 + 16) / 2u);
  for (const fsdp_role role : {FSDP_ROLE_MAIN, FSDP_ROLE_GRAD, FSDP_ROLE_OPTIMIZER, FSDP_ROLE_REDUCE})
    EXPECT_EQ(outcomes[1].memory.role_bytes[role], 0u) << role;
}

struct Options {
  fsdp_scale_rounding rounding;
  fsdp_scale_rule rule;
  fsdp_dtype from;
};

// The planes equal those of a trained twin with the same numbers in the same model. Some runs include Inf and NaN.
TEST(FrozenPlanes, AreThoseOfAPublishFromEveryDtype) {
  Sample sample(7);
  for (const fsdp_quantization quantization : quantizations)
    for (const Options &options : {Options{FSDP_SCALE_EXACT, FSDP_SCALE_ROUND_UP, FSDP_FLOAT32},
                                   Options{FSDP_SCALE_POWER_OF_TWO, FSDP_SCALE_FLOOR, FSDP_BFLOAT16}})
      for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16})
        for (uint32_t ranks = 1; ranks <= 3; ++ranks)
          for (const bool everybody : {false, true}) {
            if (!sample.takes_next() || (on_gpu() && (ranks != 2 || everybody || options.from == FSDP_FLOAT32)))
              continue;
            Scenario setup = frozen_setup(frozen({"w", {288, 288}}, quantization), ranks);
            setup.groups[0].params.push_back(trained({"twin", {288, 288}}, quantization));
            setup.model.scale_rounding = options.rounding;
            setup.model.scale_rule = options.rule;
            setup.model.quantize_from = options.from;
            std::vector<float> values = awkward_values(288 * 288, 5);
            if (ranks == 2) values[40'000] = std::nanf("");
            std::vector<uint8_t> data(values.size() * fsdp_get_dtype_size(dtype));
            for (uint64_t i = 0; i < values.size(); ++i) store_element(data.data(), dtype, i, values[i]);
            run(setup, "kind " + std::to_string(quantization) + ", dtype " + std::to_string(dtype), [&](Rank &rank) {
              const int32_t root = everybody ? FSDP_EVERY_RANK : static_cast<int32_t>(ranks) - 1;
              const bool gives = everybody || root == static_cast<int32_t>(rank.rank);
              for (const uint64_t param : {0, 1})
                FSDP(fsdp_load_param(rank.groups[0], param, gives ? data.data() : nullptr, dtype, values.size(), root,
                                     0));
              publish(rank);
              REQUIRE(stored_planes(rank, 0, 0) == stored_planes(rank, 0, 1));
              FSDP(fsdp_check_replicas(rank.model, 0, stream()));
            });
          }
}

// Numbers of one scale that ranks do not exchange: the largest is on one of them.
TEST(FrozenPlanes, KnownMatrixHasKnownCodesOfOneScale) {
  const std::vector<float> values{3, -3, 0.001f, 5, 4.99f, 1e-6f};
  for (uint32_t ranks = 1; ranks <= 3; ++ranks)
    run(frozen_setup(frozen({"w", {2, 3}}, FSDP_QUANTIZE_FP8), ranks), "", [&](Rank &rank) {
      FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
      publish(rank);
      Planes planes = stored_planes(rank, 0, 0);
      REQUIRE(planes[FSDP_PLANE_ROW] == (std::vector<uint8_t>{0x78, 0xf8, 0x1b, 0x7e, 0x7e, 0x00}));
      REQUIRE(planes[FSDP_PLANE_ROW_SCALE] == (std::vector<uint8_t>{0x6e, 0xdb, 0x36, 0x3c}));
    });
}

// Codes times scales of the ROW planes, rounded once, on every rank or on one.
TEST(FrozenPlanes, AreReadAsNumbers) {
  for (const fsdp_quantization quantization : quantizations)
    for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16})
      for (uint32_t ranks = 1; ranks <= 3; ++ranks) {
        if ((is_sanitized() && ranks == 2) || (on_gpu() && (ranks != 3 || dtype == FSDP_FLOAT16))) continue;
        const ParamDef w = frozen({"w", {2, 128, 160}}, quantization);
        const Planes planes = random_planes(w, 3);
        Blocks rows{planes.at(FSDP_PLANE_ROW), {}};
        const auto &scales = planes.at(FSDP_PLANE_ROW_SCALE);
        const fsdp_dtype scale_dtype = quantization == FSDP_QUANTIZE_MXFP8 ? FSDP_E8M0 + 0 : FSDP_FLOAT32 + 0;
        for (uint64_t i = 0; i < scales.size() / fsdp_get_dtype_size(scale_dtype); ++i)
          rows.scales.push_back(load_element(scales.data(), scale_dtype, i));
        const std::vector<float> expected = dequantize(rows, w.shape, block_of(quantization, false));
        run(frozen_setup(w, ranks), "kind " + std::to_string(quantization), [&](Rank &rank) {
          load_planes(rank, 0, 0, planes);
          publish(rank);
          for (const int32_t root : {FSDP_EVERY_RANK + 0, static_cast<int32_t>(ranks) - 1}) {
            const bool reads = root == FSDP_EVERY_RANK || root == static_cast<int32_t>(rank.rank);
            std::vector<uint8_t> data(expected.size() * fsdp_get_dtype_size(dtype), 0x5a);
            FSDP(fsdp_read_param(rank.groups[0], 0, data.data(), dtype, expected.size(), root, 0));
            uint64_t wrong = 0;
            for (uint64_t i = 0; i < expected.size(); ++i) {
              const float found = load_element(data.data(), dtype, i), wanted = round_to(expected[i], dtype);
              wrong += reads && !(found == wanted || (std::isnan(found) && std::isnan(expected[i])));
            }
            REQUIRE(wrong == 0);
            REQUIRE(reads || data == std::vector<uint8_t>(data.size(), 0x5a));
          }
        });
      }
}

// ... to the last subnormal, whatever the caller's modes.
TEST(FrozenPlanes, AreReadWithSubnormals) {
  Scenario setup = adapted(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  setup.flush_to_zero = true;
  setup.steps = 1;
  EXPECT_EQ(train_as_planned(setup), "");
  run(frozen_setup(frozen({"w", {1, 2}}, FSDP_QUANTIZE_FP8), 1), "", [&](Rank &rank) {
    const float scale = 0x1p-140f;
    std::vector<uint8_t> bytes(4);
    std::memcpy(bytes.data(), &scale, 4);
    load_planes(rank, 0, 0, {{FSDP_PLANE_ROW, {0x38, 0x08}}, {FSDP_PLANE_ROW_SCALE, bytes}});
#if defined(FSDP_HAS_FLOAT_MODES)
    const float_modes::Modes modes = float_modes::get();
    float_modes::set(modes | float_modes::flush);
    const std::vector<float> read = rank.read(0, 0);
    float_modes::set(modes);
#else
    const std::vector<float> read = rank.read(0, 0);
#endif
    REQUIRE(read[0] == 0x1p-140f && read[1] == 0x1p-146f);
  });
}

TEST(FrozenPlanes, AreLoadedBitForBit) {
  for (const fsdp_quantization quantization : quantizations)
    for (uint32_t ranks = 1; ranks <= 3; ++ranks)
      for (const auto mode : unshard_modes)
        for (const bool everybody : {false, true}) {
          if (on_gpu() && (ranks == 2 || mode == FSDP_UNSHARD_MAPPED)) continue;
          const std::vector<ParamDef> params{frozen({"a", {320, 1024}}, quantization),
                                             frozen({"b", {64, 96}}, quantization)};
          Scenario setup = frozen_setup(params[0], ranks, mode);
          setup.groups[0].params.push_back(params[1]);
          setup.groups[0].params.push_back({"adapter", {8, 8}});
          run(setup, "kind " + std::to_string(quantization), [&](Rank &rank) {
            const int32_t root = everybody ? FSDP_EVERY_RANK : static_cast<int32_t>(ranks) - 1;
            for (const uint32_t p : {0, 1}) load_planes(rank, 0, p, random_planes(params[p], p), root);
            publish(rank);
            for (const uint32_t p : {0, 1}) REQUIRE(stored_planes(rank, 0, p) == random_planes(params[p], p));
            FSDP(fsdp_check_replicas(rank.model, 0, stream()));
          });
        }
}

// Only the root knows what it has, and all ranks learn what is wrong with it. Names are compared to their ends.
TEST(Loads, UseTheRootsData) {
  const std::string long_name = "transformer.layers.10.self_attention.query.weight.";
  Scenario setup;
  setup.ranks = 3;
  setup.groups = {{"g",
                   {{.name = long_name + "a", .shape = {5, 7}, .dtype = FSDP_BFLOAT16},
                    {.name = long_name + "b", .shape = {5, 7}, .dtype = FSDP_BFLOAT16}}}};
  std::vector<uint16_t> values(35);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3f80 + i);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    const Rank rank(context, setup);
    const uint16_t *const data = r == 1 ? values.data() : nullptr;
    for (const uint64_t count : {35, 0})  // of those without data
      FSDP(fsdp_load_param(rank.groups[0], 1, data, r == 1 ? FSDP_BFLOAT16 : FSDP_FLOAT32, r == 1 ? 35 : count, 1, 0));
    std::vector<uint16_t> seen(35);
    FSDP(fsdp_read_param(rank.groups[0], 1, seen.data(), FSDP_BFLOAT16, 35, FSDP_EVERY_RANK, 0));
    REQUIRE(seen == values);
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(rank.groups[0], 1, data, FSDP_BFLOAT16, 34, 1, 0),
                 r == 1 ? "element_count is 34" : "the root, rank 1, has no data",
                 "has 35 elements, element_count is 34");
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_last_error(context, &error));
    EXPECT_EQ(error.rank, 1);
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_state(rank.groups[0], 1, "exp_avg", nullptr, FSDP_FLOAT32, 35, 1, 0),
                 "data is NULL", "query.weight.b");
    FSDP(fsdp_load_param(rank.groups[0], 0, data, FSDP_BFLOAT16, 35, 1, 0));
    EXPECT_FAILS(FSDP_MISMATCH, fsdp_load_param(rank.groups[0], r == 2, data, FSDP_BFLOAT16, 35, 1, 0),
                 "fsdp_load_param from rank 1 of transformer.layers.1");
  });
}

// Each rank loads its own rows, in two parts of whole blocks. A stack is loaded matrix by matrix.
TEST(FrozenPlanes, AreMadeOfWholeBlocksOfRows) {
  for (const std::vector<uint64_t> &shape : {std::vector<uint64_t>{544, 160}, {6, 128, 32}})
    for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK})
      for (uint32_t ranks = 1; ranks <= 3; ++ranks) {
        Scenario setup = frozen_setup(frozen({"w", shape}, quantization), ranks);
        setup.groups[0].params.push_back(frozen({"twin", shape}, quantization));
        const uint64_t row = setup.groups[0].params[0].count() / shape[0], block = shape.size() > 2 ? 1 : 128;
        const std::vector<float> values = awkward_values(row * shape[0], 9);
        run(setup, "kind " + std::to_string(quantization), [&](Rank &rank) {
          fsdp_group *const g = rank.groups[0];
          fsdp_chunk chunk = FSDP_CHUNK_INIT;
          FSDP(fsdp_get_chunk(g, 0, rank.rank, &chunk));
          const uint64_t half = chunk.row_count / 2 / block * block;
          const auto load_rows = [&](uint64_t first, uint64_t count) {
            return fsdp_load_chunk(g, 0, values.data() + first * row, FSDP_FLOAT32, first, count, 0);
          };
          FSDP(load_rows(chunk.row_offset + half, chunk.row_count - half));
          FSDP(load_rows(chunk.row_offset, half));
          FSDP(fsdp_load_param(g, 1, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
          if (shape.size() == 2 && chunk.row_count) {
            EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load_rows(chunk.row_offset, 31), "fsdp_load_chunk", "'w'",
                         "not whole blocks of", quantization == FSDP_QUANTIZE_MXFP8 ? "32 rows" : "128 rows");
          }
          publish(rank);
          REQUIRE(stored_planes(rank, 0, 0) == stored_planes(rank, 0, 1));
        });
      }
}

// The number of allocations until the end of the seal.
uint64_t allocations_of(const Scenario &setup) {
  std::atomic<uint64_t> count = 0;
  run(setup, "sealed", [&](Rank &rank) { count = rank.stats().allocations; });
  return count;
}

// The n-th allocation is made by the load and fails: the old planes stay, and the next load succeeds. A rank that
// stores no part of the parameter needs no memory, but learns of the failure if the ranks load together.
TEST(FrozenPlanes, StayAsTheyWereWhenMemoryRunsOut) {
  const ParamDef w = frozen({"w", {100, 8}}, FSDP_QUANTIZE_FP8_BLOCK);
  const std::vector<float> values = awkward_values(800, 1);
  for (const bool everybody : {false, true}) {
    Scenario setup = frozen_setup(w, 2);
    setup.context.debug_failed_allocation = allocations_of(setup) + 1;
    std::atomic<int> failed = 0;
    run(setup, "", [&](Rank &rank) {
      load_planes(rank, 0, 0, random_planes(w, 4));
      const auto load = [&] {
        return fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 800, everybody ? FSDP_EVERY_RANK : 1, 0);
      };
      if (const fsdp_status status = load(); status != FSDP_OK) {
        ++failed;
        EXPECT_FAILS(FSDP_OUT_OF_MEMORY, status, "numbers on their way into planes", "debug_failed_allocation");
      }
      publish(rank);
      REQUIRE(stored_planes(rank, 0, 0) == random_planes(w, 4));
      FSDP(fsdp_begin_update(rank.model, stream()));
      FSDP(load());
      publish(rank);
      const Blocks expected = quantize_blocks(values, w.shape, FSDP_SCALE_EXACT, FSDP_FLOAT32);
      REQUIRE(stored_planes(rank, 0, 0)[FSDP_PLANE_ROW] == expected.codes);
    });
    EXPECT_EQ(failed, everybody ? 1 : 2);
  }
}

// One reads, and both learn that it has no memory.
TEST(FrozenPlanes, AreNotReadWithoutMemory) {
  const ParamDef w = frozen({"w", {100, 8}}, FSDP_QUANTIZE_FP8_BLOCK);
  Scenario setup = frozen_setup(w, 2);
  setup.context.debug_failed_allocation = allocations_of(setup) + 1;
  run(setup, "", [&](Rank &rank) {
    load_planes(rank, 0, 0, random_planes(w, 4));
    std::vector<float> data(800, 7);
    const auto read = [&] { return fsdp_read_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, 800, 1, 0); };
    EXPECT_FAILS(FSDP_OUT_OF_MEMORY, read(), "planes that are read", "debug_failed_allocation");
    REQUIRE(data == std::vector<float>(800, 7));
    FSDP(read());
  });
}

TEST(FrozenMisuse, PlanesThatTheParameterLacksAreRefused) {
  Scenario setup = frozen_setup(frozen({"w", {32, 64}}, FSDP_QUANTIZE_MXFP8), 1);
  setup.groups[0].params.push_back(trained({"own", {32, 64}}, FSDP_QUANTIZE_MXFP8));
  setup.groups[0].params.push_back({"numbers", {4}, FSDP_FLOAT32, FSDP_PARAM_FROZEN});
  setup.groups[0].params.push_back(frozen({"scaled", {4, 4}}, FSDP_QUANTIZE_FP8));
  Solo solo(State::sealed, setup);
  const std::vector<uint8_t> bytes(32 * 64);
  const auto load = [&](uint64_t param, fsdp_plane plane, fsdp_dtype dtype, uint64_t count,
                        int32_t root = FSDP_EVERY_RANK, uint32_t flags = 0) {
    return fsdp_load_plane(solo.group(0), param, plane, bytes.data(), dtype, count, root, flags);
  };
  EXPECT_FAILS(FSDP_INVALID_STATE, load(1, FSDP_PLANE_ROW, FSDP_FLOAT8_E4M3, 2048), "fsdp_load_plane",
               "'own' of group 'g' is trained", "made of its main weights when these are published", "fsdp_load_param");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(2, FSDP_PLANE_ROW, FSDP_FLOAT8_E4M3, 4), "'numbers'", "not quantized");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(3, FSDP_PLANE_COLUMN, FSDP_FLOAT8_E4M3, 16), "'scaled'", "no COLUMN planes");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(0, 0, FSDP_FLOAT8_E4M3, 2048), "0 is not a plane");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(4, FSDP_PLANE_ROW, FSDP_FLOAT8_E4M3, 2048), "param_index 4");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(0, FSDP_PLANE_ROW, FSDP_UINT8, 2048), "7 is not a dtype of row of w",
               "float8_e4m3 (4)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(0, FSDP_PLANE_ROW_SCALE, FSDP_FLOAT32, 64), "1 is not a dtype of row_scale",
               "e8m0 (6)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(3, FSDP_PLANE_ROW_SCALE, FSDP_E8M0, 1), "float32 (1)");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(0, FSDP_PLANE_COLUMN_SCALE, FSDP_E8M0, 2048), "plane 'column_scale of w'",
               "has 64 elements, element_count is 2048");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(0, FSDP_PLANE_ROW, FSDP_FLOAT8_E4M3, 2048, 1), "root 1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(0, FSDP_PLANE_ROW, FSDP_FLOAT8_E4M3, 2048, 0, 1u << 30), "flags");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
               fsdp_load_plane(solo.group(0), 0, FSDP_PLANE_ROW, nullptr, FSDP_FLOAT8_E4M3, 2048, FSDP_EVERY_RANK, 0),
               "data is NULL for row of w on rank 0");
  float rows[16] = {};
  EXPECT_FAILS(FSDP_UNSUPPORTED, fsdp_load_chunk(solo.group(0), 3, rows, FSDP_FLOAT32, 0, 4, 0), "fsdp_load_chunk",
               "'scaled'", "one scale", "fsdp_load_param");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(solo.group(0), 0, rows, FSDP_FLOAT8_E4M3, 2048, 0, 0),
               "4 is not a dtype");
  solo.rank->load();
  EXPECT_FAILS(FSDP_INVALID_STATE, load(0, FSDP_PLANE_ROW, FSDP_FLOAT8_E4M3, 2048), "window");
  solo.clean_step();
}

class FrozenDeclared : public Declared {};

// A checkpoint could not say of which part of the tensor the planes of such boxes are.
TEST_F(FrozenDeclared, BoxesCutNoBlocks) {
  static constexpr uint64_t shape[] = {64, 64}, global[] = {256, 200}, fits[] = {64, 96}, cuts[] = {64, 112},
                            odd[] = {64, 128}, odd_shape[] = {128, 72}, whole[] = {0, 0}, even[] = {256, 224};
  const auto box = [&](const char *name, fsdp_quantization quantization, const uint64_t *size, const uint64_t *offset) {
    fsdp_param p = param(name);
    p.shape = size, p.dimension_count = 2, p.global_shape = global, p.global_offset = offset;
    p.flags = FSDP_PARAM_FROZEN, p.quantization = quantization;
    return p;
  };
  fsdp_param own = box("trained", FSDP_QUANTIZE_FP8, shape, fits);
  own.flags = 0;
  static constexpr uint64_t corner[] = {128, 128};
  fsdp_param fits32 = box("fits", FSDP_QUANTIZE_MXFP8, shape, fits), all = box("all", FSDP_QUANTIZE_FP8, global, whole);
  fsdp_param cuts32 = box("cuts", FSDP_QUANTIZE_MXFP8, shape, cuts);
  fits32.global_shape = cuts32.global_shape = even;
  static constexpr uint64_t matrices[] = {2, 128, 64}, stack[] = {4, 200, 64}, third[] = {1, 0, 0};
  fsdp_param stacked = box("stacked", FSDP_QUANTIZE_FP8_BLOCK, matrices, third);
  stacked.global_shape = stack, stacked.dimension_count = 3;
  FSDP(add_group("g", {stacked, fits32, cuts32, all, box("never", FSDP_QUANTIZE_MXFP8, shape, fits),
                       box("scaled", FSDP_QUANTIZE_FP8, shape, fits), box("odd", FSDP_QUANTIZE_FP8_BLOCK, shape, odd),
                       box("corner", FSDP_QUANTIZE_FP8_BLOCK, odd_shape, corner), own}));
  char text[2048];
  uint64_t size = sizeof text;
  FSDP(fsdp_check_model(model, text, &size));
  EXPECT_EQ(
      std::string(text),
      "parameter 'stacked' of group 'g': FSDP_QUANTIZE_FP8_BLOCK of an FSDP_PARAM_FROZEN box needs a tensor of "
      "multiples "
      "of 128, but global_shape[1] is 200\n"
      "parameter 'cuts' of group 'g': FSDP_QUANTIZE_MXFP8 of an FSDP_PARAM_FROZEN box needs blocks of 32 that the "
      "box does not cut, but it is [112, 176) of global_shape[1], which is 224\n"
      "parameter 'never' of group 'g': FSDP_QUANTIZE_MXFP8 of an FSDP_PARAM_FROZEN box needs a tensor of multiples of "
      "32, but global_shape[1] is 200\n"
      "parameter 'scaled' of group 'g': FSDP_QUANTIZE_FP8 of an FSDP_PARAM_FROZEN box has a scale of its own, "
      "which is no part of the whole tensor's; declare it without global_shape\n"
      "parameter 'odd' of group 'g': FSDP_QUANTIZE_FP8_BLOCK of an FSDP_PARAM_FROZEN box needs blocks of 128 that "
      "the box does not cut, but it is [64, 128) of global_shape[0], which is 256\n");
}

// Such parameters could be trained but never saved, so the ranks learn it before they train.
TEST_F(FrozenDeclared, TwoTensorsCannotShareANameInCheckpoints) {
  static constexpr uint64_t shape[] = {32, 32};
  fsdp_param base = param("w"), scales = param("v.column_scale"), other = param("v"), fits = param("w.column");
  base.shape = other.shape = shape, base.dimension_count = other.dimension_count = 2;
  base.flags = other.flags = FSDP_PARAM_FROZEN;
  base.quantization = FSDP_QUANTIZE_FP8, other.quantization = FSDP_QUANTIZE_MXFP8;
  FSDP(add_group("g", {base, scales, fits, param("m")}));
  FSDP(add_group("h", {other, param("w.row"), param("state.m.exp_avg")}));
  // A trained parameter is saved as main weights, and one that is not quantized as it is.
  fsdp_param trained = base, kept = param("k");
  trained.name = "q", trained.flags = 0;
  kept.flags = FSDP_PARAM_FROZEN;
  FSDP(add_group("i", {trained, kept, param("q.row"), param("k.row")}));
  char text[2048];
  uint64_t size = sizeof text;
  FSDP(fsdp_check_model(model, text, &size));
  EXPECT_EQ(std::string(text),
            "parameter 'v.column_scale' of group 'g' and plane column_scale of parameter 'v' of group 'h' would both "
            "be 'v.column_scale' in a checkpoint, which has each name once\n"
            "plane row of parameter 'w' of group 'g' and parameter 'w.row' of group 'h' would both be 'w.row' in a "
            "checkpoint, which has each name once\n"
            "state exp_avg of parameter 'm' of group 'g' and parameter 'state.m.exp_avg' of group 'h' would both be "
            "'state.m.exp_avg' in a checkpoint, which has each name once\n");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model),
               "fsdp_seal_model: parameter 'v.column_scale' of group 'g'",
               "plane column_scale of parameter 'v' of group 'h'", "2 more");
}

TEST_F(FrozenDeclared, BytesAreLegalForFrozenParametersOnly) {
  static constexpr uint64_t shape[] = {64, 64};
  fsdp_param bytes = param("bytes");
  bytes.shape = shape, bytes.dimension_count = 2, bytes.dtype = FSDP_UINT8;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {bytes}), "params[0] ('bytes').dtype is FSDP_UINT8 (7)",
               "FSDP_PARAM_FROZEN");
  bytes.flags = FSDP_PARAM_FROZEN, bytes.quantization = FSDP_QUANTIZE_MXFP8;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {bytes}), "params[0] ('bytes').quantization is 2",
               "bytes are not quantized");
  bytes.quantization = 0;
  FSDP(add_group("g", {bytes}));
}

// The caller's own codes are loaded and read unchanged, beside trained parameters.
TEST(FrozenBytes, StayAsTheyWereLoaded) {
  for (uint32_t ranks = 1; ranks <= 3; ++ranks)
    for (const auto mode : unshard_modes) {
      Scenario setup = frozen_setup({"nf4", {97, 31}, FSDP_UINT8, FSDP_PARAM_FROZEN}, ranks, mode);
      setup.groups[0].params.push_back({"absmax", {97}, FSDP_FLOAT32, FSDP_PARAM_FROZEN});
      setup.groups[0].params.push_back({"adapter", {31, 4}});
      const std::vector<uint8_t> bytes = random_bytes(97 * 31, 2);
      run(setup, "", [&](Rank &rank) {
        fsdp_group *const g = rank.groups[0];
        const int32_t root = static_cast<int32_t>(ranks) - 1;
        const bool gives = root == static_cast<int32_t>(rank.rank);
        std::vector<float> numbers(97 * 31);
        EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(g, 0, numbers.data(), FSDP_FLOAT32, bytes.size(), root, 0),
                     "1 is not a dtype of nf4 of group 'g', which is uint8 (7)");
        EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(g, 1, bytes.data(), FSDP_UINT8, 97, root, 0),
                     "7 is not a dtype");
        FSDP(fsdp_load_param(g, 0, gives ? bytes.data() : nullptr, FSDP_UINT8, bytes.size(), root, 0));
        publish(rank);
        fsdp_tensor view = FSDP_TENSOR_INIT;
        FSDP(fsdp_unshard(g, FSDP_FORWARD, 0, stream()));
        FSDP(fsdp_get_param(g, 0, FSDP_FORWARD, &view));
        REQUIRE(view.dtype == FSDP_UINT8 && view.element_size == 1 && view.element_count == bytes.size());
        std::vector<uint8_t> seen(bytes.size());
        copy_out(seen.data(), view.data, seen.size());
        FSDP(fsdp_reshard(g, FSDP_FORWARD, 0, stream()));
        REQUIRE(seen == bytes);
        std::vector<uint8_t> read(bytes.size());
        FSDP(fsdp_read_param(g, 0, read.data(), FSDP_UINT8, read.size(), FSDP_EVERY_RANK, 0));
        REQUIRE(read == bytes);
        EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
                     fsdp_read_param(g, 0, numbers.data(), FSDP_FLOAT32, read.size(), FSDP_EVERY_RANK, 0), "uint8 (7)");
      });
    }
}

}  // namespace
