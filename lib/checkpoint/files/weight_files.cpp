// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/files/weight_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "checkpoint/files/file.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/format/json_document.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/shard_file.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint64_t longest_index = uint64_t{256} << 20;

bool is_there(const std::vector<std::string> &names, std::string_view name) {
  return std::ranges::binary_search(names, name);
}

}  // namespace

WeightFiles::WeightFiles(const std::string &path) : path_(path) {
  if (!open_file()) open_folder_of_files();
}

bool WeightFiles::open_file() {
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0) fail_errno(errno, format_text("{}: looking for it", path_));
  if (S_ISDIR(status.st_mode)) return false;
  const size_t slash = path_.find_last_of('/');
  const std::string folder = slash == path_.npos ? "." : slash == 0 ? "/" : path_.substr(0, slash);
  folder_ = Fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_) fail_errno(errno, format_text("{}: cannot be opened as a folder", folder));
  names_ = {path_.substr(slash == path_.npos ? 0 : slash + 1)};
  return is_file_ = true;
}

// Opens the newest checkpoint of a folder of checkpoints.
void WeightFiles::open_newest() {
  std::vector<UnreadableCheckpoint> unreadable;
  const std::vector<FolderEntry> entries = Folder(path_).list(&unreadable);
  require_newest_is_known(path_, unreadable);
  if (entries.empty())
    fail(FSDP_INVALID_ARGUMENT, "{}: there are neither safetensors files in this folder nor checkpoints", path_);
  path_ += "/" + entries.front().name;
  open_folder_of_files();
}

void WeightFiles::open_folder_of_files() {
  folder_ = Fd(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder_) fail_errno(errno, format_text("{}: cannot be opened as a folder", path_));
  const std::vector<std::string> names = list_folder(folder_.get(), path_);
  for (const std::string &name : names)
    if (name.ends_with(".safetensors") && !name.starts_with("._")) names_.push_back(name);
  if (is_there(names, weight_index_name)) {
    index_ = parse_weight_index(read_text(weight_index_name), path_ + "/" + weight_index_name);
    names_.clear();
    for (const auto &[tensor, file] : index_) names_.push_back(file);
    std::ranges::sort(names_);
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
  } else if (is_there(names, manifest_name)) {
    open_checkpoint();
  } else if (names_.empty()) {
    open_newest();
  }
}

// Checks that all files of weights exist, because without a file the last rows of tensors would be missing.
void WeightFiles::open_checkpoint() {
  const Manifest manifest = Folder(path_).read_manifest(".");
  for (const ManifestFile &file : manifest.files) {
    known_[file.name] = file;
    if (file.name.find('/') == file.name.npos && !is_there(names_, file.name))
      refuse_file(path_, "{} is missing, of which the manifest speaks", file.name);
  }
  for (const ManifestTensor &tensor : manifest.tensors)
    if (!tensor.filled()) partial_[tensor.name] = tensor.shape;
}

std::string WeightFiles::read_text(const char *name) const {
  const InFile file(folder_.get(), name, path_ + "/" + name, LinkPolicy::followed);
  if (file.bytes() > longest_index)
    refuse_file(file.shown(), "has {} bytes, of at most {}", file.bytes(), longest_index);
  const AlignedBytes buffer(InFile::needed_for(0, file.bytes()));
  const auto bytes = file.read(0, file.bytes(), buffer.bytes());
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

// Checks that a file is the one that the manifest lists.
void WeightFiles::check(const ShardReader &reader, size_t number) const {
  if (known_.empty()) return;
  const auto known = known_.find(names_[number]);
  if (known == known_.end()) refuse_file(reader.shown(), "the manifest does not know it");
  if (reader.file_bytes() != known->second.bytes || reader.header_sum() != known->second.header_sum)
    refuse_file(reader.shown(), "is not the file that the manifest speaks of");
}

std::vector<StoredFile> WeightFiles::list(std::string &sum) const {
  std::vector<StoredFile> files(count());
  std::string sums;
  for (size_t f = 0; f < count(); ++f) {
    const ShardReader reader = open(f);
    check(reader, f);
    sums += reader.header_sum();
    const std::vector<StoredTensor> &tensors = reader.header().tensors;
    for (size_t t = 0; t < tensors.size(); ++t) {
      const auto indexed = index_.find(tensors[t].name);
      // If the index says that the tensor is in another file, this one is a different tensor with the same name.
      if (!index_.empty() && (indexed == index_.end() || indexed->second != names_[f])) continue;
      files[f].boxes.push_back(
          {tensors[t].name, tensors[t].type, {reader.offsets()[t], tensors[t].shape}, {}, tensors[t].unknown_type});
      if (const auto partial = partial_.find(tensors[t].name); partial != partial_.end())
        files[f].boxes.back().shape = partial->second;
    }
  }
  sum = long_sum_of(sums);
  return files;
}

}  // namespace fsdp::checkpoint
