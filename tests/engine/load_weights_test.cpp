// SPDX-License-Identifier: Apache-2.0
// fsdp_load_weights: files as Hugging Face and PyTorch write them, made here byte by byte; renamed, fused and
// transposed tensors, other dtypes, on any ranks; and what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "device.h"
#include "element.h"
#include "harness.h"
#include "misuse.h"
#include "weight_file.h"

using namespace harness;

namespace {

namespace fs = std::filesystem;

// Exact in every dtype here: multiples of 1/8 below 16.
float value(uint64_t tensor, uint64_t element) { return static_cast<float>((element * 7 + tensor * 13) % 128) / 8.0f; }

std::vector<float> values(uint64_t tensor, uint64_t count) {
  std::vector<float> all(count);
  for (uint64_t i = 0; i < count; ++i) all[i] = value(tensor, i);
  return all;
}

std::vector<float> transposed(const std::vector<float> &values, uint64_t rows, uint64_t columns) {
  std::vector<float> turned(values.size());
  for (uint64_t r = 0; r < rows; ++r)
    for (uint64_t c = 0; c < columns; ++c) turned[c * rows + r] = values[r * columns + c];
  return turned;
}

fsdp_rename rename(const char *theirs, const char *ours, uint64_t from_row = 0, uint64_t to_row = 0, uint64_t rows = 0,
                   uint32_t flags = 0) {
  return {theirs, ours, from_row, to_row, rows, flags, 0};
}

// A fused projection, its bias, an embedding whose head is the same tensor, and a scalar.
constexpr uint64_t width = 6;
Scenario model(uint32_t ranks, fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS) {
  Scenario setup = scenario_of(strategy, ranks);
  setup.groups = {
      {"embed", {{"embed", {11, width}}, {"head", {11, width}}}},
      {"layer.0", {{"layers.0.qkv", {3 * width, width}}, {"layers.0.bias", {3 * width}}, {"layers.0.scale", {}}}},
      {"layer.1", {{"layers.1.qkv", {3 * width, width}}, {"layers.1.bias", {3 * width}}, {"layers.1.scale", {}}}}};
  return setup;
}

class LoadWeights : public testing::Test {
 protected:
  LoadWeights() {
    std::string name = "/var/tmp/load-weights-XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~LoadWeights() override { fs::remove_all(path); }

  // The expected whole weights of the model, in declaration order.
  static std::vector<std::vector<float>> expected() {
    std::vector<std::vector<float>> all = {values(0, 11 * width), values(0, 11 * width)};
    for (uint64_t layer = 0; layer < 2; ++layer) {
      all.push_back(values(1 + layer, 3 * width * width));
      all.push_back(values(3 + layer, 3 * width));
      all.push_back({value(5 + layer, 0)});
    }
    return all;
  }
  // The tensors of a file that has the model's names and shapes.
  static std::vector<Given> ours(const std::string &type = "F32") {
    const Scenario setup = model(1);
    const auto all = expected();
    std::vector<Given> given;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params)
        given.push_back({param.name, type, param.shape, encode(all[given.size()], type)});
    return given;
  }
  static std::string encode(const std::vector<float> &from, const std::string &type) {
    if (type == "F64") return bytes_of(std::vector<double>(from.begin(), from.end()));
    if (type == "F32") return bytes_of(from);
    std::string bytes(from.size() * 2, '\0');
    store_elements(bytes.data(), type == "BF16" ? FSDP_BFLOAT16 : FSDP_FLOAT16, from);
    return bytes;
  }
  static fsdp_status load(const Rank &rank, const std::string &from, const std::vector<fsdp_rename> &renames = {},
                          uint32_t flags = 0, fsdp_loaded *loaded = nullptr) {
    fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
    options.flags = flags;
    return fsdp_load_weights(rank.model, from.c_str(), renames.data(), renames.size(), sizeof(fsdp_rename), &options,
                             loaded);
  }
  // Loads on several numbers of ranks and with several strategies.
  void expect_loaded(const std::string &from, const std::vector<fsdp_rename> &renames = {}, uint32_t flags = 0) const {
    for (const auto &[ranks, strategy] : {std::pair{1u, FSDP_STRATEGY_OPTIM_GRADS_PARAMS + 0},
                                          {3u, FSDP_STRATEGY_OPTIM_GRADS_PARAMS + 0},
                                          {2u, FSDP_STRATEGY_NO_SHARD + 0},
                                          {4u, FSDP_STRATEGY_OPTIM + 0}}) {
      const Scenario setup = model(ranks, strategy);
      std::vector<std::string> errors;
      run_threads(
          setup,
          [&](uint32_t, fsdp_context *context) {
            Rank rank(context, setup);
            fsdp_loaded loaded = FSDP_LOADED_INIT;
            FSDP(load(rank, from, renames, flags, &loaded));
            REQUIRE(loaded.read_bytes >= loaded.wanted_bytes && loaded.name[0] == 0);
            FSDP(fsdp_publish_weights(rank.model, stream()));
            REQUIRE(same_bits(rank.read_all(), expected()));
            FSDP(fsdp_check_replicas(rank.model, 0, stream()));
            clean_step(rank, 0);
            FSDP(fsdp_close_context(context));
          },
          &errors);
      for (const std::string &error : errors) EXPECT_EQ(error, "") << ranks << " ranks, strategy " << strategy;
    }
  }
  // All ranks say the same, and the window stays open.
  void expect_refused(const std::string &from, const std::vector<fsdp_rename> &renames,
                      const std::vector<std::string> &words, fsdp_status status = FSDP_INVALID_ARGUMENT) const {
    const Scenario setup = model(2);
    std::vector<std::string> errors;
    run_threads(
        setup,
        [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          require_error(load(rank, from, renames), status, words);
          rank.load();
          FSDP(fsdp_close_context(context));
        },
        &errors);
    for (const std::string &error : errors) EXPECT_EQ(error, "") << words[0];
  }

  std::string path;
};

TEST_F(LoadWeights, OfAFileOfEveryDtype) {
  for (const std::string type : {"F32", "BF16", "F16", "F64"}) {
    const std::string file = path + "/" + type + ".safetensors";
    write_file(file, ours(type));
    expect_loaded(file);
  }
}

// Doubles are rounded once, to nearest, ties to even.
TEST_F(LoadWeights, OfDoublesIsRoundedToNearestEven) {
  std::vector<Given> given = ours("F64");
  std::vector<double> finer(3 * width, 0.1);
  finer[0] = 1 + std::ldexp(1.0, -24), finer[1] = 1 + 3 * std::ldexp(1.0, -24);
  given[3].bytes = bytes_of(finer);
  write_file(path + "/f.safetensors", given);
  const Scenario setup = model(2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    FSDP(load(rank, path));
    const std::vector<float> read = rank.read(1, 1);
    REQUIRE(read[0] == 1.0f && read[1] == 1.0f + std::ldexp(1.0f, -22) && read[2] == 0.1f);
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

// Frozen parameters of 16 bits get doubles rounded once. Rounded to fp32 first, each of these numbers would be a tie.
TEST_F(LoadWeights, OfDoublesForSixteenBitsIsRoundedOnce) {
  const std::vector<double> given = {
      1.00390625 * (1 + 0x1p-40), 1.00390625 * (1 - 0x1p-40), 65519.999999, 65520, 2049 * (1 + 0x1p-45),
      2049 * (1 - 0x1p-45),       0x1p-25 * (1 + 0x1p-40),    -0x1p-25};
  const std::map<fsdp_dtype, std::vector<uint16_t>> expected = {
      {FSDP_BFLOAT16, {0x3F81, 0x3F80, 0x4780, 0x4780, 0x4500, 0x4500, 0x3300, 0xB300}},
      {FSDP_FLOAT16, {0x3C04, 0x3C04, 0x7BFF, 0x7C00, 0x6801, 0x6800, 0x0001, 0x8000}}};
  write_file(path + "/f.safetensors", {{"w", "F64", {8}, bytes_of(given)}});
  for (const auto &[dtype, bits] : expected) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    setup.groups = {{"g", {{"w", {8}, dtype, FSDP_PARAM_FROZEN}}}};
    run_threads(setup, [&, dtype = dtype, &bits = bits](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      FSDP(load(rank, path));
      std::vector<uint16_t> read(8);
      FSDP(fsdp_read_param(rank.groups[0], 0, read.data(), dtype, 8, FSDP_EVERY_RANK, 0));
      for (size_t i = 0; i < 8; ++i) REQUIRE(read[i] == bits[i]);
      FSDP(fsdp_publish_weights(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

// snapshots/REV/FILE is a link to blobs/HASH, as Hugging Face's cache has it; so is the index.
TEST_F(LoadWeights, OfACacheOfLinks) {
  const std::string snapshot = path + "/snapshots/abc";
  fs::create_directories(snapshot);
  fs::create_directories(path + "/blobs");
  write_file(path + "/blobs/0a", ours());
  fs::create_symlink("../../blobs/0a", snapshot + "/model-00001-of-00001.safetensors");
  expect_loaded(snapshot);
  expect_loaded(snapshot + "/model-00001-of-00001.safetensors");
  nlohmann::json index;
  for (const Given &one : ours()) index["weight_map"][one.name] = "model-00001-of-00001.safetensors";
  std::ofstream(path + "/blobs/0b") << index.dump();
  fs::create_symlink("../../blobs/0b", snapshot + "/model.safetensors.index.json");
  expect_loaded(snapshot);
  fs::remove(path + "/blobs/0a");
  expect_refused(snapshot, {}, {"/model-00001-of-00001.safetensors: cannot be opened: No such file"}, FSDP_SYSTEM);
}

// All files are read, alone and beside others; ALLOW_MISSING does not skip any of them.
TEST_F(LoadWeights, OfFilesWithOddNames) {
  const std::vector<Given> given = ours();
  for (const std::string name : {"model (1)", "a+b", "a@b", "m\xc3\xa4", ".hidden", "-x"}) {
    const std::string folder = path + "/" + name;
    fs::create_directory(folder);
    write_file(folder + "/" + name + ".safetensors", {given.begin(), given.begin() + 4});
    write_file(folder + "/model.safetensors", {given.begin() + 4, given.end()});
    expect_loaded(folder, {}, FSDP_LOAD_ALLOW_MISSING);
    fs::create_directory(folder + "/unet");
    fs::rename(folder + "/" + name + ".safetensors", folder + "/unet/" + name + ".safetensors");
    nlohmann::json index;
    for (size_t i = 0; i < given.size(); ++i)
      index["weight_map"][given[i].name] = i < 4 ? "unet/" + name + ".safetensors" : "model.safetensors";
    std::ofstream(folder + "/model.safetensors.index.json") << index.dump();
    expect_loaded(folder, {}, FSDP_LOAD_ALLOW_MISSING);
  }
}

TEST_F(LoadWeights, OfUnknownTypesAreRefusedWhereTheyAreUsed) {
  std::vector<Given> given = ours();
  given.push_back({"mask", "F8_E4M3B11", {4}, "abcd"});
  write_file(path + "/model.safetensors", given);
  expect_loaded(path, {}, FSDP_LOAD_ALLOW_UNEXPECTED);
  expect_refused(path, {}, {"unexpected: \"mask\""});
  given[0].type = "F99";
  write_file(path + "/model.safetensors", given);
  expect_refused(path, {}, {"different: \"embed\" is of \"F99\", which this release does not know"});
}

// A rounded scale would be another scale. Scales with fewer bits are loaded exactly, scales with more bits are refused.
TEST_F(LoadWeights, OfScalesIsExact) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = {{"g", {{"w", {4, 6}, FSDP_FLOAT32, FSDP_PARAM_FROZEN}}}};
  setup.groups[0].params[0].quantization = FSDP_QUANTIZE_FP8;
  const Given codes{"w.row", "F8_E4M3", {4, 6}, std::string(24, '\x38')};  // codes of 1
  const std::vector<std::string> types{"F32", "BF16", "F16", "F64"};
  for (const std::string &type : types)
    write_file(path + "/" + type + ".safetensors", {codes, {"w.row_scale", type, {1, 1}, encode({1.625f}, type)}});
  std::vector<std::string> errors;
  const auto body = [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    for (const std::string &type : types) {
      const std::vector<float> zeros(24);
      FSDP(fsdp_load_param(rank.groups[0], 0, zeros.data(), FSDP_FLOAT32, 24, FSDP_EVERY_RANK, 0));
      const std::string file = path + "/" + type + ".safetensors";
      if (type == "F64")
        require_error(load(rank, file), FSDP_INVALID_ARGUMENT,
                      {"\"w.row_scale\" is of F64, which is not converted to the F32 of \"w.row_scale\""});
      else
        FSDP(load(rank, file));
      REQUIRE(rank.read(0, 0) == std::vector<float>(24, type == "F64" ? 0.0f : 1.625f));
    }
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  };
  run_threads(setup, body, &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "");
}

TEST_F(LoadWeights, OfAFolderWithAnIndex) {
  std::vector<Given> given = ours();
  const std::vector<Given> first(given.begin(), given.begin() + 3), second(given.begin() + 3, given.end());
  write_file(path + "/model-00001-of-00002.safetensors", first);
  write_file(path + "/model-00002-of-00002.safetensors", second);
  write_file(path + "/not-in-the-index.safetensors", given);
  nlohmann::json index = {{"metadata", {{"total_size", 1}}}, {"weight_map", nlohmann::json::object()}};
  for (const Given &one : first) index["weight_map"][one.name] = "model-00001-of-00002.safetensors";
  for (const Given &one : second) index["weight_map"][one.name] = "model-00002-of-00002.safetensors";
  std::ofstream(path + "/model.safetensors.index.json") << index.dump();
  expect_loaded(path);
  // Without the index, each tensor would be in two files.
  fs::rename(path + "/model.safetensors.index.json", path + "/other.json");
  expect_refused(path, {}, {"rank 0: ", "comes twice, in two files or more"});
  fs::remove(path + "/not-in-the-index.safetensors");
  expect_loaded(path);
  index["weight_map"]["embed"] = "../model-00001-of-00002.safetensors";
  std::ofstream(path + "/model.safetensors.index.json") << index.dump();
  expect_refused(path, {},
                 {"model.safetensors.index.json: /weight_map/embed is \"../model-00001-of-00002.safetensors\", not the "
                  "path of a file inside this folder"});
}

// Their q, k and v become rows of our qkv, one tensor is transposed as in GPT-2, and our head is their embedding.
TEST_F(LoadWeights, OfOtherNamesFusedAndTransposed) {
  const auto all = expected();
  std::vector<Given> given = {{"wte.weight", "BF16", {11, width}, encode(all[0], "BF16")}};
  const auto rows = [](const std::vector<float> &of, uint64_t first, uint64_t count) {
    return std::vector<float>(of.begin() + static_cast<ptrdiff_t>(first),
                              of.begin() + static_cast<ptrdiff_t>(first + count));
  };
  // Layer 0 has three projections, layer 1 a transposed one of all three.
  for (uint64_t part = 0; part < 3; ++part) {
    const std::string name = std::string("h.0.") + "qkv"[part];
    given.push_back(
        {name + ".weight", "F32", {width, width}, bytes_of(rows(all[2], part * width * width, width * width))});
    given.push_back({name + ".bias", "F16", {width}, encode(rows(all[3], part * width, width), "F16")});
  }
  given.push_back({"h.1.c_attn.weight", "F32", {width, 3 * width}, bytes_of(transposed(all[5], 3 * width, width))});
  given.push_back({"h.1.c_attn.bias", "F32", {3 * width}, bytes_of(all[6])});
  for (uint64_t layer = 0; layer < 2; ++layer)
    given.push_back({"h." + std::to_string(layer) + ".scale", "F64", {}, encode(all[4 + 3 * layer], "F64")});
  write_file(path + "/model.safetensors", given, {{"format", "pt"}});
  const std::vector<fsdp_rename> renames = {
      rename("wte.weight", "embed"),
      rename("wte.weight", "head"),
      rename("h.*.q.weight", "layers.*.qkv", 0, 0),
      rename("h.*.k.weight", "layers.*.qkv", 0, width),
      rename("h.*.v.weight", "layers.*.qkv", 0, 2 * width),
      rename("h.*.q.bias", "layers.*.bias", 0, 0),
      rename("h.*.k.bias", "layers.*.bias", 0, width),
      rename("h.*.v.bias", "layers.*.bias", 0, 2 * width),
      rename("h.*.c_attn.weight", "layers.*.qkv", 0, 0, 0, FSDP_RENAME_TRANSPOSED),
      rename("h.*.c_attn.bias", "layers.*.bias"),
      rename("h.*.scale", "layers.*.scale")};
  expect_loaded(path, renames);
}

// A fused tensor of theirs goes to two of ours, straight and transposed.
TEST_F(LoadWeights, OfTheirFusedTensorsIsDivided) {
  const auto all = expected();
  std::vector<float> both = all[2];
  both.insert(both.end(), all[5].begin(), all[5].end());
  for (const bool turned : {false, true}) {
    std::vector<Given> given = ours();
    given.erase(given.begin() + 5);
    given.erase(given.begin() + 2);
    given.push_back({"both", "F32",
                     turned ? std::vector<uint64_t>{width, 6 * width} : std::vector<uint64_t>{6 * width, width},
                     bytes_of(turned ? transposed(both, 6 * width, width) : both)});
    const std::string file = path + "/model.safetensors";
    write_file(file, given);
    const uint32_t flags = turned ? FSDP_RENAME_TRANSPOSED : 0;
    expect_loaded(file, {rename("both", "layers.0.qkv", 0, 0, 3 * width, flags),
                         rename("both", "layers.1.qkv", 3 * width, 0, 0, flags)});
  }
}

// The tensors are cut as PyTorch's distributed checkpoint cuts them: in rows, and in columns for tensor parallelism.
TEST_F(LoadWeights, OfPartsOfTensors) {
  const auto all = expected();
  std::vector<Given> given = ours(), left, right;
  const std::vector<float> &whole = all[0];
  std::vector<float> columns[2];
  for (uint64_t i = 0; i < whole.size(); ++i) columns[i % width >= 2].push_back(whole[i]);
  given.erase(given.begin());
  left.push_back({"embed", "F32", {11, 2}, bytes_of(columns[0])});
  right.push_back({"embed", "F32", {11, 4}, bytes_of(columns[1])});
  left.insert(left.end(), given.begin(), given.end());
  nlohmann::json offsets[2];
  for (const Given &one : given) offsets[0][one.name] = {{"saved_offsets", std::vector<uint64_t>(one.shape.size())}};
  offsets[0]["embed"] = {{"saved_offsets", {0, 0}}};
  offsets[1]["embed"] = {{"saved_offsets", {0, 2}}};
  const auto metadata = [&](int part) {
    return nlohmann::json{{"DCP_SHARDING_INFO", offsets[part].dump()}, {"DCP_VERSION", "1.0"}};
  };
  write_file(path + "/shard-00001-model-00001-of-00001.safetensors", left, metadata(0));
  write_file(path + "/shard-00002-model-00001-of-00001.safetensors", right, metadata(1));
  expect_loaded(path);
  fs::remove(path + "/shard-00002-model-00001-of-00001.safetensors");
  expect_refused(path, {}, {"\"embed\" has shape [11, 6] here; \"embed\" has [11, 2]"});
  offsets[1]["embed"] = {{"saved_offsets", {0, 3}}};  // no file has one of the columns
  write_file(path + "/shard-00002-model-00001-of-00001.safetensors", right, metadata(1));
  expect_refused(path, {}, {"tensor \"embed\" of shape [11, 7] is not whole: its files have 66 of its elements"});
  offsets[1]["embed"] = {{"saved_offsets", {0, 1}}};
  write_file(path + "/shard-00002-model-00001-of-00001.safetensors", right, metadata(1));
  expect_refused(path, {}, {"tensor \"embed\" comes twice"});
  offsets[1]["embed"] = {{"saved_offsets", {0, UINT64_MAX}}};
  write_file(path + "/shard-00002-model-00001-of-00001.safetensors", right, metadata(1));
  expect_refused(path, {}, {"embed"});
}

TEST_F(LoadWeights, OfACheckpointTakesItsWeights) {
  const Scenario setup = model(3);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    write_file(path + "/" + std::to_string(rank.rank), ours());
    FSDP(load(rank, path + "/" + std::to_string(rank.rank)));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_save(rank.model, (path + "/runs").c_str(), nullptr));
    FSDP(fsdp_close_context(context));
  });
  expect_loaded(path + "/runs");
  expect_loaded(path + "/runs/step-0000000000");
  const std::string file = path + "/runs/step-0000000000/shard-00002-model-00001-of-00001.safetensors";
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(4099).put('\x77');
  expect_refused(path + "/runs", {}, {file + ": bytes 4096 to "});
}

TEST_F(LoadWeights, ThatDoNotFitAreAllListed) {
  std::vector<Given> given = ours();
  given[0].name = "another";
  given[2].shape = {width, 3 * width};
  given[4].type = "I32";
  given.push_back({"mask", "BOOL", {4}, std::string(4, '\1')});
  const std::string file = path + "/model.safetensors";
  write_file(file, given);
  expect_refused(
      file, {},
      {file + " does not fit the model; missing: \"embed\"", "\"layers.0.qkv\"", "\"layers.0.scale\"",
       "unexpected: \"another\", \"mask\"", "\"layers.0.qkv\" has shape [18, 6] here; \"layers.0.qkv\" has [6, 18]",
       "\"layers.0.scale\" is of I32, which is not converted"});
  given = ours();
  given.push_back({"mask", "BOOL", {4}, std::string(4, '\1')});
  write_file(file, given);
  expect_loaded(file, {}, FSDP_LOAD_ALLOW_UNEXPECTED);
  // Rows that come twice or not at all.
  expect_refused(file, {rename("mask", "nothing"), rename("layers.0.qkv", "layers.0.qkv", 0, 0, 17)},
                 {"rows 17 to 18 of \"layers.0.qkv\" come from nowhere"});
  expect_refused(file, {rename("layers.0.qkv", "layers.0.qkv"), rename("layers.1.qkv", "layers.0.qkv", 2, 17, 1)},
                 {"rows 17 to 18 of \"layers.0.qkv\" come twice, also from"});
  expect_refused(file, {rename("layers.0.qkv", "layers.0.qkv", 0, 3)}, {"and 18 rows do not go to 3"});
  expect_refused(file, {rename("layers.0.qkv", "layers.0.qkv", 18)}, {"not 0 rows from 18 on"});
  expect_refused(file, {rename("layers.0.bias", "layers.0.bias", 0, 0, 0, FSDP_RENAME_TRANSPOSED)},
                 {"only matrices are transposed"});
}

TEST_F(LoadWeights, AreRefusedWithWrongArguments) {
  write_file(path + "/model.safetensors", ours());
  expect_refused(path + "/none", {}, {"rank 0: ", "/none: ", "No such file"}, FSDP_SYSTEM);
  fs::create_directory(path + "/empty");
  expect_refused(path + "/empty", {},
                 {"rank 0: ", "there are neither safetensors files in this folder nor checkpoints"});
  std::ofstream(path + "/damaged") << "not a file of tensors";
  expect_refused(path + "/damaged", {}, {"rank 0: ", "/damaged: "});
  const Scenario setup = model(1);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    const auto with = [&](const fsdp_rename &one) { return load(rank, path, {one}); };
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(rank, path, {}, FSDP_LOAD_FALLBACK), "fsdp_load_options.flags");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(rename(nullptr, "a")), "fsdp_load_weights: renames[0].theirs is NULL");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(rename("a", "")), "renames[0].ours");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(rename("*a*", "b")), "renames[0]", "one '*' in theirs");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(rename("a", "b*")), "renames[0]", "one '*' in theirs");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, with(rename("a", "b", 0, 0, 0, 1)), "renames[0].flags", "unknown bits");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
                 fsdp_load_weights(rank.model, path.c_str(), nullptr, 1, sizeof(fsdp_rename), nullptr, nullptr),
                 "renames is NULL, rename_count is 1");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load_weights(rank.model, path.c_str(), nullptr, 0, 0, nullptr, nullptr),
                 "rename_stride is 0");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT,
                 fsdp_load_weights(rank.model, nullptr, nullptr, 0, sizeof(fsdp_rename), nullptr, nullptr),
                 "path is NULL");
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    EXPECT_FAILS(FSDP_INVALID_STATE, load(rank, path), "the update window is closed");
    FSDP(fsdp_close_context(context));
  });
  const Scenario two = model(2);
  run_threads(two, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, two);
    require_error(load(rank, path, {}, rank.rank ? FSDP_LOAD_ALLOW_MISSING : 0), FSDP_MISMATCH,
                  {"rank 0 says ", "rank 1 says "});
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

// A model with a box of each tensor loads the box's rows and columns. Rows of a rename are those of the whole tensor.
TEST_F(LoadWeights, GoesToBoxesOfTheTensors) {
  constexpr uint64_t rows = 3 * width;
  const std::vector<float> whole = values(1, rows * width);
  const auto part = [&](uint64_t first, uint64_t count) {
    return std::vector<float>(whole.begin() + static_cast<ptrdiff_t>(first * width),
                              whole.begin() + static_cast<ptrdiff_t>((first + count) * width));
  };
  write_file(path + "/straight.safetensors", {{"qkv", "F32", {rows, width}, bytes_of(whole)}});
  write_file(path + "/turned.safetensors", {{"qkv", "F32", {width, rows}, bytes_of(transposed(whole, rows, width))}});
  write_file(path + "/three.safetensors", {{"q", "F32", {width, width}, bytes_of(part(0, width))},
                                           {"k", "F32", {width, width}, bytes_of(part(width, width))},
                                           {"v", "F32", {width, width}, bytes_of(part(2 * width, width))}});
  const std::vector<fsdp_rename> three = {rename("q", "qkv", 0, 0), rename("k", "qkv", 0, width),
                                          rename("v", "qkv", 0, 2 * width)};
  struct Place {
    uint64_t row, column, rows, columns;
  };
  for (const Place &box : {Place{0, 0, rows, width}, {4, 0, 9, width}, {0, 2, rows, 3}, {7, 1, 8, 4}, {13, 3, 2, 2}})
    for (const uint32_t ranks : {1, 3}) {
      Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
      setup.groups = {{"g", {{"qkv", {box.rows, box.columns}}}}};
      setup.groups[0].params[0].global_shape = {rows, width};
      setup.groups[0].params[0].global_offset = {box.row, box.column};
      std::vector<float> expected;
      for (uint64_t r = 0; r < box.rows; ++r)
        for (uint64_t c = 0; c < box.columns; ++c) expected.push_back(whole[(box.row + r) * width + box.column + c]);
      std::vector<std::string> errors;
      run_threads(
          setup,
          [&](uint32_t, fsdp_context *context) {
            Rank rank(context, setup);
            const auto take = [&](const char *file, const std::vector<fsdp_rename> &renames, uint32_t flags = 0) {
              FSDP(load(rank, path + "/" + file, renames, flags));
              REQUIRE(rank.read(0, 0) == expected);
              const std::vector<float> zeros(expected.size());
              FSDP(fsdp_load_param(rank.groups[0], 0, zeros.data(), FSDP_FLOAT32, zeros.size(), FSDP_EVERY_RANK, 0));
            };
            take("straight.safetensors", {});
            take("turned.safetensors", {rename("qkv", "qkv", 0, 0, 0, FSDP_RENAME_TRANSPOSED)});
            take("three.safetensors", three);
            // Only the box's own rows and columns are needed.
            if (box.row >= width)
              take("three.safetensors", {three[1], three[2], rename("q", "nothing")}, FSDP_LOAD_ALLOW_UNEXPECTED);
            rank.load();
            FSDP(fsdp_close_context(context));
          },
          &errors);
      for (const std::string &error : errors) EXPECT_EQ(error, "") << box.row << ", " << box.column;
    }
}

}  // namespace
