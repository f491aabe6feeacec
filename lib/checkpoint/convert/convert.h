// SPDX-License-Identifier: Apache-2.0
// Weights from one form of files to another: a checkpoint to a Hugging Face folder, and files of weights to a
// checkpoint. One process; the memory is that of the reader's buffer, of the writer's staging and, where tensors are
// transposed, of a window, whatever the sizes of tensors.
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

// Writes new tensors into files of a folder that has no name yet, while a second thread brings them to the disk.

// Called often: so many bytes are done, of so many. Throws what ends the work.
using Progress = std::function<void(uint64_t done, uint64_t all)>;

struct NewFile {
  std::string name;
  std::vector<const NewTensor *> tensors;
  bool as_shard = true;  // with what PyTorch's distributed checkpoint reads in its header
};

// In the order of the files.
std::vector<WrittenShard> write_new_files(const NewCheckpoint &folder, const std::vector<NewFile> &files,
                                          NewTensorReader &reader, const Progress &progress);

// Of all tensors, as they will be in files.
uint64_t data_bytes_of(const NewTensor &tensor);

// Renames as people write them down: a JSON array of {"theirs", "ours", "from_row", "to_row", "row_count",
// "transposed"}, of which the first two must be there. They mean what fsdp_rename means.

// `file` is for messages. INVALID_ARGUMENT names what is unknown, and what is known.
std::vector<Rename> parse_renames(std::string_view text, std::string_view file);
std::vector<Rename> read_renames(const std::string &path);

// What lies beside weights in a Hugging Face folder: configuration, tokenizer, words about the model.

// Those files of a folder; of weights neither files nor indices, and nothing whose name begins with a '.'. Links are
// followed. Returns their names.
std::vector<std::string> copy_plain_files(const std::string &from, const NewCheckpoint &to);

struct ConsolidateChoice {
  std::vector<Rename> renames;         // as a load has them: they are gone backwards
  const ElementType *as = nullptr;     // of all that can be converted; NULL: as they are
  uint64_t max_bytes = 5'000'000'000;  // of tensors in a file, unless one of them is larger
  std::string copied_folder;           // whose configuration and tokenizer are copied; empty: none
};

// What is there now.
struct Converted {
  std::string path;
  uint64_t tensors = 0, bytes = 0;  // of files
  std::vector<std::string> files;   // of weights
  std::vector<std::string> copied;
};

// `checkpoint`: one, or a folder of them, of which the newest is taken. The folder `out` must not be there; it is there
// when it is whole, or not at all.
Converted consolidate(const std::string &checkpoint, const std::string &out, const ConsolidateChoice &choice,
                      const CastElements &cast, const Progress &progress);

// A file of weights, or a folder of them, as a checkpoint of that step in `folder`, which is made if it is not there.
Converted import_weights(const std::string &weights, const std::string &folder, std::span<const Rename> renames,
                         uint64_t step, const CastElements &cast, const Progress &progress);

}  // namespace fsdp::checkpoint
