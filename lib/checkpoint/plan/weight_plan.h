// SPDX-License-Identifier: Apache-2.0
// Which weights of files that others wrote go where in a model: by name, or as renames say. Pure, and the same on every
// rank but for the rows that are its own.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "checkpoint/plan/load_plan.h"

namespace fsdp::checkpoint {

// A tensor of theirs, or rows of it, that is ours, or rows of it. One of theirs may be several of ours, and one of ours
// several of theirs.
struct Rename {
  std::string theirs, ours;           // each with at most one '*', which stands for the same text in both
  uint64_t from_row = 0, to_row = 0;  // of theirs as it is seen here, and of all of ours, whatever box the model has
  uint64_t row_count = 0;             // 0: all from from_row on
  bool transposed = false;            // theirs is seen with its rows for columns
};

// What is in one of their files: boxes of tensors.
struct StoredBox {
  std::string name;
  const ElementType *type;
  Box box;
  std::vector<uint64_t> shape = {};  // of the tensor, whose other boxes may not be there; empty: all of them are
};
struct StoredFile {
  std::vector<StoredBox> boxes;
};

// Refuses, by the name of the list, what can be in no list: INVALID_ARGUMENT.
void check_renames(std::span<const Rename> renames, std::string_view call);

// Files are numbered as they are given. Of missing rows of a tensor the plan's `other` tells, of tensors `missing`.
LoadPlan plan_weights(const ModelShards &shards, std::span<const StoredFile> files, std::span<const Rename> renames,
                      uint32_t rank);

}  // namespace fsdp::checkpoint
