// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/convert/inspect.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <tuple>

#include "base/checked.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/shard_reader.h"

namespace fsdp::checkpoint {
namespace {

// Says how a file's size differs from the size in the manifest; empty if it does not.
std::string size_problem(int checkpoint, const ManifestFile &file, const std::string &shown) {
  struct stat status {};
  try {
    const auto [folder, name] = find_file(checkpoint, file.name, shown);
    if (::fstatat(folder.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) fail_errno(errno, shown);
  } catch (const Error &error) {
    return error.origin_code == ENOENT ? format_text("{}: is missing", shown) : error.message;
  }
  if (!S_ISREG(status.st_mode)) return format_text("{}: is no regular file", shown);
  if (const auto has = static_cast<uint64_t>(status.st_size); has != file.bytes)
    return format_text("{}: has {} bytes, and was written with {}", shown, has, file.bytes);
  return "";
}

std::string last_name(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path.substr(path.find_last_of('/') + 1);
}

// A folder, and the names of checkpoints in it; "." is the folder itself.
struct FoundCheckpoints {
  Folder folder;
  std::vector<std::string> names;

  explicit FoundCheckpoints(const std::string &path) : folder(path) {
    for (const std::string &name : list_folder(folder.fd(), path)) {
      if (name == manifest_name) {
        names = {"."};
        return;
      }
      if (is_checkpoint_name(name)) names.push_back(name);
    }
  }
  std::string shown(const std::string &name) const { return name == "." ? folder.path() : folder.shown(name); }
};

ListedCheckpoint look_at(const FoundCheckpoints &found, const std::string &name) {
  ListedCheckpoint one{name == "." ? last_name(found.folder.path()) : name, std::nullopt, 0, "", false};
  try {
    one.manifest = found.folder.read_manifest(name);
    const Fd inside = open_folder(found.folder.fd(), name, found.shown(name));
    for (const ManifestFile &file : one.manifest->files) {
      one.bytes = checked_add(one.bytes, file.bytes, "bytes of a checkpoint");
      if (one.problem.empty()) one.problem = size_problem(inside.get(), file, found.shown(name) + "/" + file.name);
    }
  } catch (const Error &error) {
    one.unfinished = name != "." && found.folder.is_unfinished(name);
    one.problem = one.unfinished ? "it is being written, or was not to its end" : error.message;
  }
  return one;
}

class Verifying {
 public:
  explicit Verifying(const Progress &progress) : progress_(progress), buffer_(ShardReader::buffer_bytes) {}

  Verified run(const FoundCheckpoints &found, const std::vector<std::string> &names) {
    std::vector<std::pair<std::string, Manifest>> readable;
    for (const std::string &name : names) read_manifest(found, name, readable);
    progress_(0, all_);
    for (const auto &[name, manifest] : readable) verify(found, name, manifest);
    return std::move(result_);
  }

 private:
  void read_manifest(const FoundCheckpoints &found, const std::string &name,
                     std::vector<std::pair<std::string, Manifest>> &readable) {
    try {
      readable.emplace_back(name, found.folder.read_manifest(name));
      ++result_.checkpoints;
      for (const ManifestFile &file : readable.back().second.files)
        all_ = checked_add(all_, file.bytes, "bytes of all checkpoints");
    } catch (const Error &error) {
      if (name != "." && found.folder.is_unfinished(name)) return;  // loads do not count it as a checkpoint
      ++result_.checkpoints;
      damaged(found.shown(name) + "/" + manifest_name, error.message);
    }
  }
  void damaged(const std::string &file, const std::string &what) { result_.damages.push_back({file, what}); }
  void verify(const FoundCheckpoints &found, const std::string &name, const Manifest &manifest);
  void verify_file(int checkpoint, const ManifestFile &file, const std::string &shown);
  void verify_data(int checkpoint, const ManifestFile &file, const std::string &shown);
  void find_unlisted_files(int checkpoint, const std::string &shown, const Manifest &manifest);
  void pass(uint64_t bytes) { progress_(done_ += bytes, all_); }

  const Progress &progress_;
  AlignedBytes buffer_;
  Verified result_;
  uint64_t done_ = 0, all_ = 0;
};

void Verifying::verify(const FoundCheckpoints &found, const std::string &name, const Manifest &manifest) {
  std::optional<Fd> inside;
  try {
    inside = open_folder(found.folder.fd(), name, found.shown(name));
  } catch (const Error &error) {
    return damaged(found.shown(name), error.message);
  }
  for (const ManifestFile &file : manifest.files) verify_file(inside->get(), file, found.shown(name) + "/" + file.name);
  find_unlisted_files(inside->get(), found.shown(name), manifest);
}

// A file that cannot be opened, or whose header differs, counts as one damage. Otherwise each differing block counts as
// one.
void Verifying::verify_file(int checkpoint, const ManifestFile &file, const std::string &shown) {
  const uint64_t end = done_ + file.bytes;
  ++result_.files;
  if (const std::string problem = size_problem(checkpoint, file, shown); !problem.empty()) {
    damaged(shown, problem);
  } else {
    result_.bytes += file.bytes;
    verify_data(checkpoint, file, shown);
  }
  pass(end - done_);
}

void Verifying::verify_data(int checkpoint, const ManifestFile &file, const std::string &shown) try {
  const auto [folder, name] = find_file(checkpoint, file.name, shown);
  const ShardReader reader(folder.get(), name, shown);
  if (reader.header_sum() != file.header_sum)
    return damaged(shown,
                   format_text("{}: its header has the checksum {}, and {} in the manifest: it is not the file that "
                               "was written",
                               shown, reader.header_sum(), file.header_sum));
  reader.verify(
      buffer_.bytes(), [&](const Error &error) { damaged(shown, error.message); },
      [&](uint64_t bytes) { pass(bytes); });
} catch (const Error &error) {
  if (error.status == FSDP_INTERRUPTED) throw;
  damaged(shown, error.message);
}

// Finds files that the manifest does not list. They matter because PyTorch reads all files of weights in the folder.
void Verifying::find_unlisted_files(int checkpoint, const std::string &shown, const Manifest &manifest) {
  std::set<std::string_view> known;
  for (const ManifestFile &file : manifest.files) known.insert(file.name);
  for (const std::string &name : list_folder(checkpoint, shown))
    if (name.ends_with(".safetensors") && !known.contains(name)) {
      const std::string path = shown + "/" + name;
      damaged(path, path + ": the manifest does not know it");
    }
}

}  // namespace

std::vector<ListedCheckpoint> inspect_checkpoints(const std::string &path) {
  const FoundCheckpoints found(path);
  std::vector<ListedCheckpoint> list;
  for (const std::string &name : found.names) list.push_back(look_at(found, name));
  std::ranges::sort(list, [](const ListedCheckpoint &a, const ListedCheckpoint &b) {
    const auto key = [](const ListedCheckpoint &one) {
      return std::tuple(one.manifest.has_value(), one.manifest ? one.manifest->sequence : 0, one.name);
    };
    return key(a) > key(b);
  });
  return list;
}

Verified verify_checkpoints(const std::string &path, const Progress &progress) {
  const FoundCheckpoints found(path);
  return Verifying(progress).run(found, found.names);
}

}  // namespace fsdp::checkpoint
