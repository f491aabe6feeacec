// SPDX-License-Identifier: Apache-2.0
// Tests weights of other programs: links, unusual names and unknown types.
#include "checkpoint_converting.h"

namespace fsdp::checkpoint {
namespace {

// Hugging Face's cache has this layout: links to files that are named by their hashes.
TEST_F(Convert, LinksOfOthersAreFollowed) {
  fs::create_directories(at("hub/blobs"));
  fs::create_directories(at("hub/snapshots/abc/unet"));
  write_foreign(at("hub/blobs/0a"), fused_tensors());
  std::ofstream(at("hub/blobs/0b")) << "{}";
  fs::create_symlink("../../blobs/0a", at("hub/snapshots/abc/model.safetensors"));
  fs::create_symlink("../../blobs/0b", at("hub/snapshots/abc/config.json"));
  import("hub/snapshots/abc", {}, 1);
  import("hub/snapshots/abc/model.safetensors", {}, 2);
  consolidate_to("out", {.renames = {}, .copied_folder = at("hub/snapshots/abc")});
  EXPECT_EQ(read(at("out")), fused_tensors());
  EXPECT_EQ(names("out"), (std::vector<std::string>{"config.json", "model.safetensors"}));
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(at("out/config.json"))));
  fs::remove(at("hub/blobs/0a"));
  EXPECT_SAYS(import("hub/snapshots/abc", {}, 3), "abc/model.safetensors: cannot be opened: No such file");
  // In our own checkpoints a link counts as damage, even if it leads to the right file.
  const std::string shard = at("runs/step-0000000002/") + shard_name(0);
  fs::rename(shard, at("moved"));
  fs::create_symlink(at("moved"), shard);
  EXPECT_SAYS(consolidate_to("other"), shard + ": is a symbolic link, which is not followed here");
  fs::remove(shard);
  fs::rename(at("moved"), shard);
  const std::string manifest = at("runs/step-0000000002/checkpoint.json");
  fs::rename(manifest, at("moved"));
  fs::create_symlink(at("moved"), manifest);
  EXPECT_SAYS(import_weights(at("runs/step-0000000002"), at("more"), {}, 1, cast, [](uint64_t, uint64_t) {}),
              "checkpoint.json: is a symbolic link, which is not followed here");
}

// A file may have any name. If an index gives the name, it must stay inside the index's folder.
TEST_F(Convert, OddNamesAreReadAndCopied) {
  fs::create_directories(at("hf/a folder"));
  const Tensors all = some_tensors();
  std::map<std::string, std::string> files;
  for (const std::string name : {"model (1).safetensors", "a+b@c.safetensors", "m\xc3\xa4.safetensors",
                                 "a folder/model.safetensors", ".hidden.safetensors", "bad\xff.safetensors"}) {
    const auto &[tensor, bytes] = *std::next(all.begin(), static_cast<ptrdiff_t>(files.size()));
    write_foreign(at("hf/") + name, {{tensor, bytes}});
    files[tensor] = name;
  }
  std::ofstream(at("hf/config (1).json")) << "{}";
  Tensors in_folder = all;
  std::erase_if(in_folder, [&](const auto &one) { return files[one.first].find('/') != std::string::npos; });
  EXPECT_EQ(read(at("hf")), in_folder);
  fs::remove(at("hf/") + "bad\xff.safetensors");
  const auto bad = std::ranges::find_if(files, [](const auto &one) { return one.second.starts_with("bad"); });
  Tensors indexed = all;
  indexed.erase(bad->first);
  files.erase(bad);
  const auto write_index = [&] {
    std::ofstream index(at("hf/model.safetensors.index.json"));
    index << "{\"weight_map\":{";
    for (const auto &[tensor, file] : files)
      index << (tensor == files.begin()->first ? "" : ",") << '"' << tensor << "\":\"" << file << '"';
    index << "}}";
  };
  write_index();
  EXPECT_EQ(read(at("hf")), indexed);
  import("hf");
  consolidate_to("out", {.renames = {}, .copied_folder = at("hf")});
  EXPECT_EQ(names("out"), (std::vector<std::string>{"config (1).json", "model.safetensors"}));
  for (const std::string path :
       {"../hf/x.safetensors", "/etc/passwd", "a/../../x", "a//b", "./x", "", "a/", "..", "x\\u0000y"}) {
    files["cube"] = path;
    write_index();
    EXPECT_SAYS(import("hf", {}, 8), "/weight_map/cube is \"" + path + "\", not the path of a file inside this folder");
  }
}

TEST_F(Convert, TensorsOfUnknownTypesAreRefusedByName) {
  Tensor odd = random_tensor("U8", {4}, 1);
  odd.type = "F8_E4M3B11";
  write_foreign(at("a.safetensors"), {{"odd", odd}, {"w", random_tensor("F32", {3}, 2)}});
  EXPECT_SAYS(import("a.safetensors"), "tensor \"odd\" is of \"F8_E4M3B11\", which this release does not know");
}

}  // namespace
}  // namespace fsdp::checkpoint
