// SPDX-License-Identifier: Apache-2.0
// Tests the conversion of weights from one form of files to another. Every element must reach its row, whatever boxes
// hold it, and no partial result may be left behind.
#include "checkpoint_converting.h"

namespace fsdp::checkpoint {
namespace {

TEST_F(Convert, ThereAndBackTensorsAreTheSame) {
  write_foreign(at("a.safetensors"), some_tensors());
  const Converted imported = import("a.safetensors");
  EXPECT_EQ(imported.path, at("runs/step-0000000007"));
  EXPECT_EQ(read(imported.path), some_tensors());
  EXPECT_EQ(verify_checkpoints(at("runs"), [](uint64_t, uint64_t) {}).damages.size(), 0u);
  consolidate_to("one");
  EXPECT_EQ(names("one"), std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(read(at("one")), some_tensors());
  // Limits each file to this many bytes, or to one tensor.
  const Converted several = consolidate_to("several", {.renames = {}, .max_bytes = 2'480'000, .copied_folder = {}});
  EXPECT_EQ(several.files,
            (std::vector<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                      "model-00003-of-00003.safetensors"}));
  EXPECT_EQ(read(at("several")), some_tensors());
  EXPECT_TRUE(fs::exists(at("several/model.safetensors.index.json")));
}

TEST_F(Convert, RowsOfManyRanksAreOneTensorAgain) {
  Tensors tensors = some_tensors();
  tensors.erase("scalar");
  tensors.erase("none");
  save_cut(tensors, 5);
  consolidate_to("out");
  EXPECT_EQ(read(at("out")), tensors);
}

// The tensors take two windows each, and consist of the boxes of three ranks.
TEST_F(Convert, TransposedTensorsAreTurnedBackByWindows) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer takes half a minute for 15 million elements, which one thread turns one by one";
#endif
  const Tensors tensors{{"w", random_tensor("F32", {3001, 5003}, 1)}, {"small", random_tensor("U8", {7, 5}, 2)}};
  save_cut(tensors, 3);
  consolidate_to("out", {.renames = {{.theirs = "*", .ours = "*", .transposed = true}}, .copied_folder = {}});
  EXPECT_EQ(read(at("out")), (Tensors{{"w", turned(tensors.at("w"))}, {"small", turned(tensors.at("small"))}}));
}

TEST_F(Convert, ARowThatIsLongerThanAWindowIsTurnedInParts) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer takes long for 8 million elements, which one thread turns one by one";
#endif
  const Tensors tensors{{"tall", random_tensor("F64", {NewTensorReader::window_bytes / 8 + 1000, 2}, 1)}};
  save_cut(tensors, 2);
  consolidate_to("out", {.renames = {{.theirs = "*", .ours = "*", .transposed = true}}, .copied_folder = {}});
  EXPECT_EQ(read(at("out")).at("tall"), turned(tensors.at("tall")));
}

// Our qkv is three transposed tensors in the other library, and our two embeddings are one. Other pairs of ours are one
// tensor there, some of them transposed.
const std::vector<Rename> fused = {{.theirs = "h.*.q", .ours = "layer.*.qkv", .transposed = true},
                                   {.theirs = "h.*.k", .ours = "layer.*.qkv", .to_row = 40, .transposed = true},
                                   {.theirs = "h.*.v", .ours = "layer.*.qkv", .to_row = 56, .transposed = true},
                                   {.theirs = "wte", .ours = "embed"},
                                   {.theirs = "wte", .ours = "head"},
                                   {.theirs = "both", .ours = "up", .row_count = 10},
                                   {.theirs = "both", .ours = "down", .from_row = 10},
                                   {.theirs = "conv", .ours = "left", .row_count = 20, .transposed = true},
                                   {.theirs = "conv", .ours = "right", .from_row = 20, .transposed = true}};

TEST_F(Convert, FusedAndTransposedTensorsGoThereAndBack) {
  const Tensors theirs = fused_tensors();
  write_foreign(at("a.safetensors"), theirs);
  const Tensors ours = read(import("a.safetensors", fused).path);
  Tensor qkv = turned(theirs.at("h.0.q"));
  for (const char *name : {"h.0.k", "h.0.v"}) {
    const Tensor more = turned(theirs.at(name));
    qkv.shape[0] += more.shape[0];
    qkv.bytes.insert(qkv.bytes.end(), more.bytes.begin(), more.bytes.end());
  }
  EXPECT_EQ(ours, (Tensors{{"layer.0.qkv", qkv},
                           {"embed", theirs.at("wte")},
                           {"head", theirs.at("wte")},
                           {"up", rows_of(theirs.at("both"), 0, 10)},
                           {"down", rows_of(theirs.at("both"), 10, 15)},
                           {"left", rows_of(turned(theirs.at("conv")), 0, 20)},
                           {"right", rows_of(turned(theirs.at("conv")), 20, 30)},
                           {"other", theirs.at("other")}}));
  consolidate_to("out", {.renames = fused, .copied_folder = {}});
  EXPECT_EQ(read(at("out")), theirs);
}

// The tied tensors were trained separately, so they are no longer one tensor.
TEST_F(Convert, TiedTensorsThatDifferAreRefused) {
  Tensors ours{{"embed", random_tensor("F32", {50, 8}, 1)}};
  ours["head"] = ours["embed"];
  ours["head"].bytes.back() ^= std::byte{1};
  save_cut(ours, 2);
  EXPECT_SAYS(consolidate_to("out", {.renames = {{.theirs = "wte", .ours = "embed"}, {.theirs = "wte", .ours = "head"}},
                                     .copied_folder = {}}),
              "\"head\" and \"embed\" have different values, and would both be \"wte\"");
  EXPECT_EQ(names(), std::vector<std::string>{"runs"});
}

TEST_F(Convert, FloatsAreRoundedAsLoadsDoAndOthersStay) {
  // The second value, 1 + 2^-8, and the third, 1 + 3 * 2^-8, are ties.
  const float values[] = {1.0F, 1.00390625F, 1.01171875F, -3.4e38F, 1e-40F};
  const uint16_t expected[] = {0x3F80, 0x3F80, 0x3F82, 0xFF80, 0x0001};
  Tensor floats{"F32", {5}, Bytes(sizeof values)}, halves{"BF16", {5}, Bytes(sizeof expected)};
  std::memcpy(floats.bytes.data(), values, sizeof values);
  std::memcpy(halves.bytes.data(), expected, sizeof expected);
  // The values are rounded once. The second one is slightly more than a tie, and rounding to fp32 first would make it a
  // tie.
  const double wide[] = {1.0,    1.00390625 * (1 + 0x1p-40), 0.5, 1.00390625 * (1 - 0x1p-40), 1e-320,
                         -1e300, 0x1.FEFFFFFFFFFFFp127};
  const uint16_t narrow[] = {0x3F80, 0x3F81, 0x3F00, 0x3F80, 0x0000, 0xFF80, 0x7F7F};
  Tensor doubles{"F64", {7}, Bytes(sizeof wide)}, narrowed{"BF16", {7}, Bytes(sizeof narrow)};
  std::memcpy(doubles.bytes.data(), wide, sizeof wide);
  std::memcpy(narrowed.bytes.data(), narrow, sizeof narrow);
  const Tensor mask = random_tensor("I64", {3}, 1);
  write_foreign(at("a.safetensors"), {{"f", floats}, {"d", doubles}, {"i", mask}});
  import("a.safetensors");
  consolidate_to("out", {.renames = {}, .as = find_element_type("BF16"), .copied_folder = {}});
  EXPECT_EQ(read(at("out")), (Tensors{{"f", halves}, {"d", narrowed}, {"i", mask}}));
}

// Scales keep their dtype when weights are converted, because a rounded scale would be another scale. A tensor that
// only has the name of a scale does not count as one.
TEST_F(Convert, CodesAndTheirScalesStay) {
  const Tensor codes = random_tensor("F8_E4M3", {4, 6}, 1), bytes = random_tensor("U8", {5}, 2);
  const float exact = 1.001F;
  const uint16_t rounded = 0x3F80;
  Tensor scale{"F32", {1, 1}, Bytes(sizeof exact)}, other{"BF16", {1, 1}, Bytes(sizeof rounded)};
  std::memcpy(scale.bytes.data(), &exact, sizeof exact);
  std::memcpy(other.bytes.data(), &rounded, sizeof rounded);
  write_foreign(at("a.safetensors"), {{"w.row", codes},
                                      {"w.row_scale", scale},
                                      {"w.row_scale_inv", scale},
                                      {"v_scale", scale},
                                      {"v_scale_inv", scale},
                                      {"b", bytes}});
  import("a.safetensors");
  consolidate_to("out", {.renames = {}, .as = find_element_type("BF16"), .copied_folder = {}});
  EXPECT_EQ(read(at("out")), (Tensors{{"w.row", codes},
                                      {"w.row_scale", scale},
                                      {"w.row_scale_inv", scale},
                                      {"v_scale", other},
                                      {"v_scale_inv", other},
                                      {"b", bytes}}));
}

TEST_F(Convert, PlansThatDoNotFitAreRefusedByName) {
  write_foreign(at("a.safetensors"), fused_tensors());
  const auto imports = [&](std::vector<Rename> renames) {
    return message_of([&] { import("a.safetensors", renames); });
  };
  EXPECT_THAT_SAYS(imports({{.theirs = "h.0.q", .ours = "x", .to_row = 3}}), "rows 0 to 3 of \"x\" come from nowhere");
  EXPECT_THAT_SAYS(imports({{.theirs = "other", .ours = "h.0.q"}}), "their rows differ");
  EXPECT_THAT_SAYS(imports({{.theirs = "h.0.k", .ours = "h.0.v"}}), "rows 0 to 24 of \"h.0.v\" come twice, also from");
  EXPECT_THAT_SAYS(imports({{.theirs = "other", .ours = "x", .transposed = true}}), "only matrices are transposed");
  EXPECT_THAT_SAYS(imports({{.theirs = "other", .ours = "x", .from_row = 4, .row_count = 6}}),
                   "\"other\" has 9 rows, not 6 from 4 on");
  EXPECT_THAT_SAYS(imports({{.theirs = "wte", .ours = "x"}, {.theirs = "both", .ours = "x", .to_row = 100}}),
                   "\"x\" would be of two types: \"wte\" is of BF16, and \"both\" of F16");
  EXPECT_THAT_SAYS(imports({{.theirs = "wte", .ours = "x"}, {.theirs = "wtf", .ours = "y"}}),
                   "renames: no tensor is called \"wtf\"");
  EXPECT_FALSE(fs::exists(at("runs")));
  import("a.safetensors");
  const auto exports = [&](std::vector<Rename> renames) {
    return message_of([&] { consolidate_to("out", {.renames = renames, .copied_folder = {}}); });
  };
  EXPECT_THAT_SAYS(exports({{.theirs = "x", .ours = "wte", .row_count = 99}}), "rows 99 to 100 of \"wte\" go nowhere");
  EXPECT_THAT_SAYS(exports({{.theirs = "x", .ours = "wte"}, {.theirs = "y", .ours = "wte", .to_row = 0}}),
                   "row 0 of \"wte\" goes to two tensors, also to \"y\"");
  EXPECT_THAT_SAYS(exports({{.theirs = "h.*.q", .ours = "wte"}}), "what '*' stood for is not known");
  EXPECT_THAT_SAYS(exports({{.theirs = "h.0.q", .ours = "other"}}), "their rows differ");
  EXPECT_THAT_SAYS(exports({{.theirs = "h.*.x", .ours = "g.*"}}), "renames: no tensor is called \"g.*\"");
  EXPECT_EQ(names(), (std::vector<std::string>{"a.safetensors", "runs"}));
}

TEST_F(Convert, RenamesAreReadAndRefusedByName) {
  const auto renames =
      parse_renames(R"([{"theirs":"a.*","ours":"b.*"},)"
                    R"({"theirs":"c","ours":"d","from_row":1,"to_row":2,"row_count":3,"transposed":true}])",
                    "r.json");
  ASSERT_EQ(renames.size(), 2u);
  EXPECT_EQ(renames[0].theirs + renames[0].ours, "a.*b.*");
  EXPECT_FALSE(renames[0].transposed);
  EXPECT_EQ(renames[1].from_row * 100 + renames[1].to_row * 10 + renames[1].row_count, 123u);
  EXPECT_TRUE(renames[1].transposed);
  EXPECT_SAYS(parse_renames(R"([{"theirs":"a","ours":"b","rows":1}])", "r.json"), "r.json: /0/rows is 1, not a member");
  EXPECT_SAYS(parse_renames(R"([{"theirs":"a"}])", "r.json"), "/0/ours is missing");
  EXPECT_SAYS(parse_renames(R"([{"theirs":"a","ours":"b","transposed":1}])", "r.json"), "not true or false");
  EXPECT_SAYS(parse_renames(R"([{"theirs":"a","ours":"b.*"}])", "r.json"), "one '*' in theirs");
}

// ---- damage ----

void flip(const std::string &file, uint64_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  const int byte = stream.get();
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(static_cast<char>(byte ^ 4));
}

TEST_F(Convert, VerifyFindsEachDamagedBlockAndFile) {
  save_cut({{"a", random_tensor("F32", {20, 300'000}, 1)}, {"b", random_tensor("F32", {20, 10}, 2)}}, 4);
  const std::string folder = at("runs/step-0000000003/");
  const auto damages = [&] {
    std::vector<std::string> all;
    for (const Damage &damage : verify_checkpoints(at("runs"), [](uint64_t, uint64_t) {}).damages)
      all.push_back(damage.what);
    return all;
  };
  EXPECT_TRUE(damages().empty());
  // Two blocks of one chunk, a header, a size and a file are damaged in turn.
  flip(folder + shard_name(0), 4096 + 5);
  flip(folder + shard_name(0), 4096 + (3 << 20) + 5);
  flip(folder + shard_name(1), 20);
  fs::resize_file(folder + shard_name(2), 5000);
  fs::remove(folder + shard_name(3));
  std::ofstream(folder + "extra.safetensors") << "x";
  const auto found = damages();
  ASSERT_EQ(found.size(), 6u);
  EXPECT_THAT_SAYS(found[0], shard_name(0) + ": bytes 4096 to 266240, of \"a\", are not what was written there");
  EXPECT_THAT_SAYS(found[1], shard_name(0) + ": bytes 3149824 to 3411968, of \"a\"");
  EXPECT_THAT_SAYS(found[2], shard_name(1) + ": ");
  EXPECT_THAT_SAYS(found[3], shard_name(2) + ": has 5000 bytes, and was written with ");
  EXPECT_THAT_SAYS(found[4], shard_name(3) + ": is missing");
  EXPECT_THAT_SAYS(found[5], "extra.safetensors: the manifest does not know it");
  const auto listed = inspect_checkpoints(at("runs"));
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_THAT_SAYS(listed[0].problem, shard_name(2) + ": has 5000 bytes");
}

TEST_F(Convert, VerifyFindsFilesThatHaveChangedTheirPlaces) {
  save_cut({{"a", random_tensor("F32", {20, 30}, 1)}}, 2);
  const std::string folder = at("runs/step-0000000003/");
  fs::rename(folder + shard_name(0), at("kept"));
  fs::rename(folder + shard_name(1), folder + shard_name(0));
  fs::rename(at("kept"), folder + shard_name(1));
  const auto damages = verify_checkpoints(at("runs"), [](uint64_t, uint64_t) {}).damages;
  ASSERT_EQ(damages.size(), 2u);
  for (uint32_t rank : {0, 1}) {
    EXPECT_EQ(damages[rank].file, folder + shard_name(rank));
    EXPECT_THAT_SAYS(damages[rank].what, "it is not the file that was written");
  }
}

TEST_F(Convert, ListNamesWhatCannotBeRead) {
  write_foreign(at("a.safetensors"), fused_tensors());
  import("a.safetensors", {}, 9);
  import("a.safetensors", {}, 4);
  fs::create_directory(at("runs/step-0000000005"));
  std::ofstream(at("runs/step-0000000005/checkpoint.json")) << "{";
  std::vector<std::string> found;
  for (const ListedCheckpoint &one : inspect_checkpoints(at("runs")))
    found.push_back(one.name + (one.problem.empty() ? " whole" : " " + one.problem));
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0], "step-0000000004 whole");  // it was made last
  EXPECT_EQ(found[1], "step-0000000009 whole");
  EXPECT_THAT_SAYS(found[2], "step-0000000005/checkpoint.json: its JSON ends being JSON");
  const Verified verified = verify_checkpoints(at("runs"), [](uint64_t, uint64_t) {});
  EXPECT_EQ(verified.checkpoints, 3u);
  ASSERT_EQ(verified.damages.size(), 1u);
  EXPECT_EQ(inspect_checkpoints(at("runs/step-0000000004")).at(0).name, "step-0000000004");
}

TEST_F(Convert, DamagedAndIncompleteCheckpointsAreNotConsolidated) {
  save_cut({{"a", random_tensor("F32", {40, 100}, 1)}}, 4);
  flip(at("runs/step-0000000003/" + shard_name(1)), 4096 + 7);
  EXPECT_SAYS(consolidate_to("out"), shard_name(1) + ": bytes 4096 to 8096, of \"a\", are not what was written there");
  // The file ends before its tensor's last rows, so only the manifest shows that they are missing.
  fs::remove(at("runs/step-0000000003/" + shard_name(3)));
  EXPECT_SAYS(consolidate_to("out"), shard_name(3) + " is missing");
  EXPECT_EQ(names(), std::vector<std::string>{"runs"});
}

TEST_F(Convert, TensorsThatWereSavedInPartAreNotConsolidated) {
  save_cut({{"a", random_tensor("F32", {40, 100}, 1)}}, 3, true);
  EXPECT_SAYS(consolidate_to("out"),
              "tensor \"a\" of shape [80, 100] is not whole: 4000 of its 8000 elements were saved");
  EXPECT_EQ(names(), std::vector<std::string>{"runs"});
}

// A folder that has its final name from the start is no checkpoint before it has a manifest.
TEST_F(Convert, WhatIsStillWrittenIsNoDamage) {
  const Folder folder = Folder::make(at("runs"));
  const NewCheckpoint made(folder, step_name(5));
  const auto listed = inspect_checkpoints(at("runs"));
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_EQ(listed[0].problem, "it is being written, or was not to its end");
  EXPECT_EQ(verify_checkpoints(at("runs"), [](uint64_t, uint64_t) {}).checkpoints, 0u);
}

// ---- nothing half-made ----

TEST_F(Convert, NothingIsOverwritten) {
  write_foreign(at("a.safetensors"), fused_tensors());
  import("a.safetensors");
  EXPECT_SAYS(import("a.safetensors"), "step-0000000007: is there already");
  std::ofstream(at("out")) << "mine";
  EXPECT_SAYS(consolidate_to("out"), "out: is there already");
  EXPECT_EQ(fs::file_size(at("out")), 4u);
  EXPECT_SAYS(consolidate(at("a.safetensors"), at("new"), {}, cast, [](uint64_t, uint64_t) {}), "is no checkpoint");
}

TEST_F(Convert, WhatIsInterruptedLeavesNothing) {
  write_foreign(at("a.safetensors"), {{"w", random_tensor("F32", {30, 1'000'000}, 1)}});
  import("a.safetensors");
  uint64_t last = 0, calls = 0;
  const auto stop = [&](uint64_t done, uint64_t) {
    last = done;
    if (++calls == 3) fail(FSDP_INTERRUPTED, "enough");
  };
  EXPECT_SAYS(consolidate(at("runs"), at("out"), {}, cast, stop), "enough");
  EXPECT_SAYS(
      import_weights(at("a.safetensors"), at("runs"), {}, 8, cast, [&](uint64_t, uint64_t) { calls = 2, stop(0, 0); }),
      "enough");
  EXPECT_EQ(names(), (std::vector<std::string>{"a.safetensors", "runs"}));
  EXPECT_EQ(names("runs"), std::vector<std::string>{"step-0000000007"});
}

// Every call that writes fails once. Afterwards the name exists with a whole folder, or not at all.
TEST_F(Convert, NoFailureLeavesHalfAFolder) {
  write_foreign(at("a.safetensors"), fused_tensors());
  import("a.safetensors");
  int failures = 0;
  for (int call = 0;; ++call) {
    bool happened = false;
    std::string error;
    {
      const FaultScope scope({SystemFault::Way::fails, call, ENOSPC, "pwrite"});
      error = message_of([&] { consolidate_to("out", {.renames = {}, .max_bytes = 4000, .copied_folder = {}}); });
      happened = scope.happened();
    }
    if (!happened) break;
    ++failures;
    EXPECT_THAT_SAYS(error, "No space left on device");
    EXPECT_EQ(names(), (std::vector<std::string>{"a.safetensors", "runs"}));
  }
  EXPECT_GE(failures, 4);
  EXPECT_EQ(read(at("out")), fused_tensors());
}

// It is not known which of these checkpoints is the newest. A damaged checkpoint that is certainly older does not
// matter.
TEST_F(Convert, TheNewestIsNotConsolidatedWhereADamagedOneMayBeIt) {
  write_foreign(at("a.safetensors"), fused_tensors());
  import("a.safetensors", {}, 4);
  import("a.safetensors", {}, 9);
  fs::resize_file(at("runs/step-0000000004/checkpoint.json"), 10);
  consolidate_to("out");
  import("a.safetensors", {}, 10);
  fs::resize_file(at("runs/step-0000000010/checkpoint.json"), 10);
  EXPECT_SAYS(consolidate_to("other"), "it may be the newest that is damaged: " + at("runs/step-0000000010"));
  import("a.safetensors", {}, 11);
  consolidate_to("other");
}

TEST_F(Convert, ConfigurationAndTokenizerAreCopied) {
  write_foreign(at("a.safetensors"), fused_tensors());
  import("a.safetensors");
  fs::create_directory(at("hf"));
  for (const char *name : {"config.json", "tokenizer.model", "merges.txt", "LICENSE", "model.safetensors", "old.bin",
                           "model.safetensors.index.json", ".hidden.json"})
    std::ofstream(at("hf/") + name) << std::string(5000, 'x') << name;
  consolidate_to("out", {.renames = {}, .copied_folder = at("hf")});
  EXPECT_EQ(names("out"),
            (std::vector<std::string>{"LICENSE", "config.json", "merges.txt", "model.safetensors", "tokenizer.model"}));
  std::ifstream file(at("out/config.json"));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(text, std::string(5000, 'x') + "config.json");
}

}  // namespace
}  // namespace fsdp::checkpoint
