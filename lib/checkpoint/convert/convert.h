// SPDX-License-Identifier: Apache-2.0
// Weights from one form of files to another: a checkpoint to a Hugging Face folder, and files of weights to a
// checkpoint. One process; the memory is that of the reader's buffer, of the writer's staging and, where tensors are
// transposed, of a window, whatever the sizes of tensors.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/convert/new_files.h"

namespace fsdp::checkpoint {

struct ConsolidateChoice {
  std::vector<Rename> renames;          // as a load has them: they are gone backwards
  const ElementType *as = nullptr;      // of all that can be converted; NULL: as they are
  uint64_t most_bytes = 5'000'000'000;  // of tensors in a file, unless one of them is larger
  std::string copied_folder;            // whose configuration and tokenizer are copied; empty: none
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
