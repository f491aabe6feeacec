// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/convert.h"

#include <algorithm>

#include "base/checked.h"
#include "base/json.h"
#include "checkpoint/convert/copied_files.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/format/weight_index.h"

namespace fsdp::checkpoint {
namespace {

constexpr const char *single_name = "model.safetensors";

// One after the other into a file, until it is full.
std::vector<NewFile> split_files(const std::vector<NewTensor> &tensors, uint64_t most) {
  std::vector<NewFile> files;
  uint64_t bytes = 0;
  for (const NewTensor &tensor : tensors) {
    const uint64_t more = data_bytes_of(tensor);
    if (files.empty() || bytes > most || more > most - bytes) {
      files.push_back({"", {}, false});
      bytes = 0;
    }
    files.back().tensors.push_back(&tensor);
    bytes = checked_add(bytes, more, "bytes of a file");
  }
  for (size_t i = 0; i < files.size(); ++i)
    files[i].name =
        files.size() == 1 ? single_name : format_text("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
  return files;
}

std::string write_weight_index(const std::vector<NewFile> &files) {
  uint64_t bytes = 0;
  std::map<std::string, std::string> map;
  for (const NewFile &file : files)
    for (const NewTensor *tensor : file.tensors) bytes += data_bytes_of(*tensor), map[tensor->name] = file.name;
  std::string text = format_text("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", bytes);
  for (const auto &[name, file] : map)
    text += format_text("{}\n    {}: {}", text.ends_with('{') ? "" : ",", quote_json(name), quote_json(file));
  return text + "\n  }\n}\n";
}

// Of the path of something that is to be made.
std::pair<std::string, std::string> split_path(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const size_t slash = path.find_last_of('/');
  const std::string name = slash == path.npos ? path : path.substr(slash + 1);
  if (name.empty() || name == "." || name == "..")
    fail(FSDP_INVALID_ARGUMENT, "{} is no name for a new folder", quote_json(path));
  return {slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash), name};
}

Converted describe(const std::string &path, const std::vector<NewFile> &files,
                   const std::vector<WrittenShard> &written) {
  Converted converted{.path = path, .files = {}, .copied = {}};
  for (const NewFile &file : files) converted.files.push_back(file.name), converted.tensors += file.tensors.size();
  for (const WrittenShard &one : written) converted.bytes += one.bytes;
  return converted;
}

// The same bytes, whoever imports them.
Manifest describe_import(const std::vector<NewTensor> &tensors, const NewFile &file, const WrittenShard &written,
                         uint64_t sequence, uint64_t step) {
  Manifest manifest;
  manifest.sequence = sequence, manifest.step = step, manifest.ranks = 1;
  manifest.models = {{"", "imported weights", 0}};
  manifest.files = {{file.name, written.bytes, written.header_sum}};
  for (const NewTensor &tensor : tensors) {
    ManifestPart part{whole(tensor.shape), {}};
    part.add_rows(0, part.rows());
    manifest.tensors.push_back({tensor.name, tensor.type, tensor.shape, {std::move(part)}});
  }
  return manifest;
}

// A rename of nothing is a mistyped one.
void require_used(std::span<const Rename> renames, const SpreadTensors &tensors, std::string Rename::*stored) {
  for (const Rename &rename : renames)
    if (std::ranges::none_of(tensors,
                             [&](const auto &one) { return match_name(rename.*stored, one.first).has_value(); }))
      fail(FSDP_INVALID_ARGUMENT, "renames: no tensor is called {}", quote_json(rename.*stored));
}

void require_new(const Folder &folder, const std::string &name, const std::string &shown) {
  if (folder.has(name)) fail(FSDP_INVALID_STATE, "{}: is there already, and nothing is overwritten", shown);
}

}  // namespace

Converted consolidate(const std::string &checkpoint, const std::string &out, const ConsolidateChoice &choice,
                      const CastElements &cast, const Progress &progress) {
  check_renames(choice.renames, "renames");
  const auto [parent_path, name] = split_path(out);
  const Folder parent(parent_path);
  require_new(parent, name, out);
  const WeightFiles source(checkpoint);
  if (!source.is_checkpoint()) fail(FSDP_INVALID_ARGUMENT, "{}: is no checkpoint of libfsdp", checkpoint);
  std::string sum;
  const std::vector<StoredFile> stored = source.list(sum);
  const SpreadTensors tensors = collect_tensors(stored);
  require_used(choice.renames, tensors, &Rename::ours);
  const std::vector<NewTensor> planned = plan_export(tensors, choice.renames, choice.as);
  if (planned.empty()) fail(FSDP_INVALID_ARGUMENT, "{}: there are no weights in it", checkpoint);
  const std::vector<NewFile> files = split_files(planned, choice.most_bytes);
  parent.remove_leftovers();
  NewCheckpoint made(parent);
  NewTensorReader reader(source, cast);
  Converted converted = describe(out, files, write_new_files(made, files, reader, progress));
  if (files.size() > 1) made.put(weight_index_name, write_weight_index(files));
  if (!choice.copied_folder.empty()) converted.copied = copy_plain_files(choice.copied_folder, made);
  made.commit(name, false);
  return converted;
}

Converted import_weights(const std::string &weights, const std::string &folder, std::span<const Rename> renames,
                         uint64_t step, const CastElements &cast, const Progress &progress) {
  check_renames(renames, "renames");
  const WeightFiles source(weights);
  std::string sum;
  const std::vector<StoredFile> stored = source.list(sum);
  const SpreadTensors tensors = collect_tensors(stored);
  require_used(renames, tensors, &Rename::theirs);
  const std::vector<NewTensor> planned = plan_import(tensors, renames);
  if (planned.empty()) fail(FSDP_INVALID_ARGUMENT, "{}: there are no weights in it", weights);
  const Folder into = Folder::make(folder);
  require_new(into, step_name(step), into.shown(step_name(step)));
  into.remove_leftovers();
  NewCheckpoint made(into);
  std::vector<NewFile> files{{shard_name(0), {}, true}};
  for (const NewTensor &tensor : planned) files[0].tensors.push_back(&tensor);
  NewTensorReader reader(source, cast);
  const std::vector<WrittenShard> written = write_new_files(made, files, reader, progress);
  const std::string text =
      write_manifest(describe_import(planned, files[0], written.at(0), into.next_sequence(), step));
  parse_manifest(text, made.shown(manifest_name));  // nobody could load what it refuses
  made.commit(step_name(step), text, false);
  return describe(into.shown(step_name(step)), files, written);
}

}  // namespace fsdp::checkpoint
