// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/save_plan.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/text.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint32_t files_in_folder = 1024;
const std::string no_sum(32, '0');  // the file is not written yet

// Adds the model's files and tensors to the manifest, with files numbered after those already there.
void describe_model(Manifest &manifest, const SavedModel &model, uint32_t number,
                    const std::function<uint32_t(uint32_t)> &place_of) {
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
    for (ManifestTensor &tensor : model.shards->manifest_tensors(kind, static_cast<uint32_t>(manifest.files.size()))) {
      tensor.model = number;
      manifest.tensors.push_back(std::move(tensor));
    }
    for (uint32_t file = 0; file < model.shards->files(kind); ++file)
      for (const uint32_t writer : model.shards->writers(kind, file)) {
        const uint32_t rank = model.ranks[writer];
        manifest.files.push_back({saved_file_name(kind, rank, place_of(rank), file), 0, no_sum});
      }
  }
}

std::map<std::string, uint32_t> numbers_of(const std::vector<ManifestFile> &files) {
  std::map<std::string, uint32_t> numbers;
  for (uint32_t i = 0; i < files.size(); ++i) numbers.emplace(files[i].name, i);
  return numbers;
}

// Returns the same rows with the files' new numbers.
ManifestPart renumber(const ManifestPart &part, std::span<const uint32_t> numbers) {
  ManifestPart renumbered{part.box, {}, part.axis};
  bool joins = false;
  for (const RowCut &cut : part.cuts) {
    for (uint32_t i = 0; i < cut.files; ++i) renumbered.add_rows(numbers[cut.file(i)], cut.rows);
    joins = joins || cut.step > 1;
  }
  if (joins) renumbered.join_cuts();
  return renumbered;
}

// The parts do not overlap.
bool is_covered(const Box &box, std::span<const ManifestPart> parts) {
  uint64_t count = 0;
  for (const ManifestPart &part : parts) count += common_count(box, part.box);
  return count >= box.count();
}

void add_tensor(std::vector<ManifestTensor> &tensors, std::map<std::string, size_t> &known, ManifestTensor tensor) {
  const auto [found, is_new] = known.emplace(tensor.name, tensors.size());
  if (is_new) return tensors.push_back(std::move(tensor));
  ManifestTensor &there = tensors[found->second];
  if (there.model != tensor.model)
    fail(FSDP_INVALID_ARGUMENT, "two models have a tensor {}; a checkpoint has each name once",
         quote_json(tensor.name));
  if (there.shape != tensor.shape || there.type != tensor.type)
    fail(FSDP_INVALID_ARGUMENT, "two ranks declare {} as boxes of different tensors: {} [{}] and {} [{}]",
         quote_json(tensor.name), there.type->name, fmt::join(there.shape, ","), tensor.type->name,
         fmt::join(tensor.shape, ","));
  // If several meshes have a box, one of them writes it. They may have divided it differently.
  const size_t known_parts = there.parts.size();
  for (ManifestPart &part : tensor.parts)
    if (!is_covered(part.box, std::span(there.parts).first(known_parts))) there.parts.push_back(std::move(part));
}

// Checks one rank's description: its names must be unique.
void require_unique(const Manifest &part) {
  std::set<std::string_view> names;
  for (const ManifestTensor &tensor : part.tensors)
    if (!names.insert(tensor.name).second)
      fail(FSDP_INVALID_ARGUMENT,
           "the name {} is not unique: a parameter is called like a state or a plane of another one, and a checkpoint "
           "has each name once",
           quote_json(tensor.name));
}

template <class Tensors>
std::map<std::string, size_t> places_of(const Tensors &tensors) {
  std::map<std::string, size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) places.emplace(tensors[i].name, i);
  return places;
}

}  // namespace

std::string bytes_name(const std::string &name) { return "bytes." + name; }
std::string bytes_name(const std::string &name, uint32_t rank) { return format_text("bytes.{}.{:05}", name, rank); }

// Files of weights must have the names that PyTorch looks for.
std::string saved_file_name(ShardKind kind, uint32_t rank, uint32_t place, uint32_t file) {
  if (kind == ShardKind::weights) return shard_name(rank, file);
  return format_text("{}/{:04}/{}", kind == ShardKind::bytes ? "bytes" : "optimizer", place / files_in_folder,
                     shard_name(rank, file));
}

Manifest describe_part(std::span<const SavedModel> models, std::span<const SavedBytes> bytes, uint32_t rank,
                       const std::function<uint32_t(uint32_t)> &place_of) {
  Manifest manifest;
  for (const SavedModel &model : models) {
    manifest.keys[format_text("{} of ranks {}", quote_json(model.described.name), fmt::join(model.ranks, ", "))] =
        format_text("{} {:016x}", model.ranks.size(), model.described.layout_hash);
    if (model.rank != 0) continue;
    Manifest part;
    part.models = {model.described};
    describe_model(part, model, 0, place_of);
    add_part(manifest, part);
  }
  const uint32_t place = place_of(rank);
  Manifest own;
  own.files.push_back({saved_file_name(ShardKind::bytes, rank, place), 0, no_sum});
  for (const SavedBytes &some : bytes) {
    if (!some.per_rank && place != 0) continue;
    const uint64_t size = some.data.size();
    own.bytes.push_back({some.per_rank ? bytes_name(some.name, rank) : bytes_name(some.name),
                         find_element_type("U8"),
                         {size},
                         {{{{0}, {size}}, {{0, 1, size}}}}});
  }
  if (!own.bytes.empty()) add_part(manifest, own);
  return manifest;
}

void check_members(const std::map<uint32_t, std::map<std::string, std::string>> &keys) {
  std::map<std::pair<std::string, std::string>, std::vector<uint32_t>> members;
  for (const auto &[rank, said] : keys)
    for (const auto &one : said) members[one].push_back(rank);
  for (const auto &[model, ranks] : members)
    if (model.second.substr(0, model.second.find(' ')) != std::to_string(ranks.size()))
      fail(FSDP_MISMATCH,
           "the model {} is in the checkpoint of ranks {} alone; it is to be added on all ranks of its "
           "mesh, under one name",
           model.first, fmt::join(ranks, ", "));
}

void add_part(Manifest &manifest, const Manifest &part) {
  require_unique(part);
  std::map<std::string, uint32_t> files = numbers_of(manifest.files);
  std::vector<uint32_t> file_numbers, model_numbers;
  for (const ManifestFile &file : part.files) {
    const auto [found, is_new] = files.emplace(file.name, static_cast<uint32_t>(manifest.files.size()));
    if (is_new) manifest.files.push_back(file);
    file_numbers.push_back(found->second);
  }
  for (const ManifestModel &model : part.models) {
    const auto found = std::ranges::find(manifest.models, model.name, &ManifestModel::name);
    model_numbers.push_back(static_cast<uint32_t>(found - manifest.models.begin()));
    if (found == manifest.models.end()) manifest.models.push_back(model);
  }
  auto known = places_of(manifest.tensors), known_bytes = places_of(manifest.bytes);
  const auto moved = [&](const ManifestTensor &tensor) {
    ManifestTensor copy{tensor.name, tensor.type, tensor.shape, {}, tensor.model};
    for (const ManifestPart &piece : tensor.parts) copy.parts.push_back(renumber(piece, file_numbers));
    return copy;
  };
  for (const ManifestTensor &tensor : part.tensors) {
    ManifestTensor copy = moved(tensor);
    copy.model = model_numbers[tensor.model];
    add_tensor(manifest.tensors, known, std::move(copy));
  }
  for (const ManifestTensor &tensor : part.bytes) add_tensor(manifest.bytes, known_bytes, moved(tensor));
}

}  // namespace fsdp::checkpoint
