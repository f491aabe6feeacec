// SPDX-License-Identifier: Apache-2.0
// What tensors of files that others wrote are called here, and which rows of them are which of ours.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace fsdp::checkpoint {

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

}  // namespace fsdp::checkpoint
