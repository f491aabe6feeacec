// SPDX-License-Identifier: Apache-2.0
// Converts weights between file formats: a checkpoint to a Hugging Face folder, and files of weights to a checkpoint.
// It runs in one process. For tensors of any size, it needs memory only for the reader's buffer, the writer's staging
// and, for transposed tensors, a window.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/convert/new_tensor.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/shard_writer.h"
#include "checkpoint/plan/weight_plan.h"

namespace fsdp::checkpoint {

// Called often to report that `done` of `all` bytes are done. Throws to end the work.
using Progress = std::function<void(uint64_t done, uint64_t all)>;

struct NewFile {
  std::string name;
  std::vector<const NewTensor *> tensors;
  bool as_shard = true;  // the header has the data that PyTorch's distributed checkpoint reads
};
// Writes new tensors into files of a folder that has no name yet, while a second thread writes them to the disk.
// Returns the written files in the order of `files`.
std::vector<WrittenShard> write_new_files(const NewCheckpoint &folder, const std::vector<NewFile> &files,
                                          NewTensorReader &reader, const Progress &progress);
// The number of bytes of the tensor's data in a file.
uint64_t data_bytes_of(const NewTensor &tensor);

// Parses renames in the form that users write: a JSON array of {"theirs", "ours", "from_row", "to_row", "row_count",
// "transposed"}, of which the first two are required. The fields mean the same as in fsdp_rename. `file` is for
// messages. Throws INVALID_ARGUMENT, which lists unknown names and the known ones.
std::vector<Rename> parse_renames(std::string_view text, std::string_view file);
std::vector<Rename> read_renames(const std::string &path);

// Copies the other files of a Hugging Face folder: configuration, tokenizer, model card. Files of weights, their
// indices and names that begin with a '.' are left out. Links are followed. Returns the names of the copied files.
std::vector<std::string> copy_plain_files(const std::string &from, const NewCheckpoint &to);

struct ConsolidateChoice {
  std::vector<Rename> renames;         // the renames of a load; here they are applied in reverse
  const ElementType *as = nullptr;     // type to which all convertible tensors are converted; NULL: types stay
  uint64_t max_bytes = 5'000'000'000;  // limit of tensors' bytes in a file, unless one tensor is larger
  std::string copied_folder;           // folder from which configuration and tokenizer are copied; empty: no folder
};
// The result of a conversion.
struct Converted {
  std::string path;
  uint64_t tensors = 0, bytes = 0;  // number of tensors, and of bytes in files
  std::vector<std::string> files;   // files of weights
  std::vector<std::string> copied;
};
// `checkpoint` is a checkpoint, or a folder of checkpoints, whose newest one is used. The folder `out` must not exist.
// It appears when it is complete, or not at all.
Converted consolidate(const std::string &checkpoint, const std::string &out, const ConsolidateChoice &choice,
                      const CastElements &cast, const Progress &progress);

// Makes a checkpoint of the given step in `folder` from a file of weights or a folder of such files. Makes `folder` if
// it does not exist.
Converted import_weights(const std::string &weights, const std::string &folder, std::span<const Rename> renames,
                         uint64_t step, const CastElements &cast, const Progress &progress);

}  // namespace fsdp::checkpoint
