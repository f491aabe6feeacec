// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/job/load_weights.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <optional>

#include "base/json.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/folder_tree.h"
#include "checkpoint/files/in_file.h"
#include "checkpoint/format/block_sums.h"
#include "checkpoint/format/file_name.h"
#include "checkpoint/format/json_document.h"
#include "checkpoint/format/weight_index.h"
#include "checkpoint/job/misfits.h"
#include "checkpoint/job/row_taker.h"
#include "comm/together.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint64_t longest_index = uint64_t{256} << 20;

bool is_there(const std::vector<std::string> &names, std::string_view name) {
  return std::ranges::binary_search(names, name);
}

// The files of weights that a path leads to.
class WeightFiles {
 public:
  explicit WeightFiles(const std::string &path) : path_(path) {
    if (!open_file()) open_folder_of_files();
  }

  size_t count() const { return names_.size(); }
  ShardReader open(size_t number) const { return ShardReader(folder_.get(), names_[number], shown(number)); }
  // What is in them, and a sum of all headers.
  std::vector<StoredFile> list(std::string &sum) const;

 private:
  std::string shown(size_t number) const { return is_file_ ? path_ : path_ + "/" + names_[number]; }
  bool open_file();
  void open_folder_of_files();
  void open_newest();
  std::string read_text(const char *name) const;
  void check(const ShardReader &reader, size_t number) const;

  std::string path_;
  Fd folder_;
  bool is_file_ = false;
  std::vector<std::string> names_;
  std::map<std::string, std::string> index_;  // {tensor: file}; empty: there is none
  // Of a checkpoint of ours; the shapes of tensors that it has only parts of.
  std::map<std::string, ManifestFile> known_;
  std::map<std::string, std::vector<uint64_t>> partial_;
};

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

// Of a folder of checkpoints the newest.
void WeightFiles::open_newest() {
  const std::vector<FolderEntry> entries = Folder(path_).list();
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
    if (is_plain_name(name) && name.ends_with(".safetensors")) names_.push_back(name);
  if (is_there(names, weight_index_name)) {
    index_ = parse_weight_index(read_text(weight_index_name), path_ + "/" + weight_index_name);
    names_.clear();
    for (const auto &[tensor, file] : index_) names_.push_back(file);
    std::ranges::sort(names_);
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
  } else if (is_there(names, manifest_name)) {
    const Manifest manifest = Folder(path_).read_manifest(".");
    for (const ManifestFile &file : manifest.files) known_[file.name] = file;
    for (const ManifestTensor &tensor : manifest.tensors)
      if (!tensor.filled()) partial_[tensor.name] = tensor.shape;
  } else if (names_.empty()) {
    open_newest();
  }
}

std::string WeightFiles::read_text(const char *name) const {
  const InFile file(folder_.get(), name, path_ + "/" + name);
  if (file.bytes() > longest_index)
    refuse_file(file.shown(), "has {} bytes, of at most {}", file.bytes(), longest_index);
  const AlignedBytes buffer(InFile::needed_for(0, file.bytes()));
  const auto bytes = file.read(0, file.bytes(), buffer.bytes());
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

// One file of a checkpoint may lack nothing, and not be another one's.
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
      // What the index says is elsewhere is another one of that name.
      if (!index_.empty() && (indexed == index_.end() || indexed->second != names_[f])) continue;
      files[f].boxes.push_back({tensors[t].name, tensors[t].type, {reader.offsets()[t], tensors[t].shape}});
      if (const auto partial = partial_.find(tensors[t].name); partial != partial_.end())
        files[f].boxes.back().shape = partial->second;
    }
  }
  sum = long_sum_of(sums);
  return files;
}

std::string text_of(std::span<const Rename> renames) {
  std::string text;
  for (const Rename &rename : renames)
    text += format_text("{} {} {} {} {} {}\n", quote_json(rename.theirs), quote_json(rename.ours), rename.from_row,
                        rename.to_row, rename.row_count, rename.transposed);
  return long_sum_of(text);
}

}  // namespace

LoadResult load_weights(comm::Team &team, const Waiter &waiter, const std::string &path, const LoadedModel &model,
                        std::span<const Rename> renames, const LoadOptions &options) {
  LoadResult result;
  comm::agree_on(team, "what is loaded",
                 format_text("layout {:016x}, renames {}, allow_missing {}, allow_unexpected {}", model.layout_hash,
                             text_of(renames), options.allow_missing, options.allow_unexpected));
  std::optional<WeightFiles> files;
  std::string sum, misfits;
  LoadPlan plan;
  comm::attempt_together(team, "a load's plan", [&] {
    files.emplace(path);
    plan = plan_weights(model.shards, files->list(sum), renames, team.rank());
    misfits = list_misfits(plan, options);
  });
  comm::agree_on(team, "what the files have", sum);
  if (!misfits.empty()) fail(FSDP_INVALID_ARGUMENT, "{} does not fit the model{}", path, misfits);
  comm::attempt_together(team, "a load's files", [&] {
    const std::function<void()> poll = [&] { waiter.poll(); };
    RowTaker taker(model.shards, model.write, poll);
    model.begin();
    for (const LoadedFile &file : plan.files) taker.take(files->open(file.file), file.rows);
    result.wanted_bytes = taker.wanted_bytes(), result.read_bytes = taker.read_bytes();
  });
  return result;
}

}  // namespace fsdp::checkpoint
