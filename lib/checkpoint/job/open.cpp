// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/open.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <optional>

#include "base/json.h"
#include "checkpoint/files/folder_tree.h"
#include "checkpoint/plan/save_plan.h"
#include "comm/exchange.h"

namespace fsdp::checkpoint {
namespace {

// Which one the first rank has found.
struct FoundName {
  char name[64] = {};
};

std::string describe_one(const FolderEntry &entry) {
  const Manifest &manifest = entry.manifest;
  std::string models;
  for (const ManifestModel &model : manifest.models) models += (models.empty() ? "" : ",") + quote_json(model.name);
  const uint64_t bytes = std::accumulate(manifest.files.begin(), manifest.files.end(), uint64_t{0},
                                         [](uint64_t sum, const ManifestFile &file) { return sum + file.bytes; });
  return format_text(R"({{"name":{},"step":{},"sequence":{},"ranks":{},"models":[{}],"files":{},"bytes":{}}})",
                     quote_json(entry.name), manifest.step, manifest.sequence, manifest.ranks, models,
                     manifest.files.size(), bytes);
}

}  // namespace

Candidates candidates_of(const Folder &folder) {
  const std::vector<std::string> there = list_folder(folder.fd(), folder.path());
  if (std::ranges::find(there, manifest_name) != there.end()) return {{"."}, {}};
  Candidates found;
  for (const FolderEntry &entry : folder.list(&found.unreadable)) found.names.push_back(entry.name);
  return found;
}

void refuse_empty(const std::string &path, const std::vector<UnreadableCheckpoint> &unreadable) {
  std::string text;
  for (const UnreadableCheckpoint &one : unreadable)
    text += (text.empty() ? "; of what is there " : "; ") + one.why.message;
  text = format_text("{}: there is no checkpoint in this folder{}", path, text);
  if (unreadable.empty()) throw Error(FSDP_INVALID_ARGUMENT, text);
  const Error &why = unreadable.front().why;
  throw Error(why.status, text, -1, why.origin, why.origin_code);
}

OpenedCheckpoint open_checkpoint(comm::Team &team, const std::string &path) {
  FoundName mine;
  std::optional<Folder> folder;
  comm::attempt_together(team, "a checkpoint's folder", [&] {
    folder.emplace(path);
    if (team.rank() != 0) return;
    const Candidates found = candidates_of(*folder);
    if (found.names.empty()) refuse_empty(path, found.unreadable);
    require_newest_is_known(path, found.unreadable);
    std::strncpy(mine.name, found.names[0].c_str(), sizeof mine.name - 1);
  });
  std::vector<FoundName> all(team.size());
  team.all_gather(&mine, sizeof mine, all.data(), "a checkpoint's name");
  OpenedCheckpoint opened{folder->shown(all[0].name), all[0].name, {}};
  std::string sum;
  comm::attempt_together(team, "a checkpoint's manifest",
                         [&] { opened.manifest = folder->read_manifest(opened.name, &sum); });
  comm::agree_on(team, "the manifest of " + opened.name, sum);
  if (opened.name == ".") {
    opened.path = path;
    opened.name = std::filesystem::weakly_canonical(path).filename();
  }
  return opened;
}

ShardReader open_shard(int checkpoint, const ManifestFile &file, const std::string &shown) {
  auto [folder, name] = find_file(checkpoint, file.name, shown);
  ShardReader reader(folder.get(), name, shown);
  if (reader.file_bytes() != file.bytes || reader.header_sum() != file.header_sum)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: is not the file that the manifest speaks of: it has {} bytes and header sum {}, not {} and {}", shown,
         reader.file_bytes(), reader.header_sum(), file.bytes, file.header_sum);
  return reader;
}

const ManifestTensor &find_bytes(const OpenedCheckpoint &checkpoint, const std::string &name, uint32_t rank) {
  const std::vector<ManifestTensor> &bytes = checkpoint.manifest.bytes;
  for (const std::string &wanted : {bytes_name(name, rank), bytes_name(name)})
    if (const auto found = std::ranges::find(bytes, wanted, &ManifestTensor::name); found != bytes.end()) return *found;
  fail(FSDP_INVALID_ARGUMENT, "{}: has no bytes {} of rank {}, nor of all ranks", checkpoint.path, quote_json(name),
       rank);
}

std::vector<std::byte> read_bytes(const OpenedCheckpoint &checkpoint, const ManifestTensor &bytes,
                                  const std::function<void()> &poll) {
  std::vector<std::byte> data(bytes.shape[0]);
  if (data.empty()) return data;
  const ManifestFile &file = checkpoint.manifest.files[bytes.parts[0].cuts[0].first_file];
  const Folder folder(checkpoint.path);
  const ShardReader reader = open_shard(folder.fd(), file, folder.shown(file.name));
  const std::vector<StoredTensor> &tensors = reader.header().tensors;
  const auto found = std::ranges::find(tensors, bytes.name, &StoredTensor::name);
  if (found == tensors.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: tensor {} is not in it", reader.shown(), quote_json(bytes.name));
  const Box box = whole(bytes.shape);
  const WantedBox wanted[] = {{static_cast<uint32_t>(found - tensors.begin()), box, box}};
  reader.check_has(wanted[0]);
  const AlignedBytes buffer(ShardReader::buffer_bytes);
  reader.read(wanted, buffer.bytes(), [&](uint32_t, uint64_t to, std::span<const std::byte> elements) {
    poll();
    std::ranges::copy(elements, data.begin() + static_cast<ptrdiff_t>(to));
  });
  return data;
}

std::string describe_checkpoints(const std::string &path) {
  const Folder folder(path);
  std::vector<UnreadableCheckpoint> unreadable;
  std::string text = "{\"checkpoints\":[";
  for (const FolderEntry &entry : folder.list(&unreadable))
    text += (text.ends_with('[') ? "\n" : ",\n") + describe_one(entry);
  text += "],\n\"unreadable\":[";
  for (const UnreadableCheckpoint &one : unreadable)
    text += (text.ends_with('[') ? "" : ",") + quote_json(one.why.message);
  return text + "]}";
}

}  // namespace fsdp::checkpoint
