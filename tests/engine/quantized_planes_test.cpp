// SPDX-License-Identifier: Apache-2.0
// The planes that fsdp_get_plane shows, the bytes that are gathered and kept of them, and what is refused.
#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>

#include "checkpoint_folder.h"
#include "device.h"
#include "held_up.h"

using namespace harness;
using namespace misuse;

namespace {

Scenario one_matrix(std::vector<uint64_t> shape, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  setup.groups = {{"g", {{"w", std::move(shape)}}}};
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_FP8_BLOCK;
  setup.model.flags = FSDP_MODEL_NO_PREFETCH | FSDP_MODEL_FORCE_COMMUNICATION;
  return setup;
}

Scenario one_scaled(std::vector<uint64_t> shape, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = one_matrix(std::move(shape), ranks, mode);
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_FP8;
  return setup;
}

void publish(Rank &rank, const std::vector<float> &values) {
  FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  FSDP(fsdp_publish_weights(rank.model, stream()));
}

Blocks planes_of(Rank &rank, fsdp_phase phase) {
  FSDP(fsdp_unshard(rank.groups[0], phase, 0, stream()));
  Blocks planes = rank.planes(0, 0, phase);
  FSDP(fsdp_reshard(rank.groups[0], phase, 0, stream()));
  return planes;
}

// From the definition of current scaling: f = 448 / 5 = 0x42b33333, and its inverse.
TEST(QuantizedPlanes, AKnownMatrixHasItsKnownCodes) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    const Scenario setup = one_matrix({2, 3}, 2, mode);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      publish(rank, {3, -3, 0.001f, 5, 4.99f, 1e-6f});
      const Blocks expected{{0x78, 0xf8, 0x1b, 0x7e, 0x7e, 0x00}, {std::bit_cast<float>(0x3c36db6eu)}};
      for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD, FSDP_RECOMPUTE, FSDP_EVAL})
        EXPECT_TRUE(planes_of(rank, phase) == expected) << phase;
    });
  }
}

// A row for each of two ranks, of which only the second has the largest number; others have nothing of them.
TEST(QuantizedPlanes, KnownMatrixHasKnownCodesOfOneScale) {
  for (uint32_t ranks = 1; ranks <= 4; ++ranks)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      const Scenario setup = one_scaled({2, 3}, ranks, mode);
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        publish(rank, {3, -3, 0.001f, 5, 4.99f, 1e-6f});
        const Blocks expected{{0x78, 0xf8, 0x1b, 0x7e, 0x7e, 0x00}, {std::bit_cast<float>(0x3c36db6eu)}};
        for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD, FSDP_RECOMPUTE, FSDP_EVAL})
          EXPECT_TRUE(planes_of(rank, phase) == expected) << ranks << " ranks, phase " << phase;
        // Magnitudes of an earlier publish are not used again: the largest number is smaller now.
        FSDP(fsdp_begin_update(rank.model, stream()));
        publish(rank, {0.5f, -0.25f, 0, 0.125f, 0, 0});
        EXPECT_TRUE(planes_of(rank, FSDP_FORWARD) == (Blocks{{0x7e, 0xf6, 0, 0x6e, 0, 0}, {1.0f / 896}}));
      });
    }
}

std::vector<float> awkward_values(uint64_t count) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i)
    values[i] = std::ldexp(initial_weight(3, i), static_cast<int>(i / 131 % 40) - 20) * (i % 97 ? 1.0f : 0.0f);
  values[count / 2] = std::nanf("");
  values[count - 1] = -HUGE_VALF;
  return values;
}

// A matrix of 3 x 3 blocks of which the last are smaller, on ranks that have some of its rows, or none.
TEST(QuantizedPlanes, AreTheReferencesForAnyNumbers) {
  const std::vector<float> values = awkward_values(300 * 270);
  for (uint32_t ranks = 1; ranks <= 4; ++ranks)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const fsdp_scale_rounding rounding : {FSDP_SCALE_EXACT, FSDP_SCALE_POWER_OF_TWO}) {
        Scenario setup = one_matrix({300, 270}, ranks, mode);
        setup.model.scale_rounding = rounding;
        const Blocks expected = quantize_blocks(values, {300, 270}, rounding, FSDP_FLOAT32);
        run_threads(setup, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          publish(rank, values);
          EXPECT_TRUE(planes_of(rank, FSDP_FORWARD) == expected) << ranks << " ranks, mode " << mode;
        });
      }
}

// The numbers are all finite, or there is an Inf or a NaN on another rank.
TEST(QuantizedPlanes, OfOneScaleAreTheReferences) {
  for (const int spoilt : {0, 1, 2})
    for (const uint32_t ranks : {1u, 3u})
      for (const fsdp_scale_rounding rounding : {FSDP_SCALE_EXACT, FSDP_SCALE_POWER_OF_TWO})
        for (const fsdp_dtype from : {FSDP_FLOAT32, FSDP_BFLOAT16}) {
          std::vector<float> values = awkward_values(30 * 27);
          values[values.size() / 2] = spoilt == 2 ? std::nanf("") : 1;
          values.back() = spoilt == 1 ? -HUGE_VALF : 2;
          Scenario setup = one_scaled({30, 27}, ranks);
          setup.model.scale_rounding = rounding;
          setup.model.quantize_from = from;
          const Blocks expected = quantize_blocks(values, {30, 27}, rounding, from, true);
          EXPECT_EQ(expected.scales[0] == 1, spoilt != 0);
          run_threads(setup, [&](uint32_t, fsdp_context *context) {
            Rank rank(context, setup);
            publish(rank, values);
            EXPECT_TRUE(planes_of(rank, FSDP_FORWARD) == expected) << ranks << " ranks, spoilt " << spoilt;
          });
        }
}

// The last rank is held up after it has sent its magnitudes and before it publishes: the unshards of the others wait
// for that. Every number equals the version.
TEST(QuantizedPlanes, AreNotReadBeforeTheyArePublished) {
  if (on_gpu()) GTEST_SKIP() << "there calls enqueue, and tests of streams hold them up";
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario setup = one_matrix({384, 64}, 3, mode);
      setup.groups[0].params[0].quantization = quantization;
      HeldUp::arm(setup);
      run_threads(setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        publish(rank, std::vector<float>(384 * 64, 1));
        FSDP(fsdp_begin_update(rank.model, nullptr));
        HeldUp::enter(r == 2);
        publish(rank, std::vector<float>(384 * 64, 2));
        for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD}) {
          FSDP(fsdp_unshard(rank.groups[0], phase, 0, nullptr));
          const std::vector<float> seen = rank.view(0, 0, phase);
          EXPECT_EQ(std::count(seen.begin(), seen.end(), 2.0f), 384 * 64) << quantization << ", mode " << mode;
          FSDP(fsdp_reshard(rank.groups[0], phase, 0, nullptr));
        }
      });
    }
}

// 65,536 codes and a scale for each rank to write; four bytes in staging of this rank's amax, of each rank's, of what
// codes are made with and of its inverse.
TEST(QuantizedPlanes, BytesOfOneScale) {
  Scenario setup = one_scaled({256, 256}, 2);
  setup.steps = 3;
  setup.microbatches = 2;
  constexpr uint64_t codes = 65536, scales = 8, page = 4096;
  const auto outcomes = train_threads(setup);
  for (const Outcome &outcome : outcomes) {
    EXPECT_EQ(outcome.stats.gathered_bytes, 3 * 2 * 2 * (codes + scales));
    EXPECT_EQ(outcome.stats.all_gathers, 3u * 2 * 2);
    EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_MAIN], 4 * codes / 2);
    EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_GATHER], codes + 512);
  }
  EXPECT_EQ(outcomes[1].memory.role_bytes[FSDP_ROLE_COMPUTE], (codes + scales) / 2);
  EXPECT_EQ(outcomes[0].memory.role_bytes[FSDP_ROLE_COMPUTE], (codes + scales) / 2 + page - scales);
  const uint64_t staging = outcomes[0].memory.role_bytes[FSDP_ROLE_STAGING];
  setup.groups[0].params[0].quantization = 0;
  EXPECT_EQ(staging - train_threads(setup)[0].memory.role_bytes[FSDP_ROLE_STAGING],
            4u * (1 + 2 + 1 + 1) + 16);  // and 16 for what is told of it
}

// 256 x 256: 65,536 codes and 4 scales, a gather in each direction; of bf16 it would be 131,072 bytes.
TEST(QuantizedPlanes, GatheredBytesAndKeptBytes) {
  Scenario setup = one_matrix({256, 256}, 2);
  setup.steps = 3;
  setup.microbatches = 2;
  constexpr uint64_t codes = 65536, scales = 16, page = 4096;
  for (const Outcome &outcome : train_threads(setup)) {
    EXPECT_EQ(outcome.stats.gathered_bytes, 3 * 2 * 2 * (codes + scales));
    EXPECT_EQ(outcome.stats.all_gathers, 3u * 2 * 2);
    EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_MAIN], 4 * codes / 2);
    EXPECT_EQ(outcome.memory.role_bytes[FSDP_ROLE_GATHER], codes + 512);  // the pool's alignment
    EXPECT_EQ(outcome.memory.padding_count, 0u);
  }
  // Codes and scales follow each other in whole pages; bytes that belong to no rank are counted for the first rank.
  const auto outcomes = train_threads(setup);
  EXPECT_EQ(outcomes[1].memory.role_bytes[FSDP_ROLE_COMPUTE], (codes + scales) / 2);
  EXPECT_EQ(outcomes[0].memory.role_bytes[FSDP_ROLE_COMPUTE], (codes + scales) / 2 + page - scales);

  setup.groups[0].params[0].quantization = 0;
  setup.set_dtype(FSDP_BFLOAT16);
  EXPECT_EQ(train_threads(setup)[0].stats.gathered_bytes, 3 * 2 * 2 * 2 * codes);
}

// Three blocks of rows on two ranks: two and one, as ROW granules and as those of 256 rows, or all on one rank.
TEST(QuantizedPlanes, RankBoundariesFallBetweenBlocks) {
  for (const fsdp_granule granule : {FSDP_GRANULE_ROW, FSDP_GRANULE_BLOCK, FSDP_GRANULE_TENSOR}) {
    Scenario setup = one_matrix({300, 64}, 2);
    setup.groups[0].params[0].granule = granule;
    setup.groups[0].params[0].granule_rows = granule == FSDP_GRANULE_BLOCK ? 256 : 0;
    const uint64_t first = granule == FSDP_GRANULE_TENSOR ? 300 : 256;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      for (uint32_t r = 0; r < 2; ++r) {
        fsdp_chunk chunk = FSDP_CHUNK_INIT;
        FSDP(fsdp_get_chunk(rank.groups[0], 0, r, &chunk));
        EXPECT_EQ(chunk.row_count, r ? 300 - first : first) << "granule " << granule;
      }
      const uint64_t shard = granule == FSDP_GRANULE_TENSOR ? 384 : 256;
      EXPECT_EQ(memory_of(rank.model, 0).padding_count, (2 * shard - 300) * 64);
    });
  }
}

// Codes and main weights are unchanged; only a scale was changed without the library.
TEST(QuantizedPlanes, ScalesOfReplicasAreCompared) {
  Scenario setup = one_matrix({130, 40}, 2);
  setup.model.strategy = FSDP_STRATEGY_NO_SHARD;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_check_replicas(rank.model, 0, nullptr));
    fsdp_tensor scales = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_plane(rank.groups[0], 0, FSDP_EVAL, FSDP_PLANE_ROW_SCALE, &scales));
    if (r == 1) static_cast<float *>(scales.data)[1] *= 2;
    EXPECT_FAILS(FSDP_MISMATCH, fsdp_check_replicas(rank.model, 0, nullptr), "parameter 'w' of group 'g'",
                 "the scales of compute weights of rank 1 have the hash");
  });
}

// A copied plane that was given back is NaN.
TEST(QuantizedPlanes, DebugModePoisonsWhatWasReturned) {
  Scenario setup = one_matrix({130, 40}, 2);
  setup.context.flags = FSDP_CONTEXT_DEBUG;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    fsdp_tensor codes = FSDP_TENSOR_INIT, scales = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_plane(rank.groups[0], 0, FSDP_FORWARD, FSDP_PLANE_ROW, &codes));
    FSDP(fsdp_get_plane(rank.groups[0], 0, FSDP_FORWARD, FSDP_PLANE_ROW_SCALE, &scales));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    const auto *bytes = static_cast<const uint8_t *>(codes.data);
    EXPECT_TRUE(std::all_of(bytes, bytes + codes.element_count, [](uint8_t byte) { return byte == 0xFF; }));
    const auto *values = static_cast<const float *>(scales.data);
    EXPECT_TRUE(std::all_of(values, values + scales.element_count, [](float value) { return std::isnan(value); }));
    EXPECT_EQ(scales.element_count, 2u);
  });
}

void expect_description(const Scenario &setup, const char *quantization, const nlohmann::json &planes) {
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    uint64_t size = 0;
    FSDP(fsdp_describe_model(rank.model, nullptr, &size));
    std::string text(size, '\0');
    FSDP(fsdp_describe_model(rank.model, text.data(), &size));
    const auto bucket = nlohmann::json::parse(text.c_str())["groups"][0]["buckets"][0];
    EXPECT_EQ(bucket["quantization"], quantization);
    EXPECT_EQ(bucket["planes"], planes);
    fsdp_param info = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(rank.groups[0], 0, &info));
    EXPECT_EQ(info.quantization, setup.groups[0].params[0].quantization);
  });
}

TEST(QuantizedPlanes, TheDescriptionHasThem) {
  const auto plane = [](const char *name, const char *dtype, uint64_t bytes) {
    return nlohmann::json{{"name", name}, {"dtype", dtype}, {"full_bytes", bytes}};
  };
  Scenario setup = one_matrix({256, 320}, 2);
  expect_description(setup, "fp8_block",
                     {plane("row", "float8_e4m3", 256 * 320), plane("row_scale", "float32", 2 * 3 * 4)});
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_FP8;
  expect_description(setup, "fp8", {plane("row", "float8_e4m3", 256 * 320), plane("row_scale", "float32", 2 * 4)});
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_MXFP8;
  expect_description(setup, "mxfp8",
                     {plane("row", "float8_e4m3", 256 * 320), plane("column", "float8_e4m3", 256 * 320),
                      plane("row_scale", "e8m0", 256 * 10), plane("column_scale", "e8m0", 8 * 320)});
}

class QuantizedCheckpoint : public Checkpoint {};

// Main weights are saved, and other ranks compute the same planes from them.
TEST_F(QuantizedCheckpoint, PlanesAreMadeAgain) {
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_FP8_BLOCK, FSDP_QUANTIZE_FP8, FSDP_QUANTIZE_MXFP8}) {
    const std::string folder = path + "/" + std::to_string(quantization);
    Scenario setup = one_matrix({320, 96}, 3);
    setup.groups[0].params[0].quantization = quantization;
    std::vector<std::pair<Blocks, Blocks>> planes;
    for (const uint32_t ranks : {3u, 1u, 2u}) {
      setup.ranks = ranks;
      run_threads(setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        if (ranks == 3) {
          rank.load();
          clean_step(rank, 0);
          FSDP(save(rank, folder));
        } else {
          FSDP(fsdp_load(rank.model, folder.c_str(), nullptr, nullptr));
          FSDP(fsdp_publish_weights(rank.model, nullptr));
        }
        const std::pair seen(planes_of(rank, FSDP_FORWARD), planes_of(rank, FSDP_BACKWARD));
        if (r == 0) planes.push_back(seen);
      });
    }
    ASSERT_EQ(planes.size(), 3u);
    EXPECT_TRUE(planes[1] == planes[0] && planes[2] == planes[0]) << quantization;
  }
}

class QuantizedMisuse : public Declared {
 protected:
  fsdp_param quantized(const char *name, const uint64_t *sizes, uint32_t dimensions) const {
    fsdp_param p = param(name);
    p.shape = sizes;
    p.dimension_count = dimensions;
    p.quantization = FSDP_QUANTIZE_FP8_BLOCK;
    return p;
  }
  static constexpr uint64_t square[] = {256, 256}, stack[] = {2, 100, 64};
};

TEST_F(QuantizedMisuse, InvalidFieldsAreRefused) {
  fsdp_param p = quantized("w", square, 2);
  p.quantization = 7;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {p}), "params[0] ('w').quantization is 7",
               "FSDP_QUANTIZE_FP8_BLOCK");
  p.quantization = -1;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {p}), "quantization is -1");
  p = quantized("w", square, 2);
  p.dtype = FSDP_FLOAT8_E4M3;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {p}), "params[0] ('w').dtype is 4");
  fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
  options.grad_dtype = FSDP_FLOAT8_E4M3;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, add_group("g", {param("v")}, &options), "grad_dtype is 4");
  fsdp_model *other = nullptr;
  fsdp_model_options of_model = FSDP_MODEL_OPTIONS_INIT;
  of_model.scale_rounding = 3;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_model(context, &of_model, &other), "scale_rounding is 3");
  of_model.scale_rounding = 0, of_model.quantize_from = FSDP_FLOAT16;
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_create_model(context, &of_model, &other), "quantize_from is 3");
}

// fsdp_check_model names all of them at once, with names and numbers; the seal names the first.
TEST_F(QuantizedMisuse, SizesThatCannotBeQuantizedAreNamed) {
  fsdp_param blocks = quantized("blocks", square, 2);
  blocks.granule = FSDP_GRANULE_BLOCK, blocks.granule_rows = 100;
  FSDP(add_group("g",
                 {quantized("vector", square, 1), quantized("stack", stack, 3), blocks, quantized("fits", square, 2)}));
  char text[2048];
  uint64_t size = sizeof text;
  FSDP(fsdp_check_model(model, text, &size));
  const std::string found = text;
  for (const char *words : {"parameter 'vector' of group 'g': FSDP_QUANTIZE_FP8_BLOCK needs a matrix, 2 dimensions or "
                            "more, but it has 1\n",
                            "parameter 'stack' of group 'g'",
                            "a multiple of 128 rows where there are several, but shape[1] is 100; pad the matrices, or "
                            "declare each one as a "
                            "parameter\n",
                            "parameter 'blocks' of group 'g'", "a multiple of 128 rows, but granule_rows is 100\n"})
    EXPECT_NE(found.find(words), std::string::npos) << words << " is not in: " << found;
  EXPECT_EQ(std::count(found.begin(), found.end(), '\n'), 3);
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_seal_model(model), "'vector'", "2 more");
}

TEST(QuantizedMisuseOfViews, NamesTheCallExpected) {
  Scenario setup = gathering_setup();
  setup.groups[1].params[0].shape = {130, 4};
  setup.groups[1].params[0].quantization = FSDP_QUANTIZE_FP8_BLOCK;
  Solo solo(State::published, setup);
  fsdp_tensor tensor = FSDP_TENSOR_INIT;
  const auto get = [&](uint64_t param, fsdp_plane plane) {
    return fsdp_get_plane(solo.group(1), param, FSDP_FORWARD, plane, &tensor);
  };
  EXPECT_FAILS(FSDP_INVALID_STATE, get(0, FSDP_PLANE_ROW), "fsdp_get_plane", "'beta'", "fsdp_unshard");
  FSDP(fsdp_unshard(solo.group(1), FSDP_FORWARD, 0, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get(0, 0), "0 is not a plane");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get(0, 5), "5 is not a plane");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get(0, FSDP_PLANE_COLUMN), "'beta.w'", "no COLUMN planes");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get(2, FSDP_PLANE_ROW), "param_index 2");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, get(1, FSDP_PLANE_ROW), "'beta.b'", "not quantized", "fsdp_get_param");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_plane(solo.group(1), 0, 9, FSDP_PLANE_ROW, &tensor), "9 is not a phase");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_plane(solo.group(1), 0, FSDP_FORWARD, FSDP_PLANE_ROW, nullptr), "NULL");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_get_param(solo.group(1), 0, FSDP_FORWARD, &tensor), "'beta.w'", "quantized",
               "fsdp_get_plane");
  EXPECT_EQ(tensor.data, nullptr);
  fsdp_tensor all[2];
  FSDP(fsdp_get_params(solo.group(1), FSDP_FORWARD, FSDP_ARRAY(all)));
  EXPECT_EQ(all[0].data, nullptr);
  EXPECT_NE(all[1].data, nullptr);
  FSDP(get(0, FSDP_PLANE_ROW_SCALE));
  EXPECT_EQ(tensor.element_count, 2u);
  EXPECT_EQ(tensor.flags, FSDP_TENSOR_READ_ONLY);
  FSDP(fsdp_reshard(solo.group(1), FSDP_FORWARD, 0, nullptr));
  const uint8_t code = 0;
  FSDP(fsdp_begin_update(solo.model, nullptr));
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_param(solo.group(1), 1, &code, FSDP_FLOAT8_E4M3, 6, FSDP_EVERY_RANK, 0),
               "4 is not a dtype");
  EXPECT_FAILS(FSDP_INVALID_STATE, get(0, FSDP_PLANE_ROW), "the update window is open");
  FSDP(fsdp_publish_weights(solo.model, nullptr));
  solo.clean_step();
}

// Ranks that quantize differently get an error at the seal.
TEST(QuantizedMisuseOfViews, RanksMustAgree) {
  for (const int what : {0, 1, 2}) {
    Scenario setup = one_matrix({128, 128}, 2);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Scenario mine = setup;
      if (r == 1 && what == 0) mine.groups[0].params[0].quantization = 0;
      if (r == 1 && what == 1) mine.model.scale_rounding = FSDP_SCALE_POWER_OF_TWO;
      if (r == 1 && what == 2) mine.model.quantize_from = FSDP_BFLOAT16;
      Rank rank(context, mine, false);
      constexpr const char *words[] = {"quantization fp8_block", "scale rounding 2", "quantize from bfloat16"};
      EXPECT_FAILS(FSDP_MISMATCH, fsdp_seal_model(rank.model), words[what]);
    });
  }
}

}  // namespace
