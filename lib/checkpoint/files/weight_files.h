// SPDX-License-Identifier: Apache-2.0
// Files of weights of any program: a safetensors file, a folder of them with Hugging Face's index or without, what
// PyTorch's distributed checkpoint writes, and a checkpoint of ours or a folder of these. Names may be any that a file
// can have, but for "._*", in which macOS keeps attributes of other files. Links of others, of which Hugging Face's
// cache is made, are followed; those in a checkpoint of ours are not.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/fd.h"
#include "checkpoint/files/shard_reader.h"
#include "checkpoint/format/box.h"
#include "checkpoint/format/manifest.h"

namespace fsdp::checkpoint {

// The files of weights that a path leads to.
class WeightFiles {
 public:
  explicit WeightFiles(const std::string &path);

  // Is it one of ours? Then nothing of its weights is missing.
  bool is_checkpoint() const { return !known_.empty(); }
  size_t count() const { return names_.size(); }
  ShardReader open(size_t number) const {
    return ShardReader(folder_.get(), names_[number], shown(number),
                       is_checkpoint() ? LinkPolicy::refused : LinkPolicy::followed);
  }
  // What is in them, and a sum of all headers.
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
  std::map<std::string, std::string> index_;  // {tensor: file}; empty: there is none
  // Of a checkpoint of ours; the shapes of tensors that it has only parts of.
  std::map<std::string, ManifestFile> known_;
  std::map<std::string, std::vector<uint64_t>> partial_;
};

}  // namespace fsdp::checkpoint
