// SPDX-License-Identifier: Apache-2.0
// Writes new tensors into files of a folder that has no name yet, while a second thread brings them to the disk.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/convert/new_tensor.h"
#include "checkpoint/convert/new_tensor_reader.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/files/shard_writer.h"

namespace fsdp::checkpoint {

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

}  // namespace fsdp::checkpoint
