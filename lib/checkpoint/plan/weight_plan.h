// SPDX-License-Identifier: Apache-2.0
// Which weights of files that others wrote go where in a model: by name, or as renames say. Pure, and the same on every
// rank but for the rows that are its own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "checkpoint/format/box.h"
#include "checkpoint/plan/load_plan.h"

namespace fsdp::checkpoint {

// What tensors of files that others wrote are called here, and which rows of them are which of ours.

// A tensor of theirs, or rows of it, that is ours, or rows of it. One of theirs may be several of ours, and one of ours
// several of theirs.
struct Rename {
  std::string theirs, ours;           // each with at most one '*', which stands for the same text in both
  uint64_t from_row = 0, to_row = 0;  // of theirs as it is seen here, and of all of ours, whatever box the model has
  uint64_t row_count = 0;             // 0: all from from_row on
  bool transposed = false;            // theirs is seen with its rows for columns
};

// Refuses, by the name of the list, what can be in no list: INVALID_ARGUMENT.
void check_renames(std::span<const Rename> renames, std::string_view call);

// The text that the '*' of a pattern stands for in a name; "" where it has none and is the name; nothing: no match.
std::optional<std::string> match_name(const std::string &pattern, const std::string &name);
// The name that a pattern makes of that text.
std::string fill_name(std::string pattern, const std::string &text);

// Files are numbered as they are given. Of missing rows of a tensor the plan's `other` tells, of tensors `missing`.
LoadPlan plan_weights(const ModelShards &shards, std::span<const StoredFile> files, std::span<const Rename> renames,
                      uint32_t rank);

}  // namespace fsdp::checkpoint
