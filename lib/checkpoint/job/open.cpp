// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/open.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>
#include <optional>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/plan/save_plan.h"
#include "transport/exchange.h"

namespace fsdp::checkpoint {
namespace {

// The checkpoint that the first rank has found.
struct FoundName {
  WireText<64> name;
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

// The contents of the first rank's folder: the names of all checkpoints, including unreadable ones, and the highest
// sequence of the readable ones (0: none is readable).
struct FolderView {
  uint64_t sequence = 0;
  std::set<std::string> names;
};

std::string text_of(const FolderView &view) { return format_text("{} {}", view.sequence, fmt::join(view.names, " ")); }

FolderView view_of(std::span<const std::byte> bytes) {
  std::istringstream text({reinterpret_cast<const char *>(bytes.data()), bytes.size()});
  FolderView view;
  text >> view.sequence;
  for (std::string name; text >> name;) view.names.insert(std::move(name));
  return view;
}

// An unreadable checkpoint is not compared; loading it reports the error.
uint64_t sequence_of(const Folder &folder, const std::string &name) try {
  return folder.read_manifest(name).sequence;
} catch (const std::exception &) {
  return 0;
}

// The newest checkpoint if the first rank has not seen it; empty if the first rank has seen a newer one.
std::string find_newer(const std::string &path, const FolderView &first) try {
  const Folder folder(path);
  std::string newest;
  uint64_t highest = first.sequence;
  for (const std::string &name : list_folder(folder.fd(), path)) {
    if (!is_checkpoint_name(name) || first.names.contains(name)) continue;
    const uint64_t sequence = sequence_of(folder, name);
    if (sequence > highest) newest = name, highest = sequence;
  }
  return newest;
} catch (const std::exception &) {
  return "";
}

bool sees(const std::string &path, const std::string &name) try {
  return Folder(path).has(name);
} catch (const std::exception &) {
  return false;
}

}  // namespace

Candidates candidates_of(const Folder &folder) {
  Candidates found;
  found.seen = list_folder(folder.fd(), folder.path());
  if (std::ranges::find(found.seen, manifest_name) != found.seen.end()) {
    found.names = {"."};
    return found;
  }
  for (const FolderEntry &entry : folder.list(&found.unreadable)) {
    found.names.push_back(entry.name);
    found.sequence = std::max(found.sequence, entry.manifest.sequence);
  }
  return found;
}

void compare_folders(transport::Team &team, const std::string &path, const Candidates &found) {
  const bool first = team.rank() == 0, is_checkpoint = !found.names.empty() && found.names[0] == ".";
  FolderView seen{found.sequence, {}};
  for (const std::string &name : found.seen)
    if (is_checkpoint_name(name)) seen.names.insert(name);
  const std::string text = first && !is_checkpoint ? text_of(seen) : "";
  const auto told = team.all_gather(std::as_bytes(std::span(text)), "what a folder of checkpoints has");
  const std::string newer = first || told[0].empty() ? "" : find_newer(path, view_of(told[0]));
  const auto all = team.all_gather(std::as_bytes(std::span(newer)), "newer checkpoints than the first rank's");
  const auto other = std::ranges::find_if(all, [](const auto &name) { return !name.empty(); });
  if (other == all.end()) return;
  transport::attempt_together(team, "a folder of checkpoints", [&] {
    const std::string name(reinterpret_cast<const char *>(other->data()), other->size());
    if (!first || sees(path, name)) return;  // another job has saved the checkpoint since then
    const auto rank = team.world_rank(static_cast<uint32_t>(other - all.begin()));
    fail(FSDP_MISMATCH,
         "{}: rank {} finds {} at its path, and it is not here: the folders differ. Give all ranks one folder, which "
         "all hosts have mounted",
         path, rank, name);
  });
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

OpenedCheckpoint open_checkpoint(transport::Team &team, const std::string &path) {
  FoundName mine;
  Candidates found;  // set on the first rank
  std::optional<Folder> folder;
  transport::attempt_together(team, "a checkpoint's folder", [&] {
    folder.emplace(path);
    if (team.rank() != 0) return;
    found = candidates_of(*folder);
    if (found.names.empty()) refuse_empty(path, found.unreadable);
    require_newest_is_known(path, found.unreadable);
    mine.name.set(found.names[0]);
  });
  compare_folders(team, path, found);
  std::vector<FoundName> all(team.size());
  team.all_gather(&mine, sizeof mine, all.data(), "a checkpoint's name");
  const std::string chosen = all[0].name.copy();
  OpenedCheckpoint opened{folder->shown(chosen), chosen, {}};
  std::string sum;
  transport::attempt_together(team, "a checkpoint's manifest",
                              [&] { opened.manifest = folder->read_manifest(opened.name, &sum); });
  transport::agree_on(team, "the manifest of " + opened.name, sum);
  if (opened.name == ".") {
    opened.path = path;
    opened.name = std::filesystem::weakly_canonical(path).filename();
  }
  return opened;
}

ShardReader open_shard(int checkpoint, const ManifestFile &file, const std::string &shown) try {
  auto [folder, name] = find_file(checkpoint, file.name, shown);
  ShardReader reader(folder.get(), name, shown);
  if (reader.file_bytes() != file.bytes || reader.header_sum() != file.header_sum)
    fail(FSDP_INVALID_ARGUMENT,
         "{}: is not the file that the manifest speaks of: it has {} bytes and header checksum {}, not {} and {}",
         shown, reader.file_bytes(), reader.header_sum(), file.bytes, file.header_sum);
  return reader;
} catch (const Error &error) {
  // A missing file is damage. ENOENT would mean that the folder of checkpoints does not exist.
  if (error.origin_code != ENOENT) throw;
  fail(FSDP_INVALID_ARGUMENT, "{}: is missing; the checkpoint is damaged", shown);
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
