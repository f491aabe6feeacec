// SPDX-License-Identifier: Apache-2.0
// Files of weights of any program: a safetensors file, a folder of them with or without Hugging Face's index, or a
// checkpoint of PyTorch's distributed checkpoint. It may also be one of our checkpoints, or a folder of them. Files may
// have any names except "._*", under which macOS keeps attributes of other files. Links of other programs are followed,
// because Hugging Face's cache consists of links; links in our checkpoints are not.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/fd.h"
#include "checkpoint/files/shard_reader.h"
#include "checkpoint/format/box.h"
#include "checkpoint/format/manifest.h"

namespace fsdp::checkpoint {

// The files of weights under a path.
class WeightFiles {
 public:
  explicit WeightFiles(const std::string &path);

  // Is it one of our checkpoints? If so, none of its weights are missing.
  bool is_checkpoint() const { return !known_.empty(); }
  size_t count() const { return names_.size(); }
  ShardReader open(size_t number) const {
    return ShardReader(folder_.get(), names_[number], shown(number),
                       is_checkpoint() ? LinkPolicy::refused : LinkPolicy::followed);
  }
  // Lists the contents of the files; `sum` gets one checksum of all headers.
  std::vector<StoredFile> list(std::string &sum) const;

 private:
  std::string shown(size_t number) const { return is_file_ ? path_ : path_ + "/" + names_[number]; }
  bool open_file();
  void open_folder_of_files();
  void open_newest();
  void open_checkpoint();
  std::string read_text(const char *name) const;
  void check(const ShardReader &reader, size_t number) const;

  std::string path_;
  Fd folder_;
  bool is_file_ = false;
  std::vector<std::string> names_;
  std::map<std::string, std::string> index_;  // {tensor: file}; empty: there is no index
  // Only for one of our checkpoints: its files, and the shapes of tensors of which it has only parts.
  std::map<std::string, ManifestFile> known_;
  std::map<std::string, std::vector<uint64_t>> partial_;
};

}  // namespace fsdp::checkpoint
