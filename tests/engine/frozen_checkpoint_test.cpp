// SPDX-License-Identifier: Apache-2.0
// Planes of FROZEN parameters, and bytes, in checkpoints: they come back bit for bit on other ranks, meshes and
// strategies; files name them, and what has other bits under these names is refused.
#include <nlohmann/json.hpp>

#include "frozen.h"

using namespace harness;
using namespace misuse;

namespace {

class FrozenCheckpoint : public Checkpoint {};

std::vector<ParamDef> bases() {
  return {frozen({"rows", {160, 64}}, FSDP_QUANTIZE_MXFP8),
          frozen({"stack", {5, 32, 64}, FSDP_BFLOAT16}, FSDP_QUANTIZE_MXFP8),
          frozen({"blocks", {700, 130}}, FSDP_QUANTIZE_FP8_BLOCK), frozen({"scaled", {37, 24}}, FSDP_QUANTIZE_FP8),
          frozen({"scalar", {}}, FSDP_QUANTIZE_FP8)};
}

Scenario based(uint32_t ranks, fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS) {
  Scenario setup = scenario_of(strategy, ranks);
  setup.groups = {{"base", bases()},
                  {"rest", {{"bytes", {53, 7}, FSDP_UINT8, FSDP_PARAM_FROZEN}, {"adapter", {16, 24}, FSDP_BFLOAT16}}}};
  return setup;
}

void load_all(const Rank &rank) {
  for (uint32_t p = 0; p < bases().size(); ++p) load_planes(rank, 0, p, random_planes(bases()[p], p));
  const std::vector<uint8_t> bytes = random_bytes(53 * 7, 9);
  FSDP(fsdp_load_param(rank.groups[1], 0, bytes.data(), FSDP_UINT8, bytes.size(), FSDP_EVERY_RANK, 0));
  publish(rank);
}

void require_all(const Rank &rank) {
  for (uint32_t p = 0; p < bases().size(); ++p) REQUIRE(stored_planes(rank, 0, p) == random_planes(bases()[p], p));
  std::vector<uint8_t> bytes(53 * 7);
  FSDP(fsdp_read_param(rank.groups[1], 0, bytes.data(), FSDP_UINT8, bytes.size(), FSDP_EVERY_RANK, 0));
  REQUIRE(bytes == random_bytes(53 * 7, 9));
  FSDP(fsdp_check_replicas(rank.model, 0, stream()));
}

Scenario over_two_axes(bool hybrid) {
  Scenario setup = based(4);
  setup.mesh.replicate_size = setup.mesh.shard_size = 2;
  if (hybrid) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  return setup;
}

std::vector<std::pair<const char *, Scenario>> all_ways() {
  return {{"one", based(1)},
          {"two", based(2)},
          {"three", based(3)},
          {"whole", based(2, FSDP_STRATEGY_NO_SHARD)},
          {"optim", based(3, FSDP_STRATEGY_OPTIM)},
          {"replicas", over_two_axes(false)},
          {"hybrid", over_two_axes(true)}};
}

TEST_F(FrozenCheckpoint, ComesBackBitForBitWhereverItWasSaved) {
  Sample sample(3);
  for (const auto &[from, saves] : all_ways()) {
    const std::string folder = path + "/" + from;
    run(saves, from, [&](Rank &rank) {
      load_all(rank);
      FSDP(save(rank, folder));
    });
    for (const auto &[to, loads] : all_ways()) {
      if (!sample.takes_next()) continue;
      for (const uint32_t flags : {0u, FSDP_LOAD_ONE_REPLICA + 0u})
        run(loads, std::string(from) + " to " + to, [&](Rank &rank) {
          FSDP(load(rank, folder, flags));
          publish(rank);
          require_all(rank);
        });
    }
  }
}

// A checkpoint does not contain what is computed from main weights, but all that is not.
TEST_F(FrozenCheckpoint, NamesPlanesAndTheirTypes) {
  Scenario setup = based(2);
  ParamDef own{"own", {32, 32}};
  own.quantization = FSDP_QUANTIZE_MXFP8;
  setup.groups[1].params.push_back(own);
  run(setup, "", [&](Rank &rank) {
    load_all(rank);
    FSDP(save(rank, path, 1));
  });
  std::map<std::string, std::string> types;
  for (const auto &[name, bytes] : files("step-0000000001")) {
    if (!name.ends_with(".safetensors")) continue;
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    const auto header = nlohmann::json::parse(bytes.substr(8, length));
    for (const auto &[tensor, what] : header.items())
      if (tensor != "__metadata__" && !tensor.starts_with("state.")) types[tensor] = what["dtype"];
  }
  const std::map<std::string, std::string> expected{{"adapter", "F32"},
                                                    {"blocks.row", "F8_E4M3"},
                                                    {"blocks.row_scale", "F32"},
                                                    {"bytes", "U8"},
                                                    {"own", "F32"},
                                                    {"rows.column", "F8_E4M3"},
                                                    {"rows.row", "F8_E4M3"},
                                                    {"rows.row_scale", "F8_E8M0"},
                                                    {"rows.column_scale", "F8_E8M0"},
                                                    {"scalar.row", "F8_E4M3"},
                                                    {"scalar.row_scale", "F32"},
                                                    {"scaled.row", "F8_E4M3"},
                                                    {"scaled.row_scale", "F32"},
                                                    {"stack.row", "F8_E4M3"},
                                                    {"stack.row_scale", "F8_E8M0"},
                                                    {"stack.column", "F8_E4M3"},
                                                    {"stack.column_scale", "F8_E8M0"}};
  EXPECT_EQ(types, expected);
}

// A box of a matrix and the rest of it, by columns that blocks end at.
TEST_F(FrozenCheckpoint, OfBoxesHasTheWholeTensorsPlanes) {
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8, FSDP_QUANTIZE_FP8_BLOCK}) {
    const std::string folder = path + "/" + std::to_string(quantization);
    const ParamDef whole = frozen({"w", {256, 300}}, quantization);
    const ParamDef w = quantization == FSDP_QUANTIZE_MXFP8 ? frozen({"w", {256, 320}}, quantization) : whole;
    const std::vector<float> values = awkward_values(w.count(), 1);
    Planes planes;
    run(frozen_setup(w, 3), "saved", [&](Rank &rank) {
      FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
      publish(rank);
      FSDP(save(rank, folder, 1));
    });
    // Rows 128 to 256 of columns 128 on: blocks of their own, in every form.
    ParamDef part = w;
    part.shape = {128, w.shape[1] - 128};
    part.global_shape = w.shape, part.global_offset = {128, 128};
    std::vector<float> own;
    for (uint64_t r = 128; r < 256; ++r)
      for (uint64_t c = 128; c < w.shape[1]; ++c) own.push_back(values[r * w.shape[1] + c]);
    Scenario twins = frozen_setup(part, 2);
    ParamDef twin = frozen({"twin", part.shape}, quantization);
    twins.groups.push_back({"h", {twin}});
    run(twins, "loaded", [&](Rank &rank) {
      FSDP(load(rank, folder, FSDP_LOAD_ALLOW_MISSING));
      FSDP(fsdp_load_param(rank.groups[1], 0, own.data(), FSDP_FLOAT32, own.size(), FSDP_EVERY_RANK, 0));
      publish(rank);
      REQUIRE(stored_planes(rank, 0, 0) == stored_planes(rank, 1, 0));
    });
  }
}

// A box of all of a tensor is no part: its one scale is the tensor's.
TEST_F(FrozenCheckpoint, OfAWholeBoxHasItsScale) {
  for (const std::vector<uint64_t> &shape : {std::vector<uint64_t>{37, 24}, {41}}) {
    const std::string folder = path + "/" + std::to_string(shape.size());
    const ParamDef w = frozen({"w", shape}, FSDP_QUANTIZE_FP8);
    ParamDef box = w;
    box.global_shape = shape, box.global_offset.assign(shape.size(), 0);
    const Planes planes = random_planes(w, 6);
    run(frozen_setup(box, 2), "saved", [&](Rank &rank) {
      load_planes(rank, 0, 0, planes);
      publish(rank);
      FSDP(save(rank, folder, 1));
    });
    for (const ParamDef &own : {w, box})
      run(frozen_setup(own, 3), "loaded", [&](Rank &rank) {
        FSDP(load(rank, folder));
        publish(rank);
        REQUIRE(stored_planes(rank, 0, 0) == planes);
      });
  }
}

// A quantized file of another library: its tensors have other names, and are taken as they are.
TEST_F(FrozenCheckpoint, LoadsPlanesOfOtherFilesByName) {
  const ParamDef theirs = frozen({"w", {700, 130}}, FSDP_QUANTIZE_FP8_BLOCK);
  const Planes planes = random_planes(theirs, 5);
  run(frozen_setup(theirs, 1), "saved", [&](Rank &rank) {
    load_planes(rank, 0, 0, planes);
    publish(rank);
    FSDP(save(rank, path, 1));
  });
  const std::string from = path + "/step-0000000001";
  const fsdp_rename renames[] = {{"w.row", "ours.row", 0, 0, 0, 0, 0},
                                 {"w.row_scale", "ours.row_scale", 0, 0, 0, 0, 0}};
  run(frozen_setup(frozen({"ours", {700, 130}}, FSDP_QUANTIZE_FP8_BLOCK), 3), "loaded", [&](Rank &rank) {
    FSDP(fsdp_load_weights(rank.model, from.c_str(), renames, 2, sizeof *renames, nullptr, nullptr));
    publish(rank);
    REQUIRE(stored_planes(rank, 0, 0) == planes);
  });
}

// Codes with old scales would be other weights, so a load fails if the rename of one plane was forgotten.
TEST_F(FrozenCheckpoint, PlanesAreMissingTogether) {
  const ParamDef theirs = frozen({"w", {64, 64}}, FSDP_QUANTIZE_MXFP8),
                 ours = frozen({"ours", {64, 64}}, FSDP_QUANTIZE_MXFP8);
  run(frozen_setup(theirs, 1), "saved", [&](Rank &rank) {
    load_planes(rank, 0, 0, random_planes(theirs, 3));
    publish(rank);
    FSDP(save(rank, path, 1));
  });
  const auto takes = [&](const Rank &rank, const std::vector<fsdp_rename> &renames) {
    fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
    options.flags = FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED | FSDP_LOAD_IF_ANY;
    return fsdp_load_weights(rank.model, (path + "/step-0000000001").c_str(), renames.data(), renames.size(),
                             sizeof(fsdp_rename), &options, nullptr);
  };
  const fsdp_rename row{"w.row", "ours.row", 0, 0, 0, 0, 0}, scale{"w.row_scale", "ours.row_scale", 0, 0, 0, 0, 0};
  run(frozen_setup(ours, 2), "loaded", [&](Rank &rank) {
    const Planes old = random_planes(ours, 4);
    load_planes(rank, 0, 0, old);
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, takes(rank, {row}), "planes of \"ours\"", ": \"ours.row\" there, ",
                 "\"ours.column\", \"ours.row_scale\", \"ours.column_scale\" missing");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, takes(rank, {row, scale}), ": \"ours.row\", \"ours.row_scale\" there, ",
                 "\"ours.column\", \"ours.column_scale\" missing");
    FSDP(takes(rank, {}));
    publish(rank);
    REQUIRE(stored_planes(rank, 0, 0) == old);
  });
}

// Codes cannot be loaded as numbers, and numbers cannot be loaded as codes.
TEST_F(FrozenCheckpoint, RefusesWhatIsNotTheSame) {
  const ParamDef codes = frozen({"w", {64, 64}}, FSDP_QUANTIZE_FP8);
  run(frozen_setup(codes, 1), "saved", [&](Rank &rank) {
    rank.load();
    FSDP(save(rank, path, 1));
  });
  const auto refuses = [&](const ParamDef &param, std::initializer_list<std::string> words) {
    run(frozen_setup(param, 1), "refused",
        [&](Rank &rank) { EXPECT_TRUE(fails(load(rank, path), FSDP_INVALID_ARGUMENT, words)); });
  };
  refuses(frozen({"w", {64, 64}}, 0), {"missing: \"w\"", "unexpected: \"w.row\", \"w.row_scale\""});
  refuses(frozen({"w", {64, 64}}, FSDP_QUANTIZE_MXFP8), {"\"w.column\"", "w.row_scale\" has shape [64, 2] here"});
  refuses({"w.row", {64, 64}}, {"\"w.row\" is of F32 here and of F8_E4M3 in the checkpoint, which is not converted"});
  refuses({"w.row", {64, 64}, FSDP_UINT8, FSDP_PARAM_FROZEN}, {"\"w.row\" is of U8 here and of F8_E4M3"});
  run(frozen_setup({"v", {64, 64}, FSDP_UINT8, FSDP_PARAM_FROZEN}, 1), "refused", [&](Rank &rank) {
    const fsdp_rename rename{"w.row", "v", 0, 0, 0, 0, 0};
    EXPECT_FAILS(
        FSDP_INVALID_ARGUMENT,
        fsdp_load_weights(rank.model, (path + "/step-0000000001").c_str(), &rename, 1, sizeof rename, nullptr, nullptr),
        "\"w.row\" is of F8_E4M3, which is not converted to the U8 of \"v\"");
  });
}

}  // namespace
